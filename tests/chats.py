"""Chat templates of the tiny vocabulary, and a writer whose words a test chooses."""

from __future__ import annotations

import copy
import json

from builders import EOS

from hf_domino.data.writers import Written

# `<mask>` begins a turn, `<eos>` ends it.
TURNS = "{% for m in messages %}<mask>{{ m.role }}: {{ m.content }}<eos>{% endfor %}"
GENERATION = "{% if add_generation_prompt %}<mask>assistant: {% endif %}"
TEMPLATE = TURNS + GENERATION
WITH_SYSTEM = "{% if messages[0].role != 'system' %}<mask>system: be brief<eos>{% endif %}" + TEMPLATE
# Reasoning, here in brackets, is dropped from turns that others follow, as Qwen3 does.
DROPS_REASONING = TEMPLATE.replace(
    "m.content", "m.content if loop.last or m.role == 'user' else m.content.split(')')[-1]"
)


def chat_tokenizer(tokenizer, template=TEMPLATE):
    """A copy of a tokenizer with a chat template."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    return tokenizer


class ScriptedWriter:
    """Says what a function makes of the prompt, its row and its seed; a text that ends in `~` is not ended."""

    def __init__(self, tokenizer, say):
        self.tokenizer, self.say, self.asked = tokenizer, say, []

    def write(self, prompts, sampling, seed):
        self.asked.append((prompts, sampling, seed))
        return [self._text(self.say(self.tokenizer.decode(ids), row, seed)) for row, ids in enumerate(prompts)]

    def _text(self, text):
        ids = self.tokenizer(text.removesuffix("~"), add_special_tokens=False)["input_ids"]
        return Written(ids, False) if text.endswith("~") else Written([*ids, EOS], True)


def write_lines(path, records):
    """A file of JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read_lines(path):
    """What is in one."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def texts_of_row(row, tokenizer):
    """What a row reads, and what of it is learned."""
    learned = [token for token, mask in zip(row["input_ids"], row["loss_mask"], strict=True) if mask]
    return tokenizer.decode(row["input_ids"]), tokenizer.decode(learned)
