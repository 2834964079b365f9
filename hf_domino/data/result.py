"""What comes of the answers: rows to train on, rows to evaluate on, and a report of what was kept and why not."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_domino._common.notices import notice
from hf_domino._common.whole_files import write_whole
from hf_domino.data.answers import TOO_LONG, UNENDED
from hf_domino.data.filters import distinct_ngram_ratio, loops
from hf_domino.data.prompts import Prompt, Sieve
from hf_domino.data.settings import WritingSettings
from hf_domino.data.units import Rows

TRAIN, EVALUATION, REPORT = "train.jsonl", "evaluation.jsonl", "report.json"
LOOPS = "loops"
LEAST_KEPT = 0.3  # share of the answers below which it is said that most are lost


def write_result(
    output: Path, sieve: Sieve, answers: Rows, settings: WritingSettings, work: tuple[int, float]
) -> dict[str, Any]:
    """Write the files of rows and the report, and return that; `work` is the tokens written and the seconds it took.

    Raises:
        ValueError: If no row is left to train on. Report and batches are written, so that no text is lost.
    """
    flaws = [_flaw(answer, settings) for answer in answers]
    kept = [answer for answer, flaw in zip(answers, flaws, strict=True) if flaw is None]
    kept.sort(key=lambda answer: _rank(sieve.kept[answer["number"]]))  # lengths mixed, whatever was asked for first
    rows = [[_row(answer, row, sieve.kept[answer["number"]]) for row in answer["rows"]] for answer in kept]
    dropped = Counter(flaw for flaw in flaws if flaw is not None)
    report = _report(sieve, answers, kept, rows, dropped, settings, work)
    write_whole(output / REPORT, json.dumps(report, indent=1) + "\n")
    _judge(report, settings)
    for name, part in ((EVALUATION, rows[: settings.eval_rows]), (TRAIN, rows[settings.eval_rows :])):
        write_whole(output / name, "".join(json.dumps(row) + "\n" for chat in part for row in chat))
    return report


def _judge(report: Mapping[str, Any], settings: WritingSettings) -> None:
    """Say that most answers are lost and what keeps them; refuse to end with nothing to train on."""
    answers, rows = report["answers"], report["rows"]
    said = f"{answers['kept']} of {answers['written']} answers are kept"
    if answers["dropped"]:
        said += f" (dropped: {', '.join(f'{count} {why}' for why, count in answers['dropped'].items())})"
    if answers["dropped"].get(UNENDED):
        said += f"; unended ones are cut at max_new_tokens={settings.max_new_tokens}: raise it, or pass --keep-unended"
    if not rows[TRAIN]:
        of_evaluation = f"The first {settings.eval_rows} go to {EVALUATION}: lower eval_rows (--eval-rows)"
        raise ValueError(f"{TRAIN} has no row: {said}. {of_evaluation} or ask for more rows.")
    if answers["kept"] < LEAST_KEPT * answers["written"]:
        notice(f"Only {said}.")


def _flaw(answer: Mapping[str, Any], settings: WritingSettings) -> str | None:
    """Why an answer is not kept; a chat that grew too long is kept up to there."""
    flaw = answer["flaw"]
    if not answer["rows"] or flaw not in (None, TOO_LONG, UNENDED) or (flaw == UNENDED and not settings.keep_unended):
        return flaw
    return LOOPS if any(loops(ids, settings.min_distinct) for ids in map(_own_words, answer["rows"])) else None


def _own_words(row: Mapping[str, list[int]]) -> list[int]:
    return [token for token, mask in zip(row["input_ids"], row["loss_mask"], strict=True) if mask]


def _rank(prompt: Prompt) -> str:
    return hashlib.sha256(repr((prompt.messages, prompt.text)).encode()).hexdigest()


def _row(answer: Mapping[str, Any], row: Mapping[str, list[int]], prompt: Prompt) -> dict[str, Any]:
    """A row with its words, for people to read and for a benchmark to ask."""
    messages = answer["messages"]
    text = {"prompt": prompt.text, "completion": messages[-1]["content"]}
    said = {"messages": messages, **prompt.tools} if prompt.messages else text
    return {**row, "temperature": answer["temperature"]} | said


def _report(
    sieve: Sieve,
    answers: Rows,
    kept: Rows,
    rows: Sequence[Rows],
    dropped: Counter[str],
    settings: WritingSettings,
    work: tuple[int, float],
) -> dict[str, Any]:
    texts = [_own_words(row) for chat in rows for row in chat]
    tokens, seconds = work
    return {
        "prompts": {
            "written or read": len(sieve.kept) + sum(sieve.dropped.values()),
            "kept, all distinct": len(sieve.kept),
            "dropped": dict(sieve.dropped),
        },
        "answers": {
            "written": len(answers),
            "kept": len(kept),
            "dropped": dict(dropped),
            "unended": sum(answer["flaw"] == UNENDED for answer in answers),
        },
        "rows": {
            TRAIN: sum(map(len, rows[settings.eval_rows :])),
            EVALUATION: sum(map(len, rows[: settings.eval_rows])),
        },
        "tokens": {"written": tokens, "supervised": sum(map(len, texts))},
        "distinct-4": round(sum(map(distinct_ngram_ratio, texts)) / max(1, len(texts)), 3),
        "seconds": round(seconds, 1),
        "tokens per hour and process": round(3600 * tokens / seconds) if seconds else None,
    }
