"""The operations: each one validates its inputs, then runs the kernel or its reference.

Shapes: B rows, L branches per row, S branches per row at the previous depth, V vocabulary, M candidates, R low rank, H
width of embeddings, G width of the state.
"""

from __future__ import annotations

from types import ModuleType

import torch

from . import reference
from .checks import check_advance, check_choice, check_corrections, check_gru
from .dispatch import runs_triton


def correct_and_choose(
    base_logits: torch.Tensor,
    low_rank: torch.Tensor,
    up_weight: torch.Tensor,
    candidate_ids: torch.Tensor | None = None,
    *,
    noise: torch.Tensor | None = None,
    temperature: float | None = None,
) -> torch.Tensor:
    """Correct the base logits and choose one token per row: argmax of base + W2 SiLU(low_rank).

    This is the correction head of Domino (arXiv 2605.29707). SiLU and corrections are rounded to the dtype of W2, and
    corrected logits to that of the base logits; sums are fp32. If logits are equal, the first one wins, as with
    `torch.argmax`.

    With standard exponential noise E, one number per token, it takes the argmax of corrected / temperature - log E.
    This is a draw from the softmax. It equals the argmax of softmax / E, and therefore the draw of `torch.multinomial`
    if its generator draws this noise. Noise of 0 is replaced by the smallest normal number of fp32.

    Args:
        base_logits (`torch.Tensor`): Base logits of all tokens, `[B, V]`, or of the candidates, `[B, M]`.
        low_rank (`torch.Tensor`): Sum of the products of W1 with the draft hidden state and the prefix state, `[B, R]`.
        up_weight (`torch.Tensor`): W2, `[V, R]`.
        candidate_ids (`torch.Tensor`, *optional*): Tokens to choose among, int64 `[B, M]`; None for all tokens.
        noise (`torch.Tensor`, *optional*): Standard exponential noise of all tokens, even if candidates are given, fp32
            `[B, V]`; None for the most likely token.
        temperature (`float`, *optional*, defaults to 1): Temperature to sample at; only with noise.

    Returns:
        `torch.Tensor`: Token ids, int64 `[B]`.

    Raises:
        ValueError: If shapes, dtypes or devices do not fit, or a temperature is given without noise.

    Example:
    ```python
    >>> import torch
    >>> from domino_kernels import correct_and_choose
    >>> base, low_rank = torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([[1.0]])
    >>> up_weight = torch.tensor([[0.0], [4.0], [0.0]])
    >>> correct_and_choose(base, low_rank, up_weight)
    tensor([1])
    >>> correct_and_choose(base[:, [2, 0]], low_rank, up_weight, torch.tensor([[2, 0]]))
    tensor([0])
    >>> correct_and_choose(base, low_rank, up_weight, noise=torch.tensor([[1.0, 3.0, 0.1]]))  # 3, 2.8 and 4.3
    tensor([2])

    ```
    """
    check_choice(base_logits, low_rank, up_weight, candidate_ids, noise, temperature)
    implementation = _implementation("triton_choose", base_logits, low_rank, up_weight)
    return implementation.correct_and_choose(
        base_logits, low_rank, up_weight, candidate_ids, noise=noise, temperature=temperature
    )


def gru_step(
    inputs: torch.Tensor,
    state: torch.Tensor,
    weight_ih: torch.Tensor,
    weight_hh: torch.Tensor,
    embedding: torch.Tensor | None = None,
) -> torch.Tensor:
    """Advance a bias-free GRU by one token, with the gates in torch's order r, z, n.

    r = sigmoid(W_ir x + W_hr h), z = sigmoid(W_iz x + W_hz h), n = tanh(W_in x + r * (W_hn h)), and the next state is
    (1 - z) * n + z * h (Cho et al. 2014, in the form of `torch.nn.GRU`). The kernel computes in fp32 and rounds the
    next state once; PyTorch also rounds the gates.

    Args:
        inputs (`torch.Tensor`): Embeddings `[B, H]`, or with `embedding` token ids, int64 `[B]`, all in [0, V).
        state (`torch.Tensor`): Prefix state `[B, G]`.
        weight_ih (`torch.Tensor`): `[3G, H]`.
        weight_hh (`torch.Tensor`): `[3G, G]`.
        embedding (`torch.Tensor`, *optional*): Table `[V, H]` in which ids are looked up. If the target's embedding
            module does more than a lookup, pass embeddings as `inputs` instead.

    Returns:
        `torch.Tensor`: Next prefix state `[B, G]`.

    Raises:
        ValueError: If shapes, dtypes or devices do not fit.

    Example:
    ```python
    >>> import torch
    >>> from domino_kernels import gru_step
    >>> state, weight_ih, weight_hh = torch.zeros(1, 2), torch.zeros(6, 3), torch.zeros(6, 2)
    >>> weight_ih[4] = 20.0  # the candidate n of unit 0
    >>> gru_step(torch.ones(1, 3), state, weight_ih, weight_hh)  # z = 1/2
    tensor([[0.5000, 0.0000]])

    ```
    """
    check_gru(inputs, state, weight_ih, weight_hh, embedding)
    implementation = _implementation("triton_gru", state, inputs, weight_ih, weight_hh)
    return implementation.gru_step(inputs, state, weight_ih, weight_hh, embedding)


def advance_branches(
    products: torch.Tensor, state: torch.Tensor, owners: torch.Tensor, weight_hh: torch.Tensor
) -> torch.Tensor:
    """Advance the states of a tree's branches by one token each, like [`gru_step`] but from the products W_ih x.

    Args:
        products (`torch.Tensor`): The tokens' input products W_ih x, with the gates in the order r, z, n, `[B, L, 3G]`.
        state (`torch.Tensor`): Prefix states of the branches at the previous depth, `[B, S, G]`.
        owners (`torch.Tensor`): Which of those branches each branch continues, int64 `[B, L]`, all in [0, S).
        weight_hh (`torch.Tensor`): `[3G, G]`.

    Returns:
        `torch.Tensor`: Next prefix states `[B, L, G]`.

    Raises:
        ValueError: If shapes, dtypes or devices do not fit.

    Example:
    ```python
    >>> import torch
    >>> from domino_kernels import advance_branches
    >>> state = torch.tensor([[[0.0], [0.8]]])  # of two branches; behind the second one two go on
    >>> advance_branches(torch.zeros(1, 2, 3), state, torch.tensor([[1, 1]]), torch.zeros(3, 1))[..., 0]  # z = 1/2
    tensor([[0.4000, 0.4000]])

    ```
    """
    check_advance(products, state, owners, weight_hh)
    implementation = _implementation("triton_branches", state, products, weight_hh)
    return implementation.advance_branches(products, state, owners, weight_hh)


def correct_branches(
    base_logits: torch.Tensor,
    block_part: torch.Tensor,
    state_part: torch.Tensor,
    up_weight: torch.Tensor,
    candidate_ids: torch.Tensor,
) -> torch.Tensor:
    """Correct the base logits of a depth's candidates for each branch of a tree.

    Results are rounded as in [`correct_and_choose`].

    Args:
        base_logits (`torch.Tensor`): Base logits of the candidates, `[B, M]`.
        block_part (`torch.Tensor`): Product of W1 with the draft hidden state, `[B, R]`.
        state_part (`torch.Tensor`): Product of W1 with the prefix state of each branch, `[B, L, R]`.
        up_weight (`torch.Tensor`): W2, `[V, R]`.
        candidate_ids (`torch.Tensor`): The candidates, which all branches of a row share, int64 `[B, M]`.

    Returns:
        `torch.Tensor`: Corrected logits `[B, L, M]`, in the dtype of the base logits.

    Raises:
        ValueError: If shapes, dtypes or devices do not fit.

    Example:
    ```python
    >>> import torch
    >>> from domino_kernels import correct_branches
    >>> base, up_weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0], [0.0], [4.0]])
    >>> correct_branches(base, torch.zeros(1, 1), torch.tensor([[[0.0], [20.0]]]), up_weight, torch.tensor([[2, 0]]))
    tensor([[[ 1.,  2.],
             [81.,  2.]]])

    ```
    """
    check_corrections(base_logits, block_part, state_part, up_weight, candidate_ids)
    implementation = _implementation("triton_branches", base_logits, block_part, state_part, up_weight)
    return implementation.correct_branches(base_logits, block_part, state_part, up_weight, candidate_ids)


def _implementation(kernel: str, rows: torch.Tensor, *others: torch.Tensor) -> ModuleType:
    """Return the kernel's module or the references' module: kernels have no backward and read only plain tensors."""
    tensors = rows, *others
    needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    is_plain = all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in tensors)
    if needs_gradient or not is_plain or not runs_triton(rows):
        return reference
    # Each import is spelled out, because tools that bundle these files follow import statements.
    if kernel == "triton_choose":
        from . import triton_choose

        return triton_choose
    if kernel == "triton_branches":
        from . import triton_branches

        return triton_branches
    from . import triton_gru

    return triton_gru
