"""What drafters of a checkout accept after how many anchors, by their cards and by the rows of studies."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hf_domino.cards.sections import CARD, read_sections, read_text
from hf_domino.cards.training import read_training
from hf_domino.configuration import DominoConfig
from hf_domino.evaluation.study.rows import of_budget, read_rows
from hf_domino.pair import find_pair

STUDY, WALKED = "study.jsonl", "walked_acceptance_length"
OF_A_KIND = {"projector_type"}  # the one change with which a run is still as its study's base says


@dataclass(frozen=True)
class Trained:
    """A drafter that was trained and measured, on a target and text of its own.

    Args:
        name (`str`): Of its folder, or of the study and the number of its runs.
        anchors (`int`): Most blocks it was trained on: rows may hold fewer.
        acceptance_length (`float`): In greedy rounds over held-out text.
    """

    name: str
    anchors: int
    acceptance_length: float


def trained_here(projector_type: str, folder: Path | None = None) -> list[Trained]:
    """Drafters of a kind in the checkout, by their anchors; none where there is no checkout.

    Args:
        projector_type (`str`): `"domino"` or `"dflash"`.
        folder (`Path`, *optional*): With the drafters' folders. Defaults to the checkout's.
    """
    if folder is None:
        try:
            folder = find_pair().parent
        except FileNotFoundError:
            return []
    found = [each for drafter in sorted(folder.iterdir()) for each in _of_folder(drafter, projector_type)]
    return sorted(found, key=lambda each: each.anchors)


def _of_folder(folder: Path, projector_type: str) -> Iterator[Trained]:
    """What a folder's study and card say."""
    if (folder / STUDY).is_file():
        rows = [row for row in of_budget(read_rows(folder / STUDY)) if set(row["changes"]) <= OF_A_KIND]
        rows = [row for row in rows if (row["base"] | row["changes"])["projector_type"] == projector_type]
        if rows:
            base = rows[0]["base"]
            anchors = rows[0]["steps"] * base["per_device_train_batch_size"] * base["num_anchors"]
            length = statistics.mean(row["acceptance_length"] for row in rows)
            yield Trained(f"study of {rows[0]['target']}, {len(rows)} seeds", anchors, length)
    facts, evaluation = read_training(read_sections(read_text(folder / CARD)).get("training", ""))
    # A drafter that was trained further has the blocks of earlier trainings behind it, which its card does not count.
    is_whole = facts.get("lambda_base_start") == "1" and WALKED in evaluation
    if is_whole and DominoConfig.from_pretrained(folder).projector_type == projector_type:
        anchors = math.prod(int(facts[name].replace(",", "")) for name in ("steps", "rows per step", "num_anchors"))
        yield Trained(folder.name, anchors, float(evaluation[WALKED]))
