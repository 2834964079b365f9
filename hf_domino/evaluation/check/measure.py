"""Measure how many of a drafter's proposals its target accepts, as configured and in variants.

The text is generated greedily in real rounds. A variant then drafts a block at every position of that same text, so
that variants are compared on equal terms and the target does not run again.

Shapes: S tokens of prompt and text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from hf_domino.configuration.checks import readable_layers
from hf_domino.configuration.domino_config import DominoConfig
from hf_domino.decoding.loop import assisted_decoding
from hf_domino.evaluation.benchmark.timing import generate_timed
from hf_domino.evaluation.check.estimate import Estimate, estimate_mean
from hf_domino.evaluation.check.positions import distances
from hf_domino.evaluation.check.prompts import Prompt
from hf_domino.evaluation.prepared import GREEDY, prepared
from hf_domino.methods import DominoDraftModel
from hf_domino.targets.view import TargetModel, input_device
from hf_domino.training.evidence.acceptance import accept_lengths
from hf_domino.training.objective.forward import STATES

# Names of the variants; the first two are followed by the value.
LAYERS = "with target_layer_ids="
SHIFT_LABEL = "with shift_label="
AS_CONFIGURED = "as configured"
WITHOUT_HEAD = "without the correction head"
WITHOUT_CONTEXT = "without context"
LEAST_CONTEXT = 256  # rounds after fewer tokens are all in one group
TIMED_PROMPTS = 4  # the timed prompts take about as long as the rest of the self-test


class Text(NamedTuple):
    """The target's text after one prompt, generated with the drafter."""

    ids: torch.Tensor  # prompt and text, [1, S]
    prompt_length: int
    acceptance_lengths: list[int]  # of the rounds that made the text; the last one can be cut


class Measurement(NamedTuple):
    """The acceptance lengths, bonus token included, of each round of each text in one setting."""

    name: str
    texts: list[list[int]]

    @property
    def num_rounds(self) -> int:
        """Number of measured rounds."""
        return sum(len(rounds) for rounds in self.texts)

    @property
    def acceptance_length(self) -> Estimate:
        """Mean number of tokens per round, including the bonus token; NaN without rounds."""
        return estimate_mean(self.texts)

    @property
    def first_rate(self) -> Estimate:
        """Share of rounds whose first proposal was accepted; NaN without rounds."""
        return estimate_mean([[float(length > 1) for length in rounds] for rounds in self.texts])

    def to_dict(self) -> dict[str, Any]:
        """Return the measurement for JSON."""
        return {
            "name": self.name,
            "num_texts": len(self.texts),
            "num_rounds": self.num_rounds,
            "acceptance_length": self.acceptance_length.to_dict(),
            "first_accepted": self.first_rate.to_dict(),
        }


def by_context(texts: Sequence[Text]) -> list[Measurement]:
    """Group the real rounds of texts by the number of tokens before them, in powers of two; empty for one group."""
    found: dict[int, dict[int, list[int]]] = {}
    for index, text in enumerate(texts):
        position = text.prompt_length + 1  # the first token comes from no round
        for length in text.acceptance_lengths:
            most = max(LEAST_CONTEXT, 1 << (position - 1).bit_length())
            found.setdefault(most, {}).setdefault(index, []).append(length)
            position += length
    if len(found) < 2:
        return []
    return [Measurement(f"up to {most:,} tokens", list(found[most].values())) for most in sorted(found)]


def write_text(view: DominoDraftModel, target: PreTrainedModel, prompt: Prompt, max_new_tokens: int) -> Text:
    """Generate greedily in real rounds, with a view of the drafter that drafts full blocks."""
    model, asked, loop, kwargs = prepared(target, prompt.input_ids.to(input_device(target)), max_new_tokens)
    ids = assisted_decoding(model, asked, *loop, drafter=view, **kwargs)
    return Text(ids, asked.shape[1], list(view.stats.rows[0]))


def time_prompts(
    drafter: DominoDraftModel, target: PreTrainedModel, prompts: Sequence[Prompt], max_new_tokens: int
) -> list[float]:
    """Measure the speed-up over plain generation on each of the first prompts, drafting as configured."""
    # Acceptance alone does not decide the speed-up, because the cost of a round in decode steps depends on the machine.
    # An extra run over the first prompt lets the drafter measure the cost of its rounds.
    loops = plainly, partial(assisted_decoding, drafter=drafter.view())
    speed_ups = []
    for prompt in (prompts[0], *prompts[:TIMED_PROMPTS]):
        ids = prompt.input_ids.to(input_device(target))
        call: dict[str, Any] = GREEDY | {"max_new_tokens": max_new_tokens, "attention_mask": torch.ones_like(ids)}
        runs = (generate_timed(target, {"input_ids": ids}, **call, custom_generate=loop) for loop in loops)
        plain, drafted = (tokens.shape[1] / seconds for tokens, seconds in runs)
        speed_ups.append(drafted / plain)
    return speed_ups[1:]


def plainly(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
    """Generate as the target does without a drafter; this is a loop for `custom_generate` that avoids the patch."""
    # The patch ignores calls with positional arguments, because `generate` never makes them.
    return model._sample(input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs)


def variants_of(drafter: DominoDraftModel, num_target_layers: int) -> Iterator[tuple[str, DominoDraftModel]]:
    """Yield the drafter as configured and its variants, each as a name and a view of the drafter."""
    config = drafter.config
    yield AS_CONFIGURED, drafter.view()
    for layer_ids in _other_layer_ids(config, num_target_layers):
        yield f"{LAYERS}{layer_ids}", drafter.view(target_layer_ids=layer_ids)
    with suppress(ValueError):  # raised if the method or its head supports only one value
        yield f"{SHIFT_LABEL}{not config.shift_label}", drafter.view(shift_label=not config.shift_label)
    headless = config.headless()
    if drafter.has_correction_head and headless is not None:
        yield WITHOUT_HEAD, drafter.view(projector_type=headless.projector_type)
    yield WITHOUT_CONTEXT, drafter.view()


def _other_layer_ids(config: DominoConfig, num_target_layers: int) -> list[list[int]]:
    """Return other layers with which a drafter can have been trained: off by one, sorted, or by its default rule."""
    ids = list(config.target_layer_ids or ())
    candidates = [[layer + 1 for layer in ids], [layer - 1 for layer in ids], sorted(ids)]
    candidates.append(config.choose_layers(num_target_layers, len(ids)))
    readable = readable_layers(config, num_target_layers)
    # The weights fix the number of layers.
    fitting = (other for other in candidates if len(other) == len(ids) and set(other) <= set(readable) and other != ids)
    return list(map(list, dict.fromkeys(map(tuple, fitting))))


@torch.no_grad()
def measure_variants(
    drafter: DominoDraftModel, target: PreTrainedModel, text: Text
) -> tuple[dict[str, list[int]], torch.Tensor]:
    """Draft a block at every position of a text with each variant; a text shorter than a block gives no rounds.

    Returns the acceptance lengths of each variant, and the [`distances`] `[R, P, 3]` of the drafter as configured.
    """
    lengths = {}
    apart: list[torch.Tensor] = []
    size = drafter.config.block_size
    num_rounds = max(0, text.ids.shape[1] - text.prompt_length - size)
    all_layers = TargetModel(target).capture_kwargs(capture_all=True)
    num_new = text.ids.shape[1] - text.prompt_length
    outputs = target(input_ids=text.ids, use_cache=False, logits_to_keep=num_new + 1, **all_layers)
    own = outputs.logits[0, -num_new - 1 :]  # starts with the logits that chose the first new token

    def observe(places: torch.Tensor, logits: torch.Tensor) -> None:
        apart.append(distances(own[places.to(own.device) - text.prompt_length], logits, drafter.vocabulary))

    for name, view in variants_of(drafter, target.config.get_text_config(decoder=True).num_hidden_layers):
        target_view = TargetModel(target, view.config.layer_ids(target.config))
        states = [states.to(text.ids.device) for states in target_view.captured(outputs)]
        batch = {"input_ids": text.ids, STATES: torch.stack(states, dim=2)}
        watch = observe if name == AS_CONFIGURED else None
        _, found = accept_lengths(view, target_view, batch, text.prompt_length, name != WITHOUT_CONTEXT, watch)
        # Compare all variants over the same rounds, and count at most as many proposals as every variant can make.
        lengths[name] = found[:num_rounds].clamp(max=size).tolist()
    positions = torch.cat([torch.zeros(0, 3, device=text.ids.device), *apart]).view(-1, size, 3)
    return lengths, positions[:, drafter.config.label_offset :].cpu()
