"""One round, opened: the proposals of the drafter with their reasons, and the choices of the target.

For looking at and for drawing. It is the round that the loop would make, by the code of a round: a tree where the
drafter's configuration asks for one and the target takes it, else a chain. Proposals are chosen from the laws of a call
to `generate`, the processors of the target's generation configuration included.

Shapes: T tokens so far, C depths, N proposals, H hidden size, V vocabulary, D tokens that are drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_domino._common.refusal import refusal
from hf_domino.decoding.caches import PER_POSITION
from hf_domino.decoding.drafting import DraftSession
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.runner import TargetRunner
from hf_domino.decoding.sampling import TokenLaw
from hf_domino.decoding.stopping import KnownStops
from hf_domino.decoding.tree import Tree
from hf_domino.decoding.tree_support import why_chain
from hf_domino.evaluation.prepared import prepared
from hf_domino.integration.call_checks import check_inputs
from hf_domino.methods import DominoDraftModel
from hf_domino.target.compatibility import check_drafter, check_target, drafter_of
from hf_domino.target.view import TargetModel
from hf_domino.training.evidence.acceptance import chosen_logits


@dataclass(frozen=True)
class Round:
    """What happened inside one greedy round, on the CPU; distributions are in fp32, after `generate`'s processors.

    Position 0 is the anchor, and proposal n stands at n + 1.

    Args:
        anchor (`int`): The token the block starts from.
        proposals (`torch.Tensor`): Token ids `[N]` that the drafter proposed; of a tree, parents before their children.
        parents (`torch.Tensor`): The position that each stands behind, `[N]`; in a chain the one before.
        chances (`torch.Tensor`, *optional*): That each is accepted with all before it, `[N]`, by what is known of a
            drafter at first; None for a chain, which is drafted without.
        base_probs (`torch.Tensor`): `[N, V]` of the backbone alone, which chose no token and knows none but the anchor.
        corrected_probs (`torch.Tensor`): `[N, V]` after the correction head has read the anchor and the proposals
            before; `base_probs` itself where nothing is corrected.
        target_probs (`torch.Tensor`): The target's `[N + 1, V]`, each position behind the proposals before it.
        confidences (`torch.Tensor`, *optional*): That each is accepted behind those before it, `[N]`, by the drafter's
            own confidence head, if it has one.
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
        """The target's own tokens `[N + 1]`, each behind the proposals before it."""
        return self.target_probs.argmax(dim=-1)

    @cached_property
    def path(self) -> list[int]:
        """Positions that the round keeps, from the anchor on: each is what the target chose at the one before."""
        choices, path = self.choices.tolist(), [0]
        for position, (parent, token) in enumerate(zip(self.parents.tolist(), self.proposals.tolist(), strict=True), 1):
            if parent == path[-1] and token == choices[parent]:
                path.append(position)
        return path

    @property
    def num_accepted(self) -> int:
        """Number of proposals, from the anchor on, that are the target's own tokens."""
        return len(self.path) - 1

    @property
    def committed(self) -> torch.Tensor:
        """The round's tokens: accepted proposals and the bonus token, `[num_accepted + 1]`."""
        return self.choices[self.path]

    def walk(self, position: int = 0, depth: int = 0) -> Iterator[tuple[int, int]]:
        """Positions and their depths, branch by branch, the likeliest first."""
        yield position, depth
        for child, parent in enumerate(self.parents.tolist(), 1):
            if parent == position:
                yield from self.walk(child, depth + 1)

    def text(self, show: Callable[[int], str] = str) -> str:
        """The round in lines: a star at what is kept, the token, its chance, and the target's own choice behind it.

        Args:
            show (`Callable`, *optional*): The text of a token id.
        """
        tokens, choices, lines = [self.anchor, *self.proposals.tolist()], self.choices.tolist(), []
        for place, depth in self.walk():
            kept = "*" if place in self.path else " "
            chance = "" if self.chances is None or not place else f"{self.chances[place - 1]:.0%}"
            lines.append(f"{kept} {chance:>4} {'  ' * depth}{show(tokens[place])} -> {show(choices[place])}")
        return "\n".join(lines)


def explain_round(
    drafter: DominoDraftModel, target: PreTrainedModel, input_ids: torch.Tensor, **generate_kwargs: Any
) -> Round:
    """Draft and verify one whole block or tree behind a text, greedily, and return everything that decides it.

    Nothing is changed, and nothing is kept between calls: the text is read anew, which takes longer than a round.

    Args:
        drafter (`DominoDraftModel`): The drafter. `drafter.view(projector_type="dflash")` leaves its head out,
            `drafter.view(draft_tree_size=None)` forces a chain, and a number there asks for a tree of so many nodes.
        target (`PreTrainedModel`): The target.
        input_ids (`torch.Tensor`): The tokens so far, the anchor last, `[1, T]` with T at least 2.
        generate_kwargs: Arguments of `generate` that change the law of the next token, such as `repetition_penalty`.

    Returns:
        [`Round`]: Proposals, the distributions they were chosen from, and the target's.

    Raises:
        ValueError: If the drafter does not fit the target, `generate` could not run the round, or `input_ids` is not
            one text of at least two tokens.

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
    check_drafter(drafter := drafter_of(drafter) or drafter)
    check_target(drafter.config, target)
    if input_ids.dim() != 2 or len(input_ids) != 1 or input_ids.shape[1] < 2:
        remedy = "Give one text and the token that its block starts from."
        raise refusal("the shape of input_ids", "[1, T] with T at least 2", list(input_ids.shape), remedy)
    most = drafter.config.num_draft_tokens + 1
    model, input_ids, (processors, criteria, _), kwargs = prepared(target, input_ids, most, **generate_kwargs)
    law = TokenLaw(processors, KnownStops.among(criteria))
    return _explain(drafter, TargetModel(model, drafter.config), input_ids, law, kwargs)


@torch.no_grad()
def _explain(
    drafter: DominoDraftModel, target: TargetModel, input_ids: torch.Tensor, law: TokenLaw, kwargs: dict[str, Any]
) -> Round:
    check_inputs(target.model, input_ids, kwargs)
    # The anchor has not been through the target.
    before = {name: kwargs[name][..., :-1] for name in PER_POSITION if kwargs.get(name) is not None}
    runner, prefixes = TargetRunner(target, kwargs | before), Prefixes.of(input_ids)
    _, captured = runner.prefill(input_ids[:, :-1])
    runner.begin([0])
    drafter.config.check_supports("explain_round")
    assert captured is not None  # of all kinds that have this
    features = drafter.fuse_context([states.to(drafter.device) for states in captured])
    anchor, first = torch.tensor([[input_ids.shape[1] - 1]], device=input_ids.device), drafter.config.label_offset
    blocks = drafter.draft_blocks(target, input_ids, features, anchor)[0]  # [1, K, H]
    draft_hidden = blocks[:, first : first + drafter.config.num_draft_tokens]
    # Proposals as in a first round, and the chances `[N]` of a tree's nodes.
    size, session = drafter.config.fixed_tree_size, DraftSession(drafter, target, law.without_state())
    session.observe(captured, input_ids.shape[1] - 1)
    if size is not None and why_chain(runner, session) is not None:
        size = None
    tree = session.propose(prefixes, drafter.config.num_draft_tokens, num_nodes=size)
    logits, _ = runner.check_block(prefixes.last(), tree)
    seen = tree.seen_by(prefixes)
    parents = torch.arange(tree.num_nodes) if tree.parents is None else tree.parents[0].cpu()
    behind = Prefixes(seen.ids[parents], [seen.lengths[parent] for parent in parents], [0] * tree.num_nodes)
    draft_law = session.law.over(drafter.vocabulary)
    base_logits, corrected_logits = _draft_logits(drafter, target, draft_hidden, prefixes, tree, seen)
    read = torch.cat((prefixes.last()[0], tree.tokens[0]))[parents]  # [N]
    depths = (tree.depths[0, 1:] - 1).to(draft_hidden.device)
    confidences = drafter.confidence(draft_hidden[0, depths], read)
    return Round(
        anchor=int(input_ids[0, -1]),
        proposals=tree.tokens[0].cpu(),
        parents=parents,
        chances=None if tree.chances is None else tree.chances[0].cpu(),
        base_probs=_probs(draft_law, prefixes, behind, base_logits),
        corrected_probs=_probs(draft_law, prefixes, behind, corrected_logits),
        target_probs=_probs(law, prefixes, seen, logits[0]),
        confidences=None if confidences is None else confidences.cpu(),
    )


def _draft_logits(
    drafter: DominoDraftModel,
    target: TargetModel,
    draft_hidden: torch.Tensor,
    prefixes: Prefixes,
    tree: Tree,
    seen: Prefixes,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Base logits and corrected ones of each node, `[N, D]`, with the tokens before it on its path read."""
    depths, states = (tree.depths[0, 1:] - 1).to(draft_hidden.device), None
    if (head := drafter.head) is not None:
        read = seen.ids[1:, prefixes.lengths[0] - 1 : -1]  # [N, C], from the anchor on
        known = draft_hidden[:, : read.shape[1]].expand(len(read), -1, -1)
        states = head.read(target, read, known)[torch.arange(len(read)), depths]
    is_corrected = depths >= drafter.config.pure_draft_prefix_len
    return chosen_logits(drafter, target, draft_hidden[0, depths], states, is_corrected)


def _probs(law: TokenLaw, prefixes: Prefixes, seen: Prefixes, logits: torch.Tensor) -> torch.Tensor:
    """Probabilities `[N, V]` of positions that see these texts, on the CPU."""
    scores = law.scores(prefixes, logits[None], lambda: seen)
    return law.vocabulary.scatter(scores).softmax(dim=-1)[0].cpu()
