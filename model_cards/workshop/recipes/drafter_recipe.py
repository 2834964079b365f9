"""What the recipes of drafters have in common: stages in their order, a target, and its drafter beside it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from hf_domino._common.errors import invalid_argument
from hf_domino.pair import domino_folder
from recipes.processes import run_stages


@dataclass(frozen=True)
class DrafterRecipe(ABC):
    """A recipe of stages, each of which leaves its result in the work folder and is skipped if that is there.

    The work folder holds a pair then: the target, and the drafter beside it.

    Args:
        work (`Path`): The folder of all results.
        processes (`int`): Processes that write text, one core each.
    """

    name: ClassVar[str]  # of the target's folder
    work: Path
    processes: int

    @property
    @abstractmethod
    def stages(self) -> dict[str, Callable[[], Path]]:
        """What makes each stage; every one returns where its result is."""

    def run(self, last: str | None = None) -> None:
        """Run all stages, or those up to `last`, and note the CPU time of each in `stages.jsonl`."""
        run_stages(self.stages, last, self.work / "stages.jsonl")

    @property
    def target(self) -> Path:
        """Folder of the target."""
        return self.work / self.name

    @property
    def drafter(self) -> Path:
        """Folder of the drafter, beside the target's."""
        return domino_folder(self.target)


def check_text(text: Path, held_out: Path) -> Path:
    """Return a folder of text that a target wrote before; raise a `ValueError` if a part of it is missing."""
    if list(text.glob("train*.parquet")) and held_out.is_file():
        return text
    allowed = f"a folder with train*.parquet and {held_out.name}"
    raise invalid_argument("--text", allowed, str(text), "Leave it out, and the target writes it.")
