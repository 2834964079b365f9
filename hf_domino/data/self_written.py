"""Let a chat model write prompts: given the opening of a user's turn, it writes the turn (arXiv 2406.08464)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_domino._common.errors import invalid_argument
from hf_domino._common.notices import notice
from hf_domino.data.chat import render_chat, with_system
from hf_domino.data.encoding import encode_continuation
from hf_domino.data.filters import Exclusions, loops
from hf_domino.data.names import Fields
from hf_domino.data.prompts import USER, Prompt, PromptFilter
from hf_domino.data.settings import WritingSettings
from hf_domino.data.units import Rows, RunUnits
from hf_domino.data.writers import SEED_STRIDE, Sampling, Writer

DEFAULT_ROWS = 1024
LEAST_KEPT = 0.3  # if a smaller share is kept, the target is given the first words of its prompts
MAX_ROUNDS = 4
SPARE = 1.1  # later rounds are small, so they ask for a few prompts too many, which can save another round
TOPICS = Path(__file__).with_name("topics.txt")  # first words of many different requests
SENTINEL = "Sentinel7Question"  # a word that no chat template contains
WAY_OUT = "Pass prompts for it to answer (--prompts FILE)."


def check_writes_prompts(tokenizer: Any) -> None:
    """Raise a `ValueError` if the target has no chat template, without which it cannot write prompts."""
    if tokenizer.chat_template is None:
        expected = "given for a target without a chat template, which cannot write its own"
        remedy = (
            "Pass texts that it continues (--prompts FILE with `prompt` or `text`; --prompts text takes bundled ones), "
            "or choose a chat model."
        )
        raise invalid_argument("prompts", expected, None, remedy)


def find_user_turn(
    tokenizer: Any, ends: Sequence[int], system: str | None, template_kwargs: Fields
) -> tuple[list[int], tuple[int, ...]]:
    """Find the token ids of a chat up to the user's first word, and the token ids that end the user's turn."""
    check_writes_prompts(tokenizer)
    messages = with_system([{"role": USER, "content": SENTINEL}], system)
    text = render_chat(messages, tokenizer, template_kwargs, add_generation_prompt=True)
    before, _, behind = text.partition(SENTINEL)
    if text.count(SENTINEL) != 1:
        remedy = f"A user's turn cannot be left open in this template. {WAY_OUT}"
        raise invalid_argument("the chat template", "one that shows a user's words once", text[:200], remedy)
    closing = tokenizer(behind, add_special_tokens=False)["input_ids"]
    if not closing or closing[0] not in tokenizer.get_added_vocab().values():
        remedy = f"The target could not say where its own question ends. {WAY_OUT}"
        raise invalid_argument("what ends a user's turn in the chat template", "a special token", behind[:40], remedy)
    opening = tokenizer(before, add_special_tokens=False)["input_ids"]
    return opening, tuple(dict.fromkeys((closing[0], *ends)))


def write_prompts(
    writer: Writer, tokenizer: Any, ends: Sequence[int], settings: WritingSettings, exclusions: Exclusions, do: RunUnits
) -> PromptFilter:
    """Let the target write prompts in rounds, and keep at most `settings.rows` of them.

    Each round asks for as many prompts as the share that was kept in the round before suggests.
    """
    opening, turn_ends = find_user_turn(tokenizer, ends, settings.system, settings.chat_template_kwargs)
    sampling = Sampling(settings.max_prompt_tokens, settings.prompt_temperature, settings.prompt_top_p, turn_ends)
    wanted = settings.rows or DEFAULT_ROWS
    size = settings.batch_size
    filtered = PromptFilter(exclusions)
    num_units = 0
    share = 1.0
    beginnings = [""]

    for number in range(1, MAX_ROUNDS + 1):
        missing = wanted - len(filtered.kept)
        if missing <= 0:
            break
        if share < LEAST_KEPT and len(beginnings) == 1:
            beginnings = TOPICS.read_text(encoding="utf-8").splitlines()
            notice(
                f"Only {share:.0%} of the prompts that the target wrote are kept ({_reasons(filtered.dropped)}): "
                "from now on, the command gives it the first words."
            )
        spare = 1 if number == 1 else SPARE
        asked = math.ceil(missing / max(share, LEAST_KEPT) * spare)

        def make(unit: int, first=num_units, asked=asked, beginnings=beginnings) -> Rows:
            places = range((first + unit) * size, first * size + min((unit + 1) * size, asked))
            texts = [beginnings[place % len(beginnings)] for place in places]
            begun = [encode_continuation(text, opening, tokenizer) for text in texts]
            seed = settings.seed * SEED_STRIDE + first + unit
            written = writer.write([opening + ids for ids in begun], sampling, seed)
            return [{"ids": ids + text.ids, "ended": text.ended} for ids, text in zip(begun, written, strict=True)]

        count = math.ceil(asked / size)
        before = len(filtered.kept)
        for written in do(f"prompts-{number}", count, make):
            _add(written, filtered, tokenizer, settings)
        share = (len(filtered.kept) - before) / asked
        num_units += count

    if len(filtered.kept) < wanted:
        reasons = _reasons(filtered.dropped)
        notice(f"Only {len(filtered.kept)} of {wanted} prompts were kept after {MAX_ROUNDS} attempts: {reasons}.")
    if surplus := len(filtered.kept[wanted:]):
        filtered.dropped["surplus"] = surplus
        del filtered.kept[wanted:]
    return filtered


def _add(written: Mapping[str, Any], filtered: PromptFilter, tokenizer: Any, settings: WritingSettings) -> None:
    """Keep a prompt that the target wrote, or count why it is dropped."""
    ids = written["ids"]
    if written["ended"]:
        ids = ids[:-1]
    text = tokenizer.decode(ids, skip_special_tokens=True).strip()
    drop_reason = None
    if not written["ended"]:
        drop_reason = "unended"
    elif not any(character.isalnum() for character in text):
        drop_reason = "empty"
    elif set(tokenizer.all_special_ids).intersection(ids):
        drop_reason = "special tokens"
    elif loops(ids, settings.min_distinct):
        drop_reason = "loops"
    filtered.add(Prompt(tuple(with_system([{"role": USER, "content": text}], settings.system))), drop_reason)


def _reasons(dropped: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in dropped.most_common()) or "none dropped"
