"""What a study compares: base, budgets and variants of its YAML file, and the runs they ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from hf_domino._common.errors import invalid_argument

STUDY_FILE = Path(__file__).with_name("study.yaml")
BASE = "domino"
TEXTS = ("mixed", "greedy", "sampled", "plain")


class Budget(NamedTuple):
    """How much every run gets: optimizer steps, held-out texts, and rows to train on (default: as the steps take)."""

    steps: int
    texts: int
    rows: int | None = None


class Run(NamedTuple):
    """One variant, one seed."""

    variant: str
    seed: int

    @property
    def name(self) -> str:
        """Of its folder and its line in the log."""
        return f"{self.variant}-{self.seed}"


@dataclass(frozen=True)
class Variant:
    """The base with some fields changed; study.yaml says what each of ours means."""

    question: str
    seeds: int = 1
    against: str = BASE
    text: str = TEXTS[0]
    backbone_of: str | None = None
    effort: float = 1.0
    changes: dict[str, Any] = field(default_factory=dict)

    def described(self) -> dict[str, Any]:
        """Everything it changes, for its rows."""
        usual = {entry.name: entry.default for entry in fields(self)}
        ours = {name: getattr(self, name) for name in ("text", "backbone_of", "effort")}
        return self.changes | {name: value for name, value in ours.items() if value != usual[name]}


@dataclass(frozen=True)
class Study:
    """A study's file, checked: fields that all trainings share, budgets, and variants in the order they are trained."""

    base: dict[str, Any]
    budgets: dict[str, Budget]
    variants: dict[str, Variant]

    def runs(self, only: Sequence[str] = (), seeds: Sequence[int] = ()) -> list[Run]:
        """The runs that are asked for, in order: by default all variants, each with its own seeds."""
        for name in only:
            if name not in self.variants:
                raise invalid_argument("--only", f"among {', '.join(self.variants)}", name, "See study --list.")
        chosen = {name: one.seeds for name, one in self.variants.items() if one.seeds and (not only or name in only)}
        return [Run(name, seed) for name, count in chosen.items() for seed in seeds or range(count)]

    def budget(self, name: str) -> Budget:
        """A budget by its name."""
        if name not in self.budgets:
            raise invalid_argument(
                "--budget", f"among {', '.join(self.budgets)}", name, "Budgets stand in the study's file."
            )
        return self.budgets[name]

    def num_rows(self, budget: Budget) -> int:
        """Texts that a run of this budget trains on."""
        return budget.rows or budget.steps * self.base["per_device_train_batch_size"]


def load_study(path: Path = STUDY_FILE) -> Study:
    """Read a study's YAML file with `base`, `budgets` and `variants`."""
    if not path.is_file():
        raise invalid_argument("--study", "a YAML file", str(path), "There is none of that name.")
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    own = {entry.name for entry in fields(Variant)}
    variants: dict[str, Variant] = {}
    for name, values in found["variants"].items():
        changes = {field: value for field, value in values.items() if field not in own}
        variants[name] = variant = Variant(**{f: v for f, v in values.items() if f in own}, changes=changes)
        if variant.text not in TEXTS:
            raise invalid_argument(
                f"{path}: text of {name}", f"among {', '.join(TEXTS)}", variant.text, "Choose one of them."
            )
        for role, other in (("against", variant.against), ("backbone_of", variant.backbone_of)):
            if other is not None and other not in variants:
                raise invalid_argument(
                    f"{path}: {role} of {name}", "a variant that stands before it", other, "Move that one up."
                )
    return Study(found["base"], {name: Budget(**values) for name, values in found["budgets"].items()}, variants)
