"""Answers of the target to chats, every assistant turn one after another, and continuations of plain text, as rows.

A row is what the target read and wrote, token by token. Where the template shows earlier turns as they were written, a
whole chat is one row; a turn that it shows differently once others follow (dropped reasoning) is a row of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hf_domino.data.chat import Message, encode_prompt
from hf_domino.data.encoding import encode_text
from hf_domino.data.names import template_arguments
from hf_domino.data.prompts import ASSISTANT, Prompt
from hf_domino.data.records import at
from hf_domino.data.settings import WritingSettings
from hf_domino.data.units import Do, Rows
from hf_domino.data.writers import SEED_STRIDE, Sampling, Writer, Written

TOO_LONG, UNENDED, REFUSED = "too long", "unended", "refused by the chat template"
FIRST_SEED = 500_000  # of a run's answers; below are those of its prompts
TURN_STRIDE = 10_000_019  # between the turns of a batch of chats


def write_answers(prompts: Sequence[Prompt], writer: Writer, tokenizer: Any, settings: WritingSettings, do: Do) -> Rows:
    """Let the target answer prompts, those of a length side by side, in batches that take the temperatures in turn.

    An answer has `number` (of the prompt), `rows`, `messages`, `temperature`, `flaw`: why the chat ends early, and
    `refusal`: what a chat template says that does not take what the target wrote.
    """
    lengths = [sum(len(message["content"]) for message in p.messages) + len(p.text) for p in prompts]
    order = sorted(range(len(prompts)), key=lambda number: (len(prompts[number].messages), lengths[number]))
    size = settings.batch_size
    batches = [order[start : start + size] for start in range(0, len(order), size)]

    def make(unit: int) -> Rows:
        temperature = settings.temperatures[unit % len(settings.temperatures)]
        sampling = Sampling(settings.max_new_tokens, temperature)
        answers: Rows = [
            {"number": number, "rows": [], "messages": [], "temperature": temperature, "flaw": None, "refusal": None}
            for number in batches[unit]
        ]
        for turn in range(max(len(prompts[number].turns) for number in batches[unit])):
            fitting = []
            for answer in answers:
                prompt = prompts[answer["number"]]
                if answer["flaw"] is None and turn < len(prompt.turns):
                    read = _read(answer, prompt, turn, tokenizer, settings.template_kwargs)
                    if read is None:
                        continue
                    if len(read) + settings.max_new_tokens <= settings.max_length:
                        fitting.append((answer, read))
                    else:
                        answer["flaw"] = TOO_LONG
            if fitting:
                seed = settings.seed * SEED_STRIDE + FIRST_SEED + unit + turn * TURN_STRIDE
                texts = writer.write([read for _, read in fitting], sampling, seed)
                for (answer, read), text in zip(fitting, texts, strict=True):
                    _add(answer, read, text, tokenizer, prompts[answer["number"]])
        return answers

    return do("answers", len(batches), make)


def _read(
    answer: dict[str, Any], prompt: Prompt, turn: int, tokenizer: Any, template_kwargs: Mapping[str, Any]
) -> list[int] | None:
    """Give the token ids up to the target's next turn, or None where the template refuses what the target wrote."""
    if not prompt.messages:
        return encode_text(prompt.text, tokenizer, goes_on=True)
    answer["messages"] += prompt.turns[turn]
    arguments = {**template_kwargs, **template_arguments(prompt.fields)}
    try:
        with at(f"prompt {answer['number'] + 1}"):
            return encode_prompt(answer["messages"], tokenizer, arguments)
    except ValueError as error:
        if turn == 0:  # the record's own words
            raise
        answer["flaw"], answer["refusal"] = REFUSED, str(error)
        return None


def _add(answer: dict[str, Any], read: list[int], text: Written, tokenizer: Any, prompt: Prompt) -> None:
    """Add what the target wrote behind what it read."""
    rows = answer["rows"]
    if not rows or read[: len(rows[-1]["input_ids"])] != rows[-1]["input_ids"]:
        rows.append({"input_ids": [], "loss_mask": []})
    row = rows[-1]
    row["loss_mask"] += [0] * (len(read) - len(row["input_ids"])) + [1] * len(text.ids)
    row["input_ids"] = read + text.ids
    answer["messages"].append(_message(read, text, tokenizer, prompt))
    answer["flaw"] = None if text.ended else UNENDED


def _message(read: list[int], text: Written, tokenizer: Any, prompt: Prompt) -> Message:
    """Turn what the target wrote into a message: by the tokenizer's `response_template`, or else all but its end.

    Markers of reasoning and channels are special tokens; without them, a chat template takes reasoning for an answer.
    """
    words = tokenizer.decode(text.ids[:-1] if text.ended else text.ids)
    message: Message = {"role": ASSISTANT, "content": words}
    if prompt.messages and text.ids and getattr(tokenizer, "response_template", None):
        try:
            parsed = tokenizer.parse_response(text.ids, prefix=read, tools=prompt.fields.get("tools"))
        except ValueError:  # not as the target should write, or cut
            return message
        message = {"content": "", **parsed, "role": ASSISTANT}
    return message
