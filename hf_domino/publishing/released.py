"""A dated list of the drafters that were released for known targets, which can be read offline."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

from hf_domino._common.errors import invalid_argument
from hf_domino.formats.source import IN_A_CLONE, is_in_checkout, path_in_checkout

FILE = Path(__file__).with_name("released.jsonl")
MARKS = ("run by us", "layout tested", "not tried")


@dataclass(frozen=True)
class ReleasedDrafter:
    """A released drafter. Fields whose value is unknown are None.

    Args:
        target (`str`): The target's name on the Hub.
        billions (`float`): Number of parameters of the target, in billions.
        drafter (`str`): The drafter's name on the Hub, or its folder in this repository.
        method (`str`): Its `projector_type`.
        layout (`str`, *optional*): The project in whose layout its file is; see docs/serving.md.
        block_size (`int`, *optional*): Number of tokens in a block.
        trained_length (`int`, *optional*): Longest text of its training, in tokens.
        mode (`str`, *optional*): Chat mode in which it was trained.
        acceptance_length (`float`, *optional*): Tokens per round according to its own card, on text of the card's
            choice.
        licence (`str`, *optional*): Its licence.
        mark (`str`): `"run by us"`, `"layout tested"` (with small random weights), or `"not tried"`.
        source (`str`): Where the drafter is listed.
        seen (`str`): Month in which it was seen there, `YYYY-MM`.
    """

    target: str
    billions: float
    drafter: str
    method: str
    layout: str | None
    block_size: int | None
    trained_length: int | None
    mode: str | None
    acceptance_length: float | None
    licence: str | None
    mark: str
    source: str
    seen: str


def released(target: str | None = None) -> list[ReleasedDrafter]:
    """List the released drafters for a target, small targets first.

    Args:
        target (`str`, *optional*): The target's name on the Hub; defaults to all targets.

    Example:
    ```python
    >>> from hf_domino.publishing import released
    >>> [drafter.drafter for drafter in released("Qwen/Qwen3-0.6B")]
    ['Eros483/Qwen3-0.6B-Domino-b8']

    ```
    """
    known = read_released(FILE)
    return [drafter for drafter in known if target is None or drafter.target.lower() == target.lower()]


def read_released(path: Path) -> list[ReleasedDrafter]:
    """Read the list, and raise a `ValueError` if a line lacks a field or has an unknown field or mark."""
    names = {field.name for field in fields(ReleasedDrafter)}
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        place = f"{path}, line {number}"
        try:
            values = dict(json.loads(line))
        except (ValueError, TypeError):
            raise invalid_argument(place, "a JSON object", line, "A line describes one drafter.") from None
        if wrong := names ^ values.keys():
            raise invalid_argument(
                place, f"with the fields {', '.join(sorted(names))}", sorted(wrong), "Correct these."
            )
        for name in ("target", "drafter", "method", "source", "seen"):
            if not isinstance(values[name], str):
                raise invalid_argument(
                    f"{name} in {place}", "a text", values[name], "Only figures and licences may be null."
                )
        if values["mark"] not in MARKS:
            raise invalid_argument(
                f"mark in {place}", f"one of {', '.join(MARKS)}", values["mark"], "Choose one of them."
            )
        found.append(ReleasedDrafter(**values))
    return found


def known_drafters(target: str) -> str | None:
    """Name the released drafters for a target in one line, for commands without a drafter; None if there are none.

    Those in a checkout are named by a path that holds in the working directory, if they are on this machine.
    """
    found = {path_in_checkout(drafter.drafter): drafter.mark for drafter in released(target)}
    if not found:
        return None
    listed = ", ".join(f"{name} ({mark})" for name, mark in found.items())
    line = f"Drafters that were released for {target}: {listed}. Try one with --drafter NAME."
    if any(is_in_checkout(name) and not Path(name).is_dir() for name in found):
        line += f" {IN_A_CLONE}"
    return line
