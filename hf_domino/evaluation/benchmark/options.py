"""Name the methods of a benchmark, and declare its options once for Python and `hf-domino bench`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_domino._common.errors import invalid_argument
from hf_domino._common.fields import MOST_SEED, PROMPTS_HELP
from hf_domino._common.options import option

# Name -> label in Markdown, in the order of tables. To compare another method, add it here and to `methods.py`.
METHODS = {
    "plain": "plain `generate`",
    "packed": "plain, packed",
    "lean": "plain, lean loop",
    "prompt_lookup": "prompt lookup",
    "recycling": "token recycling",
    "recycling_lookup": "token recycling with prompt lookup",
    "lookahead": "lookahead",
    "assistant": "small assistant",
    "early_exit": "early exit",
    "mtp": "MTP, Transformers' loop",
    "native_dflash": "DFlash baseline, Transformers' loop",
    "dflash": "DFlash baseline, full blocks",
    "dflash_adaptive": "DFlash baseline",
    "domino": "Domino, full blocks",
    "domino_adaptive": "**Domino**",
    "domino_lookup": "**Domino with prompt lookup**",
}
BASELINE = "plain"
PACKED = "packed"  # plain generation with packed weights, which only a CPU has
LOOKUP = "prompt_lookup"
RECYCLED = ("recycling", "recycling_lookup")
WITH_LOOKUP = "domino_lookup"
DEFAULT = (BASELINE, PACKED, LOOKUP, "domino_adaptive", WITH_LOOKUP)
FREE = (PACKED, LOOKUP, *RECYCLED)  # the default for a target without a drafter
ALL = "all"
# Transformers' own assistants decode one sequence at a time, and with sampling, their texts differ from those of plain
# generation.
TRANSFORMERS_OWN = (LOOKUP, "assistant", "early_exit", "mtp", "native_dflash")
# Methods that you can measure; the others occur only in results that were published before.
MEASURABLE = (BASELINE, PACKED, LOOKUP, *RECYCLED, "assistant", "mtp", "domino", "domino_adaptive", WITH_LOOKUP)

# Field of a result -> heading of its column. Both need additional runs, so they are measured only on request.
FIRST_TOKEN = "time_to_first_token"
PEAK_MEMORY = "peak_memory"
COLUMNS = {FIRST_TOKEN: "ms to first token", PEAK_MEMORY: "peak GiB"}

# Groups of flags.
MODELS = "models"
TEXTS = "texts"
MEASURED = "what is measured"
RESULTS = "results"
AT_LEAST_ONE = ("num_prompts", "batch_size", "max_new_tokens", "repeats", "lookup_tokens", "tree_size")


def keeps_seed(method: str) -> bool:
    """Return whether a method promises to sample the same text as plain generation from the same seed."""
    return method not in TRANSFORMERS_OWN


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


@dataclass(frozen=True)
class BenchOptions:
    """Models, methods and texts of [`benchmark`], and the file for its results."""

    target: str | None = None
    drafter: tuple[str, ...] = ()  # if there are several, of any method, they are compared
    dtype: str | None = None  # `pair.choose_dtype` chooses the default
    device: str = "cpu"
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False
    assistant: str | None = option(
        None, "a small model with the same vocabulary as the target, to compare with", group=MODELS
    )
    prompts: Path | None = option(  # noqa: RUF009
        None,
        PROMPTS_HELP,
        group=TEXTS,
    )
    num_prompts: int = option(50, "number of prompts, from the first one of the file on", group=TEXTS)
    batch_size: int = option(1, "number of prompts per call", group=TEXTS)
    max_new_tokens: int = option(128, "maximum number of tokens to generate per prompt", group=TEXTS)
    methods: tuple[str, ...] | None = option(
        None,
        f"all, or some of {', '.join(MEASURABLE)}, separated by commas. plain is always measured. mtp needs a target "
        "with MTP layers. domino drafts full blocks, domino_adaptive as far as it pays, and domino_lookup adds prompt "
        f"lookup (default: {', '.join(DEFAULT)}, and the methods that other flags name)",
        type=_names,
        group=MEASURED,
    )
    columns: tuple[str, ...] = option(
        (),
        f"more columns to measure: {', '.join(COLUMNS)}. peak_memory needs a GPU, and includes all loaded models",
        type=_names,
        group=MEASURED,
    )
    tree_size: int | None = option(
        None, "compare trees of up to N nodes with chains, for each drafter", metavar="N", group=MEASURED
    )
    lookup_tokens: int = option(10, "maximum number of tokens that prompt lookup proposes", group=MEASURED)
    repeats: int = option(3, "number of timed runs per prompt and method, of which the median counts", group=MEASURED)
    temperature: float = option(0.7, "temperature of the sampled runs; 0 measures greedy decoding only", group=MEASURED)
    seed: int = option(0, "random seed for sampling", group=MEASURED)
    results: Path = option(  # noqa: RUF009
        Path("results.jsonl"),
        "JSONL file of results; the same command finishes a run that was interrupted",
        group=RESULTS,
    )
    overwrite: bool = option(False, "start over if the file of --results exists", group=RESULTS)
    figures: Path | None = option(  # noqa: RUF009
        None, "folder for pictures of speed and acceptance (needs matplotlib)", group=RESULTS
    )

    def __post_init__(self) -> None:
        for name in AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise invalid_argument(
                    f"--{name.replace('_', '-')}", "at least 1", value, "Leave it out for its default."
                )
        if not 0 <= self.temperature < math.inf:
            raise invalid_argument("--temperature", "at least 0 and finite", self.temperature, "0 is greedy only.")
        if not 0 <= self.seed <= MOST_SEED:
            raise invalid_argument("--seed", f"in [0, {MOST_SEED}]", self.seed, "Choose another.")
        for name in self.columns:
            if name not in COLUMNS:
                raise invalid_argument("--columns", f"some of {', '.join(COLUMNS)}", name, "Separate them by commas.")
            if name == PEAK_MEMORY and not self.device.startswith("cuda"):
                raise invalid_argument(
                    "--columns", "without peak_memory on this device", self.device, "Use --device cuda."
                )
        for name in self.methods or ():
            if name not in MEASURABLE and self.methods != (ALL,):
                raise invalid_argument("--methods", f"{ALL} or some of {', '.join(MEASURABLE)}", name, "See --help.")
            if name == "assistant" and self.assistant is None:
                remedy = "Give it, or leave assistant out."
                raise invalid_argument("--methods assistant", "given with --assistant", "none", remedy)

    def wanted(self, compares: bool) -> list[str]:
        """Return the methods to measure in the order of tables; with `compares`, each drafter is a method by itself."""
        default = (PACKED, LOOKUP) if compares else (*DEFAULT, "assistant")
        names = self.methods or default
        possible = [name for name in MEASURABLE if name != "assistant" or self.assistant]
        return [name for name in possible if names == (ALL,) or name in (BASELINE, *names)]

    @property
    def needs_drafter(self) -> bool:
        """Return whether the methods that were named include one that runs the pair's drafter."""
        return any(name.startswith("domino") for name in self.methods or ())
