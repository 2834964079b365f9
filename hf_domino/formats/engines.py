"""What serving engines accept: their rules for the config.json files that we write, as data, each with its reason.

The rules come from the engines' own code: `speculative/{dflash_utils,domino_utils,dflash_worker_v2}.py` and
`models/dflash.py` of SGLang 0.5.20 to 0.5.23; `transformers_utils/configs/speculators/`,
`model_executor/models/qwen3_dflash.py` and `v1/worker/gpu/spec_decode/dflash/` of vLLM 0.32.0 and 0.33.0 (see also
`hf_domino.serving`); `dflash/model.py` of z-lab's dflash 0.1.0. For DSpark and DFlash 2, they come from
`speculative/dspark_components/dspark_config.py` and `models/{dflash,dspark}.py` of SGLang after its pull request 35371,
and `model_executor/models/qwen3_{dspark,dflash2}.py` of vLLM (0302ff4, 030da62).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from string import Template
from typing import Any

from hf_domino._common.errors import invalid_argument
from hf_domino.configuration.domino_config import DominoConfig
from hf_domino.formats.dflash_config import DFLASH_CONFIG, SECTION, projector_type_of
from hf_domino.formats.fields import (
    AROUND_LAYERS,
    BLOCK_METHODS,
    CONVOLUTION,
    DECODER_SECTION,
    FUSION,
    SCALES,
    Format,
    StoredConfig,
    merged,
    section_of,
)
from hf_domino.formats.registry import format_of
from hf_domino.formats.speculators import KIND, SPECULATORS


@dataclass(frozen=True)
class Rule:
    """A requirement of an engine on one field of a config.json."""

    names: str  # of the field in the formats; the first one that is present counts
    expected: str
    holds: Callable[[Any], bool]  # whether a value (None if absent) is as expected
    why: str  # what the engine does otherwise, and the remedy
    kinds: str = " ".join(BLOCK_METHODS)  # the values of projector_type that it applies to


@dataclass(frozen=True)
class Engine:
    """A program that serves a target with a drafter."""

    name: str  # in flags
    title: str  # with the versions whose code the rules come from
    reads: tuple[Format, ...]
    command: Template  # that starts it, with $target, $drafter, $method and $num_draft_tokens
    rules: tuple[Rule, ...]
    note: str  # its requirements on target and machine, and differences from hf_domino
    window_flag: str | None = None  # flag of its command for draft_window_size
    plugin: str | None = None  # that it needs for Domino, and for DFlash with shift_label or convolutions

    def plugin_for(self, config: DominoConfig) -> str | None:
        """Return the name of the plugin that this drafter needs in the engine; None if it needs none."""
        kind = config.projector_type
        needs_it = kind == "domino" or (kind == "dflash" and (config.shift_label or config.conv_kernel_size))
        return self.plugin if needs_it else None

    def command_for(self, config: DominoConfig, drafter: str, target: str) -> str:
        """Return the command that starts the engine with an exported folder."""
        method = "dflash"  # engines run Domino and DFlash 2 under this name, too
        count = config.block_size - 1
        if config.projector_type == "dspark":
            method = "dspark"
            count = config.num_draft_tokens
        names = {"target": target, "drafter": drafter, "method": method, "METHOD": method.upper()}
        command = self.command.substitute(names, num_draft_tokens=count)
        if config.draft_window_size is None or self.window_flag is None:
            return command
        return f"{command} {self.window_flag} {config.draft_window_size}"


@dataclass(frozen=True)
class Unmet:
    """A field that an engine does not accept, with the reason."""

    field: str
    expected: str
    value: Any
    why: str

    def __str__(self) -> str:
        return str(invalid_argument(self.field, self.expected, self.value, self.why))


def _ordered(engine: str, kinds: str, is_shifted: bool = False) -> Rule:
    why = (
        f"{engine} reads proposals of such a block from its {'first' if is_shifted else 'second'} position on; drafts "
        f"of this one would be one token off, without an error. Train with shift_label: {str(is_shifted).lower()}."
    )
    return Rule(
        "shift_label sample_from_anchor",
        f"{is_shifted} ({' or '.join(kinds.split())})",
        lambda value: bool(value) == is_shifted,
        why,
        kinds,
    )


def _without(names: Sequence[str], kinds: str = Rule.kinds) -> Iterator[Rule]:
    for name in names:
        yield Rule(name, "absent", lambda value: not value, "It does not read it of this kind.", kinds)


_READS_HEAD = Rule(
    "projector_type",
    "one of domino, dflash, dspark, dflash2",
    lambda value: False,
    "It has no such head.",
    "dfly xpress",
)
_ACTIVATION = Rule("hidden_act", "'silu'", lambda value: value == "silu", "It has MLPs of no other activation.")

SGLANG = Engine(
    name="sglang",
    title="SGLang 0.5.20 to 0.5.23",
    reads=(DFLASH_CONFIG,),
    command=Template(
        "sglang serve --model-path $target --dtype bfloat16 "
        "--speculative-algorithm $METHOD --speculative-draft-model-path $drafter"
    ),
    rules=(
        Rule(
            "pure_draft_prefix_len",
            "1",
            lambda value: value == 1,
            "SGLang takes the first proposal from the base logits and corrects from the second on, as in the "
            "releases. Train with pure_draft_prefix_len: 1.",
            "domino",
        ),
        Rule(
            "dtype",
            "'bfloat16'",
            lambda value: value == "bfloat16",
            "Its Domino runs in bfloat16 alone, the target included. Export with dtype='bfloat16'.",
            "domino",
        ),
        _ordered("SGLang", "dflash dflash2"),
        _ordered("SGLang", "dspark", is_shifted=True),
        *_without([CONVOLUTION], "dspark"),
        *_without(["input_embedding_scale", FUSION]),
        *_without(["output_multiplier", "final_logit_softcapping"], "domino dflash dspark"),
        _READS_HEAD,
        _ACTIVATION,
    ),
    window_flag="--speculative-draft-window-size",
    note="Domino: a CUDA device, target in bfloat16 without added vocabulary, no data-parallel attention, greedy "
    "drafts; block_size - 1 proposals a round, one fewer than hf_domino where shift_label is true.",
)
VLLM = Engine(
    name="vllm",
    title="vLLM 0.32 to 0.33",
    reads=(DFLASH_CONFIG, SPECULATORS),
    command=Template(
        "vllm serve $target --speculative-config "
        """'{"method": "$method", "model": "$drafter", "num_speculative_tokens": $num_draft_tokens}'"""
    ),
    rules=(
        Rule(
            "sample_from_anchor",
            "False",
            lambda value: not value,
            "It reads a block's proposals from its second position on and refuses. Export as specforge.",
            "dflash",
        ),
        Rule(
            "target_model_type",
            "another than Gemma's",
            lambda value: not str(value).startswith("gemma"),
            "Gemma scales its embeddings, which vLLM's drafters read unscaled. Generate with Transformers.",
        ),
        _ordered("vLLM", "dflash2"),
        *_without(SCALES, "domino dflash dspark"),
        *_without([FUSION]),
        *_without([CONVOLUTION], "dspark"),
        Rule(CONVOLUTION, "given", bool, "It has no DFlash 2 without convolutions.", "dflash2"),
        Rule(KIND, "absent", lambda value: not value, "It reads z-lab's layout. Export as specforge.", "dflash2"),
        Rule(
            "markov_head_type",
            "'vanilla'",
            lambda value: value in (None, "vanilla"),
            "It has no other head of DSpark. Train with markov_head_type: vanilla.",
            "dspark",
        ),
        _READS_HEAD,
        _ACTIVATION,
    ),
    note="Domino, and DFlash with shift_label or convolutions, need hf_domino's plugin: install hf_domino beside vLLM. "
    "Without it vLLM does not load Domino's head or convolutions, and with shift_label it drafts one token off. "
    "block_size - 1 proposals a round, one fewer than hf_domino where shift_label is true; one device.",
    plugin="hf_domino's plugin",
)
ZLAB = Engine(
    name="dflash",
    title="z-lab's dflash 0.1.0",
    reads=(DFLASH_CONFIG,),
    command=Template("dflash generate transformers --model $target --draft $drafter PROMPT"),
    rules=(
        Rule("projector_type", "'dflash'", lambda value: False, "It has no other kind.", "domino dspark dflash2"),
        _READS_HEAD,
        _ordered("It", "dflash"),
        *_without(AROUND_LAYERS, "dflash"),
        Rule(
            "num_target_layers",
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
    given = {**section_of(stored, DECODER_SECTION), **merged(stored, SECTION)}
    kind = given["projector_type"] = projector_type_of(given)
    refused = []
    for rule in engine.rules:
        names = rule.names.split()
        name = next((name for name in names if name in given), names[0])
        if kind in rule.kinds.split() and not rule.holds(given.get(name)):
            refused.append(Unmet(name, rule.expected, given.get(name), rule.why))
    return tuple(refused)
