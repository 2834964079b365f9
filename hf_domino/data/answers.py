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
from hf_domino.data.records import at
from hf_domino.data.settings import WritingSettings
from hf_domino.data.units import Do, Rows
from hf_domino.data.writers import NO_ROUND_TRIP, SEED_STRIDE, Sampling, Writer, Written

TOO_LONG, UNENDED = "too long", "unended"
FIRST_SEED = 500_000  # of a run's answers; below are those of its prompts
TURN_STRIDE = 10_000_019  # between the turns of a batch of chats


@dataclass
class Dialogue:
    """A prompt while it is answered: the chat so far, with the target's own answers, its rows, and why it stops."""

    number: int
    prompt: Prompt
    messages: list[Message] = field(default_factory=list)
    rows: Rows = field(default_factory=list)  # `input_ids` and `loss_mask`
    flaw: str | None = None

    def read(self, turn: int, tokenizer: Any, template_kwargs: Mapping[str, Any]) -> list[int]:
        """Token ids up to the target's next turn."""
        if not self.prompt.messages:
            return tokenizer(self.prompt.text)["input_ids"]
        self.messages += self.prompt.turns[turn]
        with at(f"prompt {self.number + 1}"):
            return encode_prompt(self.messages, tokenizer, {**template_kwargs, **self.prompt.tools})

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


def write_answers(prompts: Sequence[Prompt], writer: Writer, tokenizer: Any, settings: WritingSettings, do: Do) -> Rows:
    """Let the target answer prompts, those of a length side by side, in batches that take the temperatures in turn.

    Rows have `number` (of the prompt), `rows`, `messages`, `temperature` and `flaw`.
    """
    lengths = [sum(len(message["content"]) for message in p.messages) + len(p.text) for p in prompts]
    order = sorted(range(len(prompts)), key=lambda number: (len(prompts[number].messages), lengths[number]))
    size = settings.batch_size
    batches = [order[start : start + size] for start in range(0, len(order), size)]

    def make(unit: int) -> tuple[Rows, int]:
        dialogues = [Dialogue(number, prompts[number]) for number in batches[unit]]
        temperature = settings.temperatures[unit % len(settings.temperatures)]
        sampling = Sampling(settings.max_new_tokens, temperature)
        for turn in range(max(len(dialogue.prompt.turns) for dialogue in dialogues)):
            fitting = []
            for dialogue in dialogues:
                if dialogue.flaw is None and turn < len(dialogue.prompt.turns):
                    read = dialogue.read(turn, tokenizer, settings.template_kwargs)
                    if len(read) + settings.max_new_tokens <= settings.max_length:
                        fitting.append((dialogue, read))
                    else:
                        dialogue.flaw = TOO_LONG
            if fitting:
                seed = settings.seed * SEED_STRIDE + FIRST_SEED + unit + turn * TURN_STRIDE
                texts = writer.write([read for _, read in fitting], sampling, seed)
                for (dialogue, read), text in zip(fitting, texts, strict=True):
                    dialogue.add(read, text, tokenizer)
        rows = [
            {"number": d.number, "rows": d.rows, "messages": d.messages, "temperature": temperature, "flaw": d.flaw}
            for d in dialogues
        ]
        return rows, sum(sum(row["loss_mask"]) for dialogue in dialogues for row in dialogue.rows)

    return do("answers", len(batches), make)
