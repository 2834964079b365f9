"""`Result`: one measurement, with the settings and the machine that it was made with; a line of a JSONL file.

`hf-domino bench` writes such files, and so do the studies and benchmarks of `model_cards/workshop`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from hf_domino._common.errors import invalid_argument

VERSION = 1


@dataclass(frozen=True)
class Result(Mapping[str, Any]):
    """One measurement.

    It is a mapping, too: `result["seconds"]` finds a figure, a setting or a part of the provenance by its name, and
    `result | {"seconds": 2}` is the result with other figures.

    Args:
        method (`str`): What was measured: a way to generate, the variant of a study, the stage of a recipe.
        settings (`Mapping`, *optional*): What was chosen: models, prompts, sizes, options. Only results with the same
            settings can be compared.
        figures (`Mapping`, *optional*): What came out. `skipped` is the reason why nothing was measured.
        provenance (`Mapping`, *optional*): Hardware, versions, commit and date, by
            [`~_common.provenance.provenance`].
        version (`int`, *optional*, defaults to 1): Version of this record.

    Example:
    ```python
    >>> from hf_domino.evaluation.results import Result
    >>> result = Result("plain", {"batch_size": 1}, {"seconds": 2.5}, {"date": "2026-11-29"})
    >>> result["seconds"], result["batch_size"], result.get("tree_size")
    (2.5, 1, None)

    ```
    """

    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    figures: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    version: int = VERSION

    def __getitem__(self, name: str) -> Any:
        for part in self._parts():
            if name in part:
                return part[name]
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (name for part in self._parts() for name in part)

    def __len__(self) -> int:
        return sum(map(len, self._parts()))

    def __or__(self, figures: Mapping[str, Any]) -> Result:
        return replace(self, figures={**self.figures, **figures})

    def _parts(self) -> tuple[Mapping[str, Any], ...]:
        return {"method": self.method}, self.settings, self.figures, self.provenance

    def to_line(self) -> str:
        """Return the result as a line of JSON, with floats of six digits, which is more precise than any clock."""
        exact = json.dumps(asdict(self))
        short = json.loads(exact, parse_float=lambda digits: float(f"{float(digits):.6g}"))
        return json.dumps(short, separators=(",", ":")) + "\n"

    @classmethod
    def from_line(cls, line: str | bytes) -> Result:
        """Read a line of JSON.

        Raises:
            ValueError: If it is not a result of this version.
        """
        values = json.loads(line)
        if not isinstance(values, dict) or values.keys() != {each.name for each in fields(cls)}:
            raise ValueError("expected a JSON object with method, settings, figures, provenance and version")
        if values["version"] != VERSION:
            raise ValueError(f"expected version {VERSION}, got {values['version']!r}")
        return cls(**values)


def to_lines(results: Iterable[Result]) -> str:
    """Return results as lines of JSON."""
    return "".join(result.to_line() for result in results)


def append_results(path: Path, results: Iterable[Result]) -> None:
    """Add results to a JSONL file, which is created if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(to_lines(results))


def read_results(path: Path, mend: bool = False) -> list[Result]:
    """Read results from a JSONL file; with `mend`, leave out a last line that was not written completely."""
    if not path.is_file():
        raise invalid_argument(
            "results", "a JSONL file", str(path), f"Measure with `hf-domino bench --results {path}`."
        )
    results: list[Result] = []
    lines = list(filter(bytes.strip, path.read_bytes().splitlines()))
    for number, line in enumerate(lines, start=1):
        try:
            results.append(Result.from_line(line))
        except ValueError as error:  # not JSON or text, or another object
            if mend and results and number == len(lines):  # anywhere else, it is not a file of results
                break
            way_out = "A run that was broken off is finished by its own command."
            raise ValueError(f"{path}, line {number}: {error}. {way_out}") from error
    return results


def measured(results: Iterable[Result]) -> list[Result]:
    """Return the results that were measured, not skipped."""
    return [result for result in results if "skipped" not in result.figures]
