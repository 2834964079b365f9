"""Prompts for chat: short talks, translation, summaries, questions, maths, and answers from passages.

The passages are from articles that the target wrote before, other ones for training than for the evaluation.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import yaml

from recipes.qwen_coder_tasks import functions
from recipes.smollm2_tasks import PHRASES as TALK
from recipes.smollm2_tasks import SENTENCE_END, Tasks

PHRASES = Path(__file__).with_name("qwen_coder_chats.yaml")
FOLLOWED_SHARE = 0.4  # of talks, that the user goes on after
GERMAN_WORD = re.compile(r"\b(?:der|die|das|und|ist|ein|eine|nicht)\b")
LEAST_GERMAN = 0.06  # share of the words
PASSAGE_CHARACTERS, LONG_PASSAGE_CHARACTERS = 350, 900  # about 80 and 200 tokens
SENTENCE_CHARACTERS = range(30, 250)


class Articles(Tasks):
    """Requests for articles, from which passages are taken later."""

    def __init__(self, generator: random.Random):
        super().__init__(read_phrases(), (), (), generator)

    def messages(self) -> list[dict[str, str]]:
        """A request of one turn."""
        return [{"role": "user", "content": self.say("article")}]


class Chats(Tasks):
    """Talks of one or two turns, and tasks about passages.

    Args:
        generator (`random.Random`): What chooses.
        articles (`Sequence[str]`): Texts to take passages from.
        held_out (`bool`): Whether to use functions that are held out, or all others.
    """

    def __init__(self, generator: random.Random, articles: Sequence[str], held_out: bool):
        german = [text for text in articles if is_german(text)]
        english = [text for text in articles if not is_german(text)]
        super().__init__(read_phrases(), passages(english, PASSAGE_CHARACTERS), functions(held_out), generator)
        choose = partial(partial, generator.choice)
        self._made |= {
            "sentence": choose(sentences(english)),
            "long_passage": choose(passages(english, LONG_PASSAGE_CHARACTERS)),
            "german_passage": choose(passages(german, PASSAGE_CHARACTERS)),
            "german_sentence": choose(sentences(german)),
        }

    def messages(self) -> list[dict[str, str]]:
        """A task, and often what the user says next; the answer between them is still to be written."""
        kind = self.generator.choice(self.lists["task"]).strip("{}")
        asked = [self.say(kind)]
        if kind == "talk" and self.generator.random() < FOLLOWED_SHARE:
            asked += ["", self.say("follow_up")]
        roles = ("user", "assistant", "user")
        return [{"role": role, "content": text} for role, text in zip(roles, asked, strict=False)]


def read_phrases() -> dict[str, list[str]]:
    """The lists of phrases by name; ours, and those of SmolLM2's tasks for all other names."""
    shared, own = (yaml.safe_load(path.read_text(encoding="utf-8")) for path in (TALK, PHRASES))
    return shared | own


def is_german(text: str) -> bool:
    """Whether a text is German, by its most frequent words."""
    return len(GERMAN_WORD.findall(text)) > LEAST_GERMAN * len(text.split())


def passages(articles: Sequence[str], length: int) -> list[str]:
    """The pieces of articles that are about as long as wanted, whole sentences each."""
    return [piece for text in articles for piece in _pieces(text, length)]


def _pieces(text: str, length: int) -> Iterator[str]:
    piece = ""
    for sentence in _whole_sentences(text):
        piece = f"{piece} {sentence}".strip()
        if len(piece) > length // 2:
            if len(piece) <= length:
                yield piece
            piece = ""


def sentences(articles: Sequence[str]) -> list[str]:
    """The sentences of articles."""
    found = itertools.chain.from_iterable(map(_whole_sentences, articles))
    return [sentence for sentence in found if len(sentence) in SENTENCE_CHARACTERS]


def _whole_sentences(text: str) -> list[str]:
    """The sentences of a text in one line, without one at its end that was cut."""
    found = SENTENCE_END.split(" ".join(text.replace("*", "").replace("#", "").split()))
    return found if found[-1].endswith((".", "!", "?")) else found[:-1]
