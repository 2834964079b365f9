"""Simulate over existing text what greedy generation would accept, without generating.

At every position, the drafter drafts a block with the true tokens as its prefix. A proposal is accepted only if all
earlier ones match the text, so teacher forcing gives exactly the accepted run of a real round. Going from anchor to
anchor, a -> a + accepted + 1, then visits the rounds of generation (arXiv 2605.29707).

Shapes: S sequence length, C hidden states kept per token, H hidden size, N anchors, K block size, M proposals of some
anchors, D drafted tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset
from transformers import PreTrainedModel, RepetitionPenaltyLogitsProcessor

from hf_domino.methods import DominoDraftModel
from hf_domino.methods.side_by_side import block_positions
from hf_domino.targets.packed import packed_linears
from hf_domino.targets.view import TargetModel
from hf_domino.training.evidence.meter import accepted_runs
from hf_domino.training.objective.anchors import block_labels
from hf_domino.training.objective.forward import (
    STATES,
    Batch,
    corrected_positions,
    draft_blocks,
    draft_logits,
    read_target,
)

Rounds = list[list[int]]  # for each sequence, the number of tokens that each of its rounds emits
ANCHORS_PER_FORWARD = 64


def simulate_acceptance(
    drafter: DominoDraftModel,
    target: PreTrainedModel,
    sequences: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    hidden_states: Sequence[torch.Tensor | None] | None = None,
) -> Rounds:
    """Simulate the acceptance lengths of the rounds that greedy generation would run over the target's own greedy text.

    Args:
        drafter (`DominoDraftModel`): The drafter.
        target (`PreTrainedModel`): The target.
        sequences (`Sequence[Sequence[int]]`): Token ids of each prompt with its continuation.
        prompt_lengths (`Sequence[int]`): Number of prompt tokens of each sequence; at least 1.
        hidden_states (`Sequence[torch.Tensor]`, *optional*): Hidden states of [`~training.CachedRows`], `[S, C, H]`
            each. Without them, the target runs.

    Returns:
        `list[list[int]]`: For each sequence, one entry per round: accepted proposals plus the bonus token. Rounds
        whose proposals would extend beyond the end of the sequence, which generation cuts, are left out.
    """
    texts = zip(sequences, prompt_lengths, hidden_states or [None] * len(sequences), strict=True)
    return simulate_rounds(drafter, target, texts)[1]


def simulate_rounds(
    drafter: DominoDraftModel,
    target: PreTrainedModel,
    texts: Iterable[tuple[Sequence[int] | torch.Tensor, int, torch.Tensor | None]],
) -> tuple[Rounds, Rounds]:
    """Simulate the rounds with base logits only and those of [`simulate_acceptance`], both in one simulation."""
    was_training = drafter.training
    drafter.eval()
    view = TargetModel(target, drafter.config.layer_ids(target.config))
    found: tuple[Rounds, Rounds] = ([], [])
    with packed_linears(target, drafter):
        for sequence, start, states in texts:
            batch = {"input_ids": torch.as_tensor(sequence, device=drafter.device)[None]}
            if states is not None:
                batch[STATES] = states.to(drafter.device)[None]
            lengths = accept_lengths(drafter, view, batch, start).tolist()
            for simulated, of_anchors in zip(found, lengths, strict=True):
                rounds: list[int] = []
                while (position := sum(rounds)) < len(of_anchors):
                    rounds.append(of_anchors[position])
                simulated.append(rounds)
    drafter.train(was_training)
    return found


@torch.no_grad()
def accept_lengths(
    drafter: DominoDraftModel,
    target: TargetModel,
    batch: Batch,
    first_anchor: int,
    sees_context: bool = True,
    observe: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """Compute the acceptance length of a round at every anchor of a sequence.

    Args:
        drafter (`DominoDraftModel`): The drafter.
        target (`TargetModel`): The target.
        batch (`dict[str, torch.Tensor]`): One sequence: `input_ids` `[1, S]`, and `hidden_states` `[1, S, C, H]` if the
            target need not run.
        first_anchor (`int`): First anchor; the last one is the last whose proposals lie inside the sequence.
        sees_context (`bool`, *optional*, defaults to `True`): Whether the drafter sees the context features.
        observe (`Callable`, *optional*): Called for each piece of the anchors in turn, with the positions `[M]` of its
            proposals in the sequence and the corrected logits `[M, D]` there.

    Returns:
        `torch.Tensor`: `[2, N]` int64, by base and corrected logits; N = max(0, S - num_draft_tokens - first_anchor).
    """
    input_ids = batch["input_ids"]
    config = drafter.config
    vocabulary = drafter.vocabulary.of_target(target)
    end = max(input_ids.shape[1] - config.num_draft_tokens, first_anchor)
    anchors = torch.arange(first_anchor, end, device=input_ids.device)
    if not len(anchors):
        return anchors.expand(2, -1)
    features = None
    if sees_context:
        features = drafter.fuse_context(read_target(target, batch)[0])
    is_corrected = corrected_positions(config, anchors.device)
    lengths = []
    penalty = target.model.generation_config.repetition_penalty
    for piece in anchors[None].split(ANCHORS_PER_FORWARD, dim=1):
        # No block of this piece sees positions from its last anchor on.
        blocks = {"input_ids": input_ids, "loss_mask": torch.ones_like(input_ids), "anchors": piece}
        seen = features
        if features is not None:
            seen = features[:, : int(piece.max())]
        hidden, states = draft_blocks(drafter, target, blocks, seen)
        labels, _ = block_labels(blocks, config, loss_decay=1.0)
        positions = (block_positions(piece, config.block_size) + 1 - config.label_offset).flatten()
        choices = []
        for logits in chosen_logits(drafter, target, hidden, states, is_corrected):
            scores = logits.flatten(0, 2)
            if penalty not in (None, 1.0):  # `generate` applies it to drafts, too, by the tokens before each position
                before = torch.arange(input_ids.shape[1], device=input_ids.device) < positions[:, None]  # [M, S]
                # The processor only needs to know which tokens occur, not how often, so the first token is the padding.
                prefixes = torch.where(before, input_ids, input_ids[:, :1])
                scores = RepetitionPenaltyLogitsProcessor(penalty)(prefixes, vocabulary.scatter(scores))
                scores = vocabulary.gather(scores)
            choices.append(vocabulary.ids(scores.argmax(dim=-1)))
        if observe is not None:
            observe(positions, logits.flatten(0, 2))
        is_correct = (torch.stack(choices) == labels.flatten()).view(2, *labels.shape[1:])
        lengths.append(accepted_runs(is_correct, config.label_offset) + 1)
    return torch.cat(lengths, dim=1)


def chosen_logits(drafter: DominoDraftModel, target: TargetModel, *positions: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute [`draft_logits`], and mask the tokens that the head does not consider in the corrected logits."""
    base, corrected = draft_logits(drafter, target, *positions)
    if drafter.head is not None:
        narrowed = drafter.head.narrow(base)
        if narrowed is not base:
            corrected = corrected + (narrowed - base)
    return base, corrected


def mean_acceptance_length(rounds: Sequence[Sequence[int]]) -> float | None:
    """Average over the rounds of all sequences; None without rounds."""
    lengths = [length for sequence in rounds for length in sequence]
    return sum(lengths) / len(lengths) if lengths else None


def first_examples(dataset: Any, count: int) -> list[Any]:
    """Return the first examples of a data set or a stream, at most `count`."""
    if not isinstance(dataset, IterableDataset):
        return [dataset[index] for index in range(min(count, len(dataset)))]
    return list(itertools.islice(dataset, count))


def simulated_metrics(drafter: DominoDraftModel, target: PreTrainedModel, batches: Iterable[Batch]) -> dict[str, float]:
    """Compute the mean acceptance lengths of simulated rounds over evaluation examples, collated into batches.

    It runs without autocast, as generation does. Examples without a supervised token are left out.
    """
    texts = []
    for batch in batches:
        for index, is_text in enumerate(batch["attention_mask"].bool()):
            supervised = batch["loss_mask"][index][is_text].nonzero()
            states = batch[STATES][index][is_text] if STATES in batch else None
            if len(supervised):
                texts.append((batch["input_ids"][index][is_text], max(1, int(supervised[0])), states))
    with torch.autocast(drafter.device.type, enabled=False):
        base, corrected = map(mean_acceptance_length, simulate_rounds(drafter, target, texts))
    if base is None or corrected is None:
        return {}
    metrics = {"walked_acceptance_length": corrected}
    if drafter.has_correction_head:
        metrics["base_walked_acceptance_length"] = base
    return metrics
