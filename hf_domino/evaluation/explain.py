"""Explain one round: the proposals of the drafter with their probabilities, and the choices of the target.

The round is made with the code of the decoding loop: it is a tree if the drafter's configuration asks for one and the
target supports it, and otherwise a chain. Proposals are chosen from the distributions of a call to `generate`, which
include the processors of the target's generation configuration.

Shapes: T tokens so far, C depths, N proposals, H hidden size, V vocabulary, D drafted tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_domino._common.cache_name import CACHE
from hf_domino._common.errors import invalid_argument
from hf_domino.decoding.caches import GrowingCache
from hf_domino.decoding.drafting import ContextSession
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.runner import TargetRunner
from hf_domino.decoding.sampling import TokenDistribution
from hf_domino.decoding.stopping import KnownStops
from hf_domino.decoding.support import why_chain
from hf_domino.decoding.tree import Tree
from hf_domino.evaluation.prepared import prepared
from hf_domino.integration.call_checks import check_inputs
from hf_domino.methods import DominoDraftModel
from hf_domino.targets.compatibility import fitting_drafter
from hf_domino.targets.view import PER_POSITION, TargetModel
from hf_domino.training.evidence.acceptance import chosen_logits


@dataclass(frozen=True)
class Round:
    """One greedy round. Tensors are on the CPU; distributions are in fp32, after the processors of `generate`.

    Position 0 is the anchor, and proposal n has position n + 1.

    Args:
        anchor (`int`): The token that the block starts from.
        proposals (`torch.Tensor`): Token ids `[N]` that the drafter proposed; in a tree, parents precede children.
        parents (`torch.Tensor`): The position before each proposal, `[N]`.
        chances (`torch.Tensor`, *optional*): The probability that each proposal is accepted together with all before
            it, `[N]`, as a new drafter estimates it; None for a chain, which does not need it.
        base_probs (`torch.Tensor`): The distributions `[N, V]` of the backbone alone, which knows only the anchor.
        corrected_probs (`torch.Tensor`): The distributions `[N, V]` after the correction head has read the anchor and
            the proposals before; equal to `base_probs` if nothing is corrected.
        target_probs (`torch.Tensor`): The target's distributions `[N + 1, V]`, each after the proposals before it.
        confidences (`torch.Tensor`, *optional*): The probability that each proposal is accepted if those before it are,
            `[N]`, from the drafter's own confidence head, if it has one.
    """

    anchor: int
    proposals: torch.Tensor
    parents: torch.Tensor
    chances: torch.Tensor | None
    base_probs: torch.Tensor
    corrected_probs: torch.Tensor
    target_probs: torch.Tensor
    confidences: torch.Tensor | None = None

    @cached_property
    def choices(self) -> torch.Tensor:
        """The target's own tokens `[N + 1]`, each after the proposals before it."""
        return self.target_probs.argmax(dim=-1)

    @cached_property
    def path(self) -> list[int]:
        """Positions that the round keeps, from the anchor on: each is the target's choice after the one before."""
        count, path = Tree(self.proposals[None], self.parents[None]).accepted(self.choices[None])
        assert path is not None  # because there are parents
        return path[0, : int(count) + 1].tolist()

    @property
    def num_accepted(self) -> int:
        """Number of accepted proposals, which are the target's own tokens."""
        return len(self.path) - 1

    @property
    def committed(self) -> torch.Tensor:
        """Tokens that the round emits: accepted proposals and the bonus token, `[num_accepted + 1]`."""
        return self.choices[self.path]

    def walk(self, position: int = 0, depth: int = 0) -> Iterator[tuple[int, int]]:
        """Yield positions and their depths, branch by branch, the likeliest first."""
        yield position, depth
        for child, parent in enumerate(self.parents.tolist(), 1):
            if parent == position:
                yield from self.walk(child, depth + 1)

    def text(self, show: Callable[[int], str] = str) -> str:
        """Return a line for each token: a star if it is kept, its chance, the token, and the target's choice after it.

        Args:
            show (`Callable`, *optional*): Function that returns the text of a token id.
        """
        tokens = [self.anchor, *self.proposals.tolist()]
        choices = self.choices.tolist()
        lines = []
        for place, depth in self.walk():
            kept = "*" if place in self.path else " "
            chance = ""
            if self.chances is not None and place:
                chance = f"{self.chances[place - 1]:.0%}"
            lines.append(f"{kept} {chance:>4} {'  ' * depth}{show(tokens[place])} -> {show(choices[place])}")
        return "\n".join(lines)


def explain_round(
    drafter: DominoDraftModel, target: PreTrainedModel, input_ids: torch.Tensor, **generate_kwargs: Any
) -> Round:
    """Draft and verify one full block or tree after a text, greedily, and return everything that decides the round.

    Nothing is changed or kept between calls. The target therefore reads the whole text again, which takes longer than a
    round.

    Args:
        drafter (`DominoDraftModel`): The drafter. `drafter.view(projector_type="dflash")` leaves out its head,
            `drafter.view(draft_tree_size=None)` forces a chain, and `draft_tree_size=n` asks for a tree of n nodes.
        target (`PreTrainedModel`): The target.
        input_ids (`torch.Tensor`): The tokens so far, `[1, T]` with T at least 2. The last one is the anchor.
        generate_kwargs: Arguments of `generate` that change the distribution of the next token, such as
            `repetition_penalty`.

    Returns:
        [`Round`]: The proposals, the distributions from which they were chosen, and the target's distributions.

    Raises:
        ValueError: If the drafter does not fit the target, `generate` could not run the round, or `input_ids` is not a
            single text of at least two tokens.

    Example:
    ```python
    >>> import torch
    >>> from transformers import Qwen3Config, Qwen3ForCausalLM
    >>> from hf_domino import DominoConfig, DominoDraftModel, explain_round
    >>> target = Qwen3ForCausalLM(Qwen3Config(
    ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
    ...     num_key_value_heads=1, head_dim=16,
    ... ))
    >>> drafter = DominoDraftModel(DominoConfig.for_target(target.config, block_size=8))
    >>> opened = explain_round(drafter, target, torch.tensor([[5, 9, 33]]))
    >>> opened.anchor, opened.base_probs.shape, len(opened.committed) == opened.num_accepted + 1
    (33, torch.Size([8, 64]), True)

    ```
    """
    drafter = fitting_drafter(drafter, target, "drafter")
    if input_ids.dim() != 2 or len(input_ids) != 1 or input_ids.shape[1] < 2:
        remedy = "Give one text and the token that its block starts from."
        raise invalid_argument("the shape of input_ids", "[1, T] with T at least 2", list(input_ids.shape), remedy)
    most = drafter.config.num_draft_tokens + 1
    model, input_ids, (processors, criteria, _), kwargs = prepared(target, input_ids, most, **generate_kwargs)
    distribution = TokenDistribution(processors, KnownStops.among(criteria))
    view = TargetModel(model, drafter.config.layer_ids(model.config))
    return _explain(drafter, view, input_ids, distribution, kwargs)


@torch.no_grad()
def _explain(
    drafter: DominoDraftModel,
    target: TargetModel,
    input_ids: torch.Tensor,
    distribution: TokenDistribution,
    kwargs: dict[str, Any],
) -> Round:
    check_inputs(target.model, input_ids, kwargs)
    # The target has not read the anchor yet.
    before = {name: kwargs[name][..., :-1] for name in PER_POSITION if kwargs.get(name) is not None}
    runner = TargetRunner(target, kwargs | before, GrowingCache(kwargs[CACHE]))
    prefixes = Prefixes.of(input_ids)
    _, captured = runner.prefill(input_ids[:, :-1])
    runner.begin([0])
    drafter.config.check_supports("explain_round")
    assert captured is not None  # because all methods that support this read hidden states
    features = drafter.fuse_context([states.to(drafter.device) for states in captured])
    anchor = torch.tensor([[input_ids.shape[1] - 1]], device=input_ids.device)
    first = drafter.config.label_offset
    blocks = drafter.draft_blocks(target, input_ids, features, anchor)[0]  # [1, K, H]
    draft_hidden = blocks[:, first : first + drafter.config.num_draft_tokens]
    # Propose as in a first round; the nodes of a tree have chances `[N]`.
    size = drafter.config.fixed_tree_size
    session = ContextSession(drafter, target, distribution.without_state())
    session.observe(captured, input_ids.shape[1] - 1)
    if size is not None and why_chain(runner, session) is not None:
        size = None
    tree = session.propose(prefixes, drafter.config.num_draft_tokens, num_nodes=size)
    logits, _ = runner.forward_block(prefixes.last(), tree)
    seen = tree.seen_by(prefixes)
    parents = torch.arange(tree.num_nodes)
    if tree.parents is not None:
        parents = tree.parents[0].cpu()
    behind = Prefixes(seen.ids[parents], [seen.lengths[parent] for parent in parents], [0] * tree.num_nodes)
    depths = (tree.depths[0, 1:] - 1).to(draft_hidden.device)
    base_logits, corrected_logits = _draft_logits(drafter, target, draft_hidden, prefixes, depths, seen)
    read = torch.cat((prefixes.last()[0], tree.tokens[0]))[parents]  # [N]
    confidences = drafter.confidence(draft_hidden[0, depths], read)
    chances = tree.chances
    if chances is not None:
        chances = chances[0].cpu()
    if confidences is not None:
        confidences = confidences.cpu()
    return Round(
        anchor=int(input_ids[0, -1]),
        proposals=tree.tokens[0].cpu(),
        parents=parents,
        chances=chances,
        base_probs=_probs(session.distribution, prefixes, behind, base_logits),
        corrected_probs=_probs(session.distribution, prefixes, behind, corrected_logits),
        target_probs=_probs(distribution, prefixes, seen, logits[0]),
        confidences=confidences,
    )


def _draft_logits(
    drafter: DominoDraftModel,
    target: TargetModel,
    draft_hidden: torch.Tensor,
    prefixes: Prefixes,
    depths: torch.Tensor,
    seen: Prefixes,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return base and corrected logits `[N, D]` of the nodes at these depths, after their paths' tokens are read."""
    states = None
    head = drafter.head
    if head is not None:
        read = seen.ids[1:, prefixes.lengths[0] - 1 : -1]  # [N, C], from the anchor on
        hidden = draft_hidden[:, : read.shape[1]].expand(len(read), -1, -1)
        states = head.read(target, read, hidden)[torch.arange(len(read)), depths]
    is_corrected = depths >= drafter.config.pure_draft_prefix_len
    return chosen_logits(drafter, target, draft_hidden[0, depths], states, is_corrected)


def _probs(distribution: TokenDistribution, prefixes: Prefixes, seen: Prefixes, logits: torch.Tensor) -> torch.Tensor:
    """Return the probabilities `[N, V]`, on the CPU, at positions that see these texts."""
    scores = distribution.scores(prefixes, logits[None], lambda: seen)
    return distribution.vocabulary.scatter(scores).softmax(dim=-1)[0].cpu()
