"""Define the settings of `hf-domino data`, which control how the target writes text."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, asdict, dataclass, fields
from typing import Any

from hf_domino._common.errors import invalid_argument
from hf_domino._common.fields import MOST_SEED
from hf_domino._common.options import describe, flag_of, option

# Settings that only sort the written examples into files, so they can change from call to call.
OF_THE_RESULT = ("eval_rows", "keep_unended")
COUNTS = ("max_new_tokens", "max_prompt_tokens", "batch_size")


@describe
@dataclass(frozen=True)
class WritingSettings:
    """How a target writes training text."""

    rows: int | None = option(
        None,
        "number of prompts to answer (default: 1024 if the target writes them, else all of --prompts)",
        name="num_examples",
        metavar="N",
    )
    temperatures: Sequence[float] = option(
        (0.0, 0.7, 1.0),
        "temperatures of the answers; batches take them in turn, and 0 is greedy",
        type=float,
        nargs="+",
    )
    max_new_tokens: int = option(512, "longest answer, in tokens")
    max_length: int = option(4096, "longest example, prompt included, in tokens")
    prompt_temperature: float = option(0.9, "temperature at which the target writes prompts")
    prompt_top_p: float = option(0.95, "top-p with which the target writes prompts")
    max_prompt_tokens: int = option(128, "longest prompt that the target writes, in tokens")
    batch_size: int = option(64, "number of texts that are generated at once")
    min_distinct: float = option(
        0.5,
        "drop a text as a loop if less than this share of its 4-grams, or of those in its last 64 tokens, are "
        "distinct; 0 keeps all",
    )
    keep_unended: bool = option(False, "keep answers that were cut off at --max-new-tokens")
    eval_rows: int = option(
        0, "number of chats that go to evaluation.jsonl instead of train.jsonl", name="num_eval_examples", metavar="N"
    )
    system: str | None = option(None, "system turn for chats that have none (default: that of the chat template)")
    chat_template_kwargs: Mapping[str, Any] = option(
        {}, """variables for the chat template, as JSON: '{"enable_thinking": false}'""", type=json.loads
    )
    plain: bool = option(
        False,
        "continue a `prompt` that is a string like a `text`, instead of answering it as a user's turn (always so for a "
        "target without a chat template)",
    )
    seed: int = option(0, "random seed for sampling")
    template_kwargs: InitVar[Mapping[str, Any] | None] = None  # the old name of `chat_template_kwargs`

    def __post_init__(self, template_kwargs: Mapping[str, Any] | None) -> None:
        if template_kwargs is not None:
            object.__setattr__(self, "chat_template_kwargs", template_kwargs)
        rows = math.inf if self.rows is None else self.rows
        longest = max(self.max_new_tokens, self.max_prompt_tokens)
        right_temperatures = self.temperatures and all(0 <= value < math.inf for value in self.temperatures)
        ranges: dict[str, tuple[Any, str]] = {
            **{name: (getattr(self, name) >= 1, "at least 1") for name in COUNTS},
            "rows": (rows >= 1, "at least 1"),
            "eval_rows": (0 <= self.eval_rows < rows, f"at least 0 and below rows={self.rows}"),
            "min_distinct": (0 <= self.min_distinct <= 1, "in [0, 1]"),
            "prompt_top_p": (0 < self.prompt_top_p <= 1, "in (0, 1]"),
            "prompt_temperature": (0 < self.prompt_temperature < math.inf, "above 0 and finite"),
            "temperatures": (right_temperatures, "one or more numbers, at least 0 and finite"),
            "seed": (0 <= self.seed <= MOST_SEED, f"in [0, {MOST_SEED}]"),
            "chat_template_kwargs": (isinstance(self.chat_template_kwargs, dict), "a JSON object"),
            "max_length": (self.max_length > longest, f"above {longest} (the longest text to be written)"),
        }
        for name, (is_right, expected) in ranges.items():
            if not is_right:
                (described,) = (each for each in fields(self) if each.name == name)
                value = getattr(self, name)
                remedy = f"Choose another value ({flag_of(described)})."
                if value == described.default:
                    remedy = f"This is the default: choose another value ({flag_of(described)})."
                raise invalid_argument(name, expected, value, remedy)

    def of_the_text(self) -> dict[str, Any]:
        """Return the settings that the written text depends on, for JSON."""
        values = asdict(self) | {"temperatures": list(self.temperatures)}
        return {name: value for name, value in values.items() if name not in OF_THE_RESULT}
