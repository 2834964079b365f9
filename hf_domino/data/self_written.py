"""Prompts that a chat model writes itself: given the opening of a user's turn, it finishes it (arXiv 2406.08464)."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from functools import cache, partial
from pathlib import Path
from typing import Any

from hf_domino._common.notices import notice
from hf_domino.data.filters import Exclusions, loops
from hf_domino.data.prompts import USER, Prompt, Sieve
from hf_domino.data.settings import WritingSettings
from hf_domino.data.units import Rows, Workplace
from hf_domino.data.user_turn import UserTurn, with_system
from hf_domino.data.writers import NO_ROUND_TRIP, SEED_STRIDE, Sampling, Writer

STAGE = "prompts"
DEFAULT_ROWS = 1024
LEAST_KEPT = 0.3  # share below which a target needs a beginning to go on from
MAX_ROUNDS = 4
SPARE = 1.1  # of a later round, which is small: rather a few prompts too many than another round


@cache
def topics() -> list[str]:
    """Beginnings of user turns, of many kinds of request."""
    return Path(__file__).with_name("topics.txt").read_text(encoding="utf-8").splitlines()


class SelfWriter:
    """Lets the target write prompts until enough of them are worth an answer."""

    def __init__(self, writer: Writer, turn: UserTurn, tokenizer: Any, settings: WritingSettings):
        self.writer, self.turn, self.tokenizer, self.settings = writer, turn, tokenizer, settings
        self._special = set(tokenizer.all_special_ids)

    def write(self, place: Workplace, exclusions: Exclusions) -> Sieve:
        """Write prompts in rounds, each as large as the last one's share of kept prompts asks for.

        Returns:
            `Sieve`: The prompts that are kept, `settings.rows` of them or fewer, and why others fell.
        """
        wanted = self.settings.rows or DEFAULT_ROWS
        sieve, num_units, share, with_topics = Sieve(exclusions), 0, 1.0, False
        for number in range(1, MAX_ROUNDS + 1):
            missing = wanted - len(sieve.kept)
            if missing <= 0:
                break
            if share < LEAST_KEPT and not with_topics:
                with_topics = True
                _say_topics(sieve, share)
            asked = math.ceil(missing / max(share, LEAST_KEPT) * (1 if number == 1 else SPARE))
            count, before = math.ceil(asked / self.settings.batch_size), len(sieve.kept)
            units = place.do(f"{STAGE}-{number}", count, partial(self._unit, num_units, asked, with_topics))
            for row in itertools.chain.from_iterable(units):
                self._sift(row, sieve)
            share = (len(sieve.kept) - before) / asked
            num_units += count
        if len(sieve.kept) < wanted:
            notice(f"Only {len(sieve.kept)} of {wanted} prompts after {MAX_ROUNDS} rounds: {_reasons(sieve.dropped)}.")
        if surplus := len(sieve.kept[wanted:]):
            sieve.dropped["surplus"] = surplus
            del sieve.kept[wanted:]
        return sieve

    def _unit(self, first: int, asked: int, with_topics: bool, unit: int) -> tuple[Rows, int]:
        """One batch of a round of `asked` prompts, which follows `first` batches of other rounds."""
        settings, size, number = self.settings, self.settings.batch_size, first + unit
        places = range(number * size, number * size + min(size, asked - unit * size))
        beginnings = [topics()[place % len(topics())] if with_topics else "" for place in places]
        begun = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in beginnings]
        sampling = Sampling(
            settings.max_prompt_tokens, settings.prompt_temperature, settings.prompt_top_p, self.turn.ends
        )
        read = [self.turn.opening + ids for ids in begun]
        texts = self.writer.write(read, sampling, settings.seed * SEED_STRIDE + number)
        rows = [
            {"flaw": NO_ROUND_TRIP} if text is None else {"ids": ids + text.ids, "ended": text.ended}
            for ids, text in zip(begun, texts, strict=True)
        ]
        return rows, sum(len(text.ids) for text in texts if text)

    def _sift(self, row: dict[str, Any], sieve: Sieve) -> None:
        if "flaw" in row:
            sieve.dropped[row["flaw"]] += 1
            return
        ids = row["ids"][: -1 if row["ended"] else None]
        text = self.tokenizer.decode(ids, skip_special_tokens=True).strip()
        message = {"role": USER, "content": text}
        sieve.add(Prompt(tuple(with_system([message], self.settings.system))), self._flaw(ids, text, row["ended"]))

    def _flaw(self, ids: list[int], text: str, ended: bool) -> str | None:
        if not ended:
            return "unended"
        if not any(character.isalnum() for character in text):
            return "empty"
        if self._special.intersection(ids):
            return "special tokens"
        return "loops" if loops(ids, self.settings.min_distinct) else None


def _say_topics(sieve: Sieve, share: float) -> None:
    notice(
        f"Only {share:.0%} of the prompts that the target wrote are kept ({_reasons(sieve.dropped)}): "
        "for the others it is given the first words."
    )


def _reasons(dropped: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in dropped.most_common()) or "none dropped"
