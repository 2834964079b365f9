"""Settings of `hf-domino data`: how text is written."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hf_domino._common.fields import MOST_SEED
from hf_domino._common.refusal import refusal

# What only says which of the written rows go where: it may change from call to call.
OF_THE_RESULT = ("eval_rows", "keep_unended")
COUNTS = ("max_new_tokens", "max_prompt_tokens", "batch_size")


def _option(default: Any, read: Callable[[str], Any], described: str, **more: Any) -> Any:
    """Make a field with its flag: how its value is read, and its help."""
    if default not in (None, False):
        described += f" (default: {' '.join(map(str, default)) if isinstance(default, tuple) else default})"
    kind = {"action": "store_true"} if read is bool else {"type": read}
    return field(default_factory=lambda: default, metadata={"help": described} | kind | more)


@dataclass(frozen=True)
class WritingSettings:
    """How a target writes training text.

    Args:
        rows (`int`, *optional*): Prompts that are answered. Defaults to 1024 where the target writes them, else to all.
        temperatures (`Sequence[float]`, *optional*, defaults to (0.0, 0.7, 1.0)): Of the answers, batches taking
            them in turn; 0 is greedy.
        max_new_tokens (`int`, *optional*, defaults to 512): Longest answer, in tokens.
        max_length (`int`, *optional*, defaults to 4096): Longest row, prompt included, in tokens.
        prompt_temperature (`float`, *optional*, defaults to 0.9): Of prompts that the target writes.
        prompt_top_p (`float`, *optional*, defaults to 0.95): Their nucleus.
        max_prompt_tokens (`int`, *optional*, defaults to 128): Longest such prompt, in tokens.
        batch_size (`int`, *optional*, defaults to 64): Texts written side by side.
        min_distinct (`float`, *optional*, defaults to 0.5): A text loops if less than this share of its 4-grams, or of
            those of its last 64 tokens, are distinct; 0 keeps all.
        keep_unended (`bool`, *optional*, defaults to `False`): Keep answers that reach `max_new_tokens` before they
            end.
        eval_rows (`int`, *optional*, defaults to 0): Chats whose rows go to the evaluation file.
        system (`str`, *optional*): System turn of every chat that has none. Defaults to the template's own.
        template_kwargs (`dict`, *optional*): Variables of the chat template, such as `enable_thinking`.
        plain (`bool`, *optional*, defaults to `False`): A prompt that is a string is text to continue, no user turn.
        seed (`int`, *optional*, defaults to 0): Of the sampling.
    """

    rows: int | None = _option(None, int, "prompts to answer (default: 1024 of its own, all of a file)")
    temperatures: Sequence[float] = _option((0.0, 0.7, 1.0), float, "batches take them in turn", nargs="+")
    max_new_tokens: int = _option(512, int, "longest answer")
    max_length: int = _option(4096, int, "longest row, prompt included")
    prompt_temperature: float = _option(0.9, float, "of its own prompts")
    prompt_top_p: float = _option(0.95, float, "of its own prompts")
    max_prompt_tokens: int = _option(128, int, "longest prompt of its own")
    batch_size: int = _option(64, int, "texts written side by side")
    min_distinct: float = _option(0.5, float, "least share of distinct 4-grams in a text")
    keep_unended: bool = _option(False, bool, "keep answers cut at --max-new-tokens")
    eval_rows: int = _option(0, int, "chats for evaluation.jsonl")
    system: str | None = _option(None, str, "system turn of chats that have none (default: the template's)")
    template_kwargs: Mapping[str, Any] = _option({}, json.loads, """JSON, such as '{"enable_thinking": false}'""")
    plain: bool = _option(False, bool, "a `prompt` is text to continue, as a `text` is, no user's turn")
    seed: int = _option(0, int, "of the sampling")

    def __post_init__(self) -> None:
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
            "template_kwargs": (isinstance(self.template_kwargs, dict), "a JSON object"),
            "max_length": (self.max_length > longest, f"above {longest} (the longest text to be written)"),
        }
        for name, (is_right, expected) in ranges.items():
            if not is_right:
                remedy = f"Choose another {name} (--{name.replace('_', '-')})."
                raise refusal(name, expected, getattr(self, name), remedy)

    def of_the_text(self) -> dict[str, Any]:
        """Return the settings that decide the text, for JSON."""
        values = asdict(self) | {"temperatures": list(self.temperatures)}
        return {name: value for name, value in values.items() if name not in OF_THE_RESULT}
