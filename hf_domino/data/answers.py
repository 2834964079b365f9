"""Let the target answer chats, one assistant turn after another, and continue plain text.

An example holds exactly the tokens that the target read and wrote. If the template shows earlier turns as they were
written, a whole chat is one example. If it shows a turn differently once other turns follow, because it drops the
reasoning, that turn becomes a separate example.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hf_domino.data.chat import Message
from hf_domino.data.names import Fields
from hf_domino.data.prompts import ASSISTANT, Prompt, encode_prompt
from hf_domino.data.records import at
from hf_domino.data.settings import WritingSettings
from hf_domino.data.units import Rows, RunUnits
from hf_domino.data.writers import SEED_STRIDE, Sampling, Writer, Written

Answer = dict[str, Any]  # an answer to a prompt, with the fields that `write_answers` describes
TOO_LONG = "too long"
UNENDED = "unended"
REFUSED = "refused by the chat template"
# How gpt-oss marks channels. Its template, like others, takes a message without them.
CHANNEL = "<|channel|>"
FINAL_PART = re.compile(r"<\|channel\|>final.*?<\|message\|>", re.DOTALL)
FIRST_SEED = 500_000  # answers use seeds from here on, and prompts use those below
TURN_STRIDE = 10_000_019  # distance between the seeds of two turns in a batch of chats


def write_answers(
    prompts: Sequence[Prompt], writer: Writer, tokenizer: Any, settings: WritingSettings, do: RunUnits
) -> Rows:
    """Let the target answer prompts in batches of similar length, which use the temperatures in turn.

    An answer has the `number` of its prompt, its `rows` (examples), `messages` and `temperature`. Its `flaw` says why
    the chat ends early. If the chat template rejects the target's own text, `refusal` holds the error.
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
                    read = _read(answer, prompt, turn, tokenizer, settings.chat_template_kwargs)
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


def _read(answer: Answer, prompt: Prompt, turn: int, tokenizer: Any, template_kwargs: Fields) -> list[int] | None:
    """Return the token ids up to the target's next turn, or None if the template rejects the target's earlier text."""
    if not prompt.messages:
        return encode_prompt({"text": prompt.text}, tokenizer)
    answer["messages"] += prompt.turns[turn]
    try:
        with at(f"prompt {answer['number'] + 1}"):
            return encode_prompt({"messages": answer["messages"], **prompt.fields}, tokenizer, template_kwargs)
    except ValueError as error:
        if turn == 0:  # the template rejects the record itself
            raise
        answer["flaw"] = REFUSED
        answer["refusal"] = str(error)
        return None


def _add(answer: Answer, read: list[int], text: Written, tokenizer: Any, prompt: Prompt) -> None:
    """Add the tokens that the target read and wrote to an answer."""
    examples = answer["rows"]
    if not examples or read[: len(examples[-1]["input_ids"])] != examples[-1]["input_ids"]:
        examples.append({"input_ids": [], "loss_mask": []})
    example = examples[-1]
    example["loss_mask"] += [0] * (len(read) - len(example["input_ids"])) + [1] * len(text.ids)
    example["input_ids"] = read + text.ids
    message = message_of(read, text, tokenizer, prompt.fields.get("tools"), bool(prompt.messages))
    answer["messages"].append(message)
    answer["flaw"] = None if text.ended else UNENDED


def message_of(read: list[int], text: Written, tokenizer: Any, tools: Any = None, is_chat: bool = True) -> Message:
    """Turn the text that the target wrote into a message, with the tokenizer's `response_template` if it has one.

    Otherwise, the message holds the text without its end token; of a text in channels, only what the last final one
    says. Special tokens that mark reasoning stay in it, because without them a chat template would take the reasoning
    for the answer.

    Args:
        read (`list[int]`): Token ids of the prompt.
        text (`Written`): What the target wrote.
        tokenizer (`PreTrainedTokenizerBase`): The target's tokenizer.
        tools (*optional*): The tools that the prompt offered.
        is_chat (`bool`, *optional*, defaults to `True`): Whether the prompt was a chat.
    """
    written = text.ids[:-1] if text.ended else text.ids
    words = tokenizer.decode(written)
    message: Message = {"role": ASSISTANT, "content": words}
    if is_chat and CHANNEL in words:
        message["content"] = FINAL_PART.split(words)[-1] if FINAL_PART.search(words) else ""
    if is_chat and text.ids and getattr(tokenizer, "response_template", None):
        try:
            parsed = tokenizer.parse_response(text.ids, prefix=read, tools=tools)
        except ValueError:  # the text is cut, or does not match the response template
            return message
        message = {"content": "", **parsed, "role": ASSISTANT}
    return message
