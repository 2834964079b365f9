"""The text of Qwen2.5-Coder's drafter: its parts in their order, and the prompts of each.

Parts of code and of chat take turns, so that the first ones are a mixture of everything already, and training can begin
before the last one is answered.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pyarrow.parquet as pq

from hf_domino._common.atomic_writes import write_atomic
from recipes.qwen_coder_chats import Articles, Chats
from recipes.qwen_coder_tasks import CodeTasks, functions
from recipes.smollm2_tasks import Tasks

EVALUATION, ARTICLES, CHAT = "evaluation", "articles", "chat"
HELD_OUT_ARTICLES, HELD_OUT_CHAT = f"{EVALUATION}-{ARTICLES}", f"{EVALUATION}-{CHAT}"
TURNS = tuple(part for number in range(16) for part in (str(number), f"{CHAT}-{number}"))
PARTS = (EVALUATION, ARTICLES, HELD_OUT_ARTICLES, HELD_OUT_CHAT, *TURNS)
PROMPTS_OF_A_PART = 256
OTHER_SIZES = {EVALUATION: 64, ARTICLES: 128, HELD_OUT_ARTICLES: 24, HELD_OUT_CHAT: 64}


def part_file(text: Path, part: str) -> Path:
    """The file of a part, in a folder of text."""
    return text / f"{part}.parquet" if is_read(part) else training_file(text, part)


def training_file(text: Path, part: str) -> Path:
    """The file of a part that is learned from."""
    return text / f"train-{part}.parquet"


def is_held_out(part: str) -> bool:
    """Whether a part is for the evaluation."""
    return part.startswith(EVALUATION)


def is_read(part: str) -> bool:
    """Whether the words of a part are read, too, as passages or as prompts to measure on."""
    return is_held_out(part) or part == ARTICLES


def write_prompts(work: Path, part: str, text: Path) -> Path:
    """Write the prompts of a part, `messages` each, unless they are there; none is a prompt of an earlier part.

    Functions and articles in the prompts of the evaluation are held out of all others.

    Args:
        work (`Path`): Folder of the prompts.
        part (`str`): One of `PARTS`.
        text (`Path`): Folder of the parts that are answered already. Those of chat need the articles.
    """
    path = _prompts_file(work, part)
    if not path.exists():
        earlier = filter(Path.exists, (_prompts_file(work, each) for each in PARTS[: PARTS.index(part)]))
        seen = {_first_words(line) for each in earlier for line in each.read_text(encoding="utf-8").splitlines()}
        tasks = _tasks(part, text)
        lines: list[str] = []
        while len(lines) < OTHER_SIZES.get(part, PROMPTS_OF_A_PART):
            line = json.dumps({"messages": tasks.messages()}, ensure_ascii=False)
            if _first_words(line) not in seen:
                seen.add(_first_words(line))
                lines.append(line)
        write_atomic(path, "".join(f"{line}\n" for line in lines))
    return path


def _prompts_file(work: Path, part: str) -> Path:
    return work / f"prompts-{part}.jsonl"


def _first_words(line: str) -> str:
    words: str = json.loads(line)["messages"][0]["content"]
    return words


def _tasks(part: str, text: Path) -> Tasks:
    """What makes the prompts of a part."""
    generator, held_out = random.Random(f"qwen-coder-{part}"), is_held_out(part)
    if part in (ARTICLES, HELD_OUT_ARTICLES):
        return Articles(generator)
    if CHAT in part:
        articles = pq.read_table(part_file(text, HELD_OUT_ARTICLES if held_out else ARTICLES), columns=["messages"])
        answers = [messages[-1]["content"] for messages in articles["messages"].to_pylist()]
        return Chats(generator, answers, held_out)
    return CodeTasks(generator, functions(held_out))
