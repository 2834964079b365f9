"""A chain of proposals by fused kernels: fixed shapes, and nothing that waits for the device.

A step is one GRU kernel, the state's part of the low rank, and one operation that corrects the logits and chooses. For
rows on a CUDA device where Triton is installed; see `kernels/CARD.md`.

Shapes: B batch, P proposals, H hidden size, M candidates, D tokens that are drafted, all of the target's or fewer.
"""

from __future__ import annotations

import torch
from transformers import TemperatureLogitsWarper

from domino_kernels import correct_and_choose, runs_triton
from domino_kernels.reference import add_noise
from hf_domino.decoding.candidates import with_luck
from hf_domino.decoding.sampling import TokenLaw
from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.kinds.domino import DominoHead
from hf_domino.target.view import TargetModel


def fits_kernels(
    drafter: DominoDraftModel, law: TokenLaw, base_logits: torch.Tensor, noise: torch.Tensor | None = None
) -> bool:
    """Whether kernels correct: nothing but the correction, a temperature and noise decides on the proposals.

    Args:
        drafter ([`DominoDraftModel`]): Gives the correction head, if it has one.
        law ([`TokenLaw`]): What drafts are chosen from.
        base_logits (`torch.Tensor`): `[B, P, D]`.
        noise (`torch.Tensor`, *optional*): What they are drawn with.
    """
    # Of steps, as torch 2.9 compiles no `not` of a list of processors.
    is_plain = not law.steps or (noise is not None and all(map(_is_temperature, law.processors)))
    head = drafter.head
    return is_plain and head is not None and runs_triton(base_logits) and head.fits_kernels(base_logits.device)


def _is_temperature(processor: object) -> bool:
    return type(processor) is TemperatureLogitsWarper


def choose_fused(
    drafter: DominoDraftModel,
    target: TargetModel,
    draft_hidden: torch.Tensor,
    base_logits: torch.Tensor,
    anchors: torch.Tensor,
    *,
    noise: torch.Tensor | None = None,
    temperature: float | None = None,
) -> torch.Tensor:
    """Choose a token of each position, from its candidate pool or the whole vocabulary: the most likely, or a draw.

    Args:
        drafter ([`DominoDraftModel`]): Gives the correction head.
        target ([`TargetModel`]): Gives embeddings.
        draft_hidden (`torch.Tensor`): Draft hidden states of the positions that predict, `[B, P, H]`.
        base_logits (`torch.Tensor`): `[B, P, D]`.
        anchors (`torch.Tensor`): The tokens before the first proposal, `[B]`.
        noise (`torch.Tensor`, *optional*): Standard exponential, of all columns also where there are pools, fp32
            `[B, P, D]`; the most likely tokens are taken if None.
        temperature (`float`, *optional*): Sample at this temperature, only with noise; defaults to 1.

    Returns:
        `torch.Tensor`: Proposals `[B, P]`.
    """
    head, vocabulary = DominoHead(drafter.prefix_gru, drafter.embed_proj), drafter.vocabulary
    up_weight, size = head.up.weight, drafter.config.draft_pool_size
    parts, logits, candidates = head.project_hidden(draft_hidden), base_logits, None
    if size is not None and size < base_logits.shape[2]:
        candidates = with_luck(base_logits, noise, temperature or 1.0).topk(size, dim=2).indices  # [B, P, M]
        logits = base_logits.gather(2, candidates)
    tokens, state = [anchors], head.initial_state(len(anchors))
    for index in range(base_logits.shape[1]):
        state = head.step(target, tokens[-1], state, parts[:, index])
        row = logits[:, index]
        pool, drawn = (None if part is None else part[:, index] for part in (candidates, noise))
        if index < drafter.config.pure_draft_prefix_len:
            column = _choose_uncorrected(row, pool, drawn, temperature)
        else:
            low_rank = parts[:, index] + head.project_state(state)
            column = correct_and_choose(row, low_rank, up_weight, pool, noise=drawn, temperature=temperature)
        tokens.append(vocabulary.ids(column))
    return torch.stack(tokens[1:], dim=1)


def _choose_uncorrected(
    logits: torch.Tensor, candidates: torch.Tensor | None, noise: torch.Tensor | None, temperature: float | None
) -> torch.Tensor:
    """Choose columns `[B]` by logits `[B, D]`, or `[B, M]` of candidates, as they are."""
    if noise is not None:
        logits = add_noise(logits, noise if candidates is None else noise.gather(1, candidates), temperature)
    choice = logits.argmax(dim=1, keepdim=True)
    return (choice if candidates is None else candidates.gather(1, choice))[:, 0]
