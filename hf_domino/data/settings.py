"""How text is written: the settings of `hf-domino data`, and that work goes on only with those it was begun with."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hf_domino._common.refusal import refusal
from hf_domino.target.identity import TargetIdentity, check_same

START_AGAIN = "Delete the file or pass overwrite=True (--overwrite true) to start it again, or choose another folder."
# What only says which of the written rows go where: it may change from call to call.
OF_THE_RESULT = ("eval_rows", "keep_unended")


@dataclass(frozen=True)
class WritingSettings:
    """How a target writes training text.

    Args:
        rows (`int`, *optional*): Prompts that are answered. Defaults to 1024 where the target writes them, else to all.
        temperatures (`tuple[float, ...]`, *optional*, defaults to (0.0, 0.7, 1.0)): Of the answers, batches taking
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

    rows: int | None = None
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    max_new_tokens: int = 512
    max_length: int = 4096
    prompt_temperature: float = 0.9
    prompt_top_p: float = 0.95
    max_prompt_tokens: int = 128
    batch_size: int = 64
    min_distinct: float = 0.5
    keep_unended: bool = False
    eval_rows: int = 0
    system: str | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    plain: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        counts = ("max_new_tokens", "max_prompt_tokens", "batch_size", *(("rows",) if self.rows is not None else ()))
        for name in counts:
            self._check(name, getattr(self, name) >= 1, "at least 1")
        self._check("eval_rows", self.eval_rows >= 0, "at least 0")
        self._check("min_distinct", 0 <= self.min_distinct <= 1, "in [0, 1]")
        self._check("prompt_top_p", 0 < self.prompt_top_p <= 1, "in (0, 1]")
        self._check("prompt_temperature", 0 < self.prompt_temperature < math.inf, "above 0 and finite")
        if self.rows is not None and self.eval_rows >= self.rows:
            remedy = "What is left is trained on: ask for more rows (--rows), or evaluate on fewer (--eval-rows)."
            raise refusal("eval_rows", f"below rows={self.rows}", self.eval_rows, remedy)
        right = bool(self.temperatures) and all(0 <= value < math.inf for value in self.temperatures)
        self._check("temperatures", right, "one or more numbers, at least 0 and finite")
        longest = max(self.max_new_tokens, self.max_prompt_tokens)
        if self.max_length <= longest:
            remedy = (
                "Write shorter texts (--max-new-tokens, --max-prompt-tokens), or raise it (--max-length), up to what "
                "the target can read."
            )
            raise refusal("max_length", f"above {longest} (the longest text to be written)", self.max_length, remedy)

    def _check(self, name: str, is_right: bool, expected: str) -> None:
        if not is_right:
            flag = "--" + name.replace("_", "-")
            raise refusal(name, expected, getattr(self, name), f"Choose another {name} ({flag}).")

    def of_the_text(self) -> dict[str, Any]:
        """The settings that say what is written, for JSON."""
        values = asdict(self) | {"temperatures": list(self.temperatures)}
        return {name: value for name, value in values.items() if name not in OF_THE_RESULT}


def check_settings(
    what: Path, found: Mapping[str, Any], settings: Mapping[str, Any], remedy: str = START_AGAIN
) -> None:
    """Refuse to go on with work that was begun with another target or other settings.

    Raises:
        ValueError: Naming the first setting that differs.
    """
    recorded, target = (TargetIdentity.from_dict(values.get("target")) for values in (found, settings))
    if target is not None:
        check_same(recorded, target, str(what), remedy)
    for name, value in settings.items():
        if name != "target" and found.get(name) != value:
            raise refusal(name, f"{found.get(name)!r}, with which {what} was begun", value, remedy)


def read_settings(path: Path) -> dict[str, Any]:
    """Settings that were recorded."""
    return json.loads(path.read_text(encoding="utf-8"))
