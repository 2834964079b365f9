"""Answers of the target to chats, every assistant turn one after another, and continuations of plain text, as rows.

A row is what the target read and wrote, token by token. Where the template shows earlier turns as they were written, a
whole chat is one row; a turn that it shows differently once others follow (dropped reasoning) is a row of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_domino.data.chat import Message, encode_prompt
from hf_domino.data.prompts import ASSISTANT, Prompt
from hf_domino.data.settings import WritingSettings
from hf_domino.data.units import Rows, Workplace
from hf_domino.data.writers import NO_ROUND_TRIP, SEED_STRIDE, Sampling, Writer, Written

STAGE = "answers"
TOO_LONG, UNENDED = "too long", "unended"
FIRST_SEED = 500_000  # of a run's answers; below are those of its prompts
TURN_STRIDE = 10_000_019  # between the turns of a batch of chats


@dataclass
class Dialogue:
    """A prompt while it is answered.

    Args:
        number (`int`): Which prompt.
        prompt (`Prompt`): What to answer.
        messages (`list[dict]`): The chat so far, with the target's own answers in the place of those given.
        rows (`list[dict]`): `input_ids` and `loss_mask` so far.
        flaw (`str`, *optional*): Why it stops before its last turn.
    """

    number: int
    prompt: Prompt
    messages: list[Message] = field(default_factory=list)
    rows: list[dict[str, list[int]]] = field(default_factory=list)
    flaw: str | None = None

    @property
    def is_open(self) -> bool:
        """Whether the target has another turn to write."""
        if self.flaw is not None:
            return False
        return self.prompt.answers[-1] >= len(self.messages) if self.prompt.messages else not self.rows

    def next_prompt(self, tokenizer: Any, template_kwargs: Mapping[str, Any]) -> list[int]:
        """Token ids up to the target's next turn."""
        if not self.prompt.messages:
            return tokenizer(self.prompt.text)["input_ids"]
        start = len(self.messages)
        end = next(place for place in self.prompt.answers if place >= start)
        self.messages += self.prompt.messages[start:end]
        kwargs = {**template_kwargs, **self.prompt.tools}
        return encode_prompt(self.messages, tokenizer, f"prompt {self.number + 1}", kwargs)

    def add(self, read: list[int], text: Written | None, tokenizer: Any) -> None:
        """Take an answer: what the target read and what it wrote, if that is known."""
        if text is None:
            self.flaw = NO_ROUND_TRIP
            return
        row = self.rows[-1] if self.rows else None
        if row is None or read[: len(row["input_ids"])] != row["input_ids"]:
            row = {"input_ids": [], "loss_mask": []}
            self.rows.append(row)
        row["loss_mask"] += [0] * (len(read) - len(row["input_ids"])) + [1] * len(text.ids)
        row["input_ids"] = read + text.ids
        words = tokenizer.decode(text.ids[:-1] if text.ended else text.ids, skip_special_tokens=True)
        self.messages.append({"role": ASSISTANT, "content": words})
        self.flaw = None if text.ended else UNENDED


class Answerer:
    """Lets the target answer prompts, in batches that take the temperatures in turn."""

    def __init__(self, writer: Writer, tokenizer: Any, settings: WritingSettings):
        self.writer, self.tokenizer, self.settings = writer, tokenizer, settings

    def write(self, prompts: Sequence[Prompt], place: Workplace) -> Rows:
        """Answer prompts, those of a length side by side, so that batches hold little padding.

        Returns:
            `list[dict]`: Per prompt `number`, `rows`, `messages`, `temperature` and `flaw`.
        """
        lengths = [sum(len(message["content"]) for message in p.messages) + len(p.text) for p in prompts]
        order = sorted(range(len(prompts)), key=lambda number: (len(prompts[number].messages), lengths[number]))
        size = self.settings.batch_size
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        units = place.do(
            STAGE, len(batches), lambda unit: self._unit([Dialogue(n, prompts[n]) for n in batches[unit]], unit)
        )
        return [row for rows in units for row in rows]

    def _unit(self, dialogues: list[Dialogue], unit: int) -> tuple[Rows, int]:
        settings, turn = self.settings, 0
        temperature = settings.temperatures[unit % len(settings.temperatures)]
        while batch := [dialogue for dialogue in dialogues if dialogue.is_open]:
            seed = settings.seed * SEED_STRIDE + FIRST_SEED + unit + turn * TURN_STRIDE
            self._turn(batch, Sampling(settings.max_new_tokens, temperature), seed)
            turn += 1
        rows = [
            {"number": d.number, "rows": d.rows, "messages": d.messages, "temperature": temperature, "flaw": d.flaw}
            for d in dialogues
        ]
        return rows, sum(sum(row["loss_mask"]) for dialogue in dialogues for row in dialogue.rows)

    def _turn(self, batch: list[Dialogue], sampling: Sampling, seed: int) -> None:
        """Write the next turn of every chat in a batch."""
        longest = self.settings.max_length - sampling.max_new_tokens
        read = [dialogue.next_prompt(self.tokenizer, self.settings.template_kwargs) for dialogue in batch]
        fits = [len(ids) <= longest for ids in read]
        for dialogue, is_right in zip(batch, fits, strict=True):
            dialogue.flaw = None if is_right else TOO_LONG
        prompts = [ids for ids, is_right in zip(read, fits, strict=True) if is_right]
        if not prompts:
            return
        open_ones = [dialogue for dialogue in batch if dialogue.flaw is None]
        texts = self.writer.write(prompts, sampling, seed)
        for dialogue, ids, text in zip(open_ones, prompts, texts, strict=True):
            dialogue.add(ids, text, self.tokenizer)
