"""What serving engines take: their rules for a config.json that we write as data, each with its reason.

Read in the engines' own code: `speculative/{dflash_utils,domino_utils,dflash_worker_v2}.py` and `models/dflash.py` of
SGLang 0.5.20 to 0.5.23; `transformers_utils/configs/speculators/`, `model_executor/models/qwen3_dflash.py` and
`v1/worker/gpu/spec_decode/dflash/` of vLLM 0.32.0 and 0.33.0, which `serving` has more of; `dflash/model.py` of z-lab's
dflash 0.1.0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from string import Template
from typing import Any

from hf_domino._common.refusal import refusal
from hf_domino.configuration import DominoConfig
from hf_domino.formats.dflash_config import DFLASH_CONFIG
from hf_domino.formats.dflash_config import SECTION as DFLASH_SECTION
from hf_domino.formats.fields import Format, StoredConfig, merged, section_of
from hf_domino.formats.registry import format_of
from hf_domino.formats.speculators import SECTION as LAYER_SECTION
from hf_domino.formats.speculators import SPECULATORS

DOMINO, DFLASH = ("domino",), ("dflash",)


@dataclass(frozen=True)
class Rule:
    """State what an engine requires of one field of a config.json."""

    names: tuple[str, ...]  # of the field, in the formats
    expected: str
    holds: Callable[[Any], bool]  # whether a value, None if absent, is as expected
    why: str  # what the engine does otherwise, and the way out
    kinds: tuple[str, ...] = DOMINO + DFLASH  # the values of projector_type that it applies to


@dataclass(frozen=True)
class Engine:
    """Describe a program that serves a target with a drafter."""

    name: str  # in flags
    title: str  # with the versions that the rules were read in
    reads: tuple[Format, ...]
    command: Template  # that starts it, of $target, $drafter and $num_draft_tokens
    rules: tuple[Rule, ...]
    note: str  # its requirements of target and machine, and differences from hf_domino
    plugin: str | None = None  # that it needs for Domino, and for DFlash with shift_label

    def plugin_for(self, config: DominoConfig) -> str | None:
        """Name the plugin that this drafter needs in the engine; None if it needs none."""
        is_plain = config.projector_type == "dflash" and not config.shift_label
        return None if is_plain else self.plugin


@dataclass(frozen=True)
class Unmet:
    """Name a field that an engine does not accept, and say why."""

    field: str
    expected: str
    value: Any
    why: str

    def __str__(self) -> str:
        return str(refusal(self.field, self.expected, self.value, self.why))


def _not_shifted(engine: str) -> Rule:
    why = (
        f"{engine} reads a DFlash block's proposals from its second position on; drafts of this one would be one token "
        "off, without an error. Train with shift_label: false."
    )
    return Rule(("shift_label", "sample_from_anchor"), "False (plain DFlash)", lambda value: not value, why, DFLASH)


_ACTIVATION = Rule(("hidden_act",), "'silu'", lambda value: value == "silu", "It has MLPs of no other activation.")

SGLANG = Engine(
    name="sglang",
    title="SGLang 0.5.20 to 0.5.23",
    reads=(DFLASH_CONFIG,),
    command=Template(
        "sglang serve --model-path $target --dtype bfloat16 "
        "--speculative-algorithm DFLASH --speculative-draft-model-path $drafter"
    ),
    rules=(
        Rule(
            ("pure_draft_prefix_len",),
            "1",
            lambda value: value == 1,
            "SGLang takes the first proposal from the base logits and corrects from the second on, as in the "
            "releases. Train with pure_draft_prefix_len: 1.",
            DOMINO,
        ),
        Rule(
            ("dtype",),
            "'bfloat16'",
            lambda value: value == "bfloat16",
            "Its Domino runs in bfloat16 alone, the target included. Export with dtype='bfloat16'.",
            DOMINO,
        ),
        _not_shifted("SGLang"),
        _ACTIVATION,
    ),
    note="Domino: a CUDA device, target in bfloat16 without added vocabulary, no data-parallel attention, greedy "
    "drafts; block_size - 1 proposals a round, one fewer than hf_domino where shift_label is true.",
)
VLLM = Engine(
    name="vllm",
    title="vLLM 0.32 to 0.33",
    reads=(DFLASH_CONFIG, SPECULATORS),
    command=Template(
        "vllm serve $target --speculative-config "
        """'{"method": "dflash", "model": "$drafter", "num_speculative_tokens": $num_draft_tokens}'"""
    ),
    rules=(
        Rule(
            ("sample_from_anchor",),
            "False",
            lambda value: not value,
            "It reads a block's proposals from its second position on and refuses. Export as specforge.",
            DFLASH,
        ),
        _ACTIVATION,
    ),
    note="Domino, and DFlash with shift_label, by hf_domino's plugin, so install hf_domino beside vLLM: without it "
    "Domino drafts without its head, and shift_label one token off. block_size - 1 proposals a round, one fewer than "
    "hf_domino where shift_label is true; one device.",
    plugin="hf_domino's plugin",
)
ZLAB = Engine(
    name="dflash",
    title="z-lab's dflash 0.1.0",
    reads=(DFLASH_CONFIG,),
    command=Template("dflash generate transformers --model $target --draft $drafter PROMPT"),
    rules=(
        Rule(("projector_type",), "'dflash'", lambda value: False, "It has no Domino.", DOMINO),
        _not_shifted("It"),
        Rule(
            ("num_target_layers",),
            "given",
            lambda value: value is not None,
            "Set it to the target's num_hidden_layers.",
        ),
    ),
    note="One sequence at a time, transformers 5.15.0.",
)
ENGINES = {engine.name: engine for engine in (SGLANG, VLLM, ZLAB)}


def unmet(stored: StoredConfig, engine: Engine) -> tuple[Unmet, ...]:
    """List the fields of a drafter's config.json that an engine does not accept.

    Example:
    ```python
    >>> from hf_domino.formats.engines import ENGINES, unmet
    >>> stored = {"architectures": ["DFlashDraftModel"], "hidden_act": "silu", "dflash_config": {"shift_label": True}}
    >>> [found.field for found in unmet(stored, ENGINES["sglang"])]
    ['shift_label']

    ```
    """
    found = format_of(stored)
    if found not in engine.reads:
        expected = " or ".join(format.name for format in engine.reads)
        return (Unmet("the format", expected, found and found.name, "Export it with another format."),)
    given = {**section_of(stored, LAYER_SECTION), **merged(stored, DFLASH_SECTION)}
    kind = given.get("projector_type", "dflash")
    return tuple(
        Unmet(name, rule.expected, given.get(name), rule.why)
        for rule in engine.rules
        for name in [next((name for name in rule.names if name in given), rule.names[0])]
        if kind in rule.kinds and not rule.holds(given.get(name))
    )
