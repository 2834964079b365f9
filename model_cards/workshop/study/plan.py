"""What a study compares: base, budgets and variants of its YAML file, and the runs they ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from hf_domino._common.refusal import refusal

STUDY_FILE = Path(__file__).with_name("study.yaml")
BASE = "domino"
TEXTS = ("mixed", "greedy", "sampled", "plain")
SECTIONS = ("base", "budgets", "variants")


@dataclass(frozen=True)
class Budget:
    """How much every run gets.

    Args:
        steps (`int`): Optimizer steps.
        texts (`int`): Held-out texts that acceptance is walked over.
        rows (`int`, *optional*): Texts to train on; fewer than the steps take are seen again. Defaults to as many.
    """

    steps: int
    texts: int
    rows: int | None = None


@dataclass(frozen=True)
class Variant:
    """The base with some fields changed.

    Args:
        question (`str`): What it answers.
        seeds (`int`, *optional*, defaults to 1): How many runs, with seeds 0, 1, ...
        against (`str`, *optional*, defaults to `"domino"`): The variant it is compared with.
        text (`str`, *optional*, defaults to `"mixed"`): What it is trained on.
        backbone_of (`str`, *optional*): A variant whose backbone is taken over and frozen.
        effort (`float`, *optional*, defaults to 1.0): Steps over those of the budget; more than 1 sees texts again.
        changes (`dict`): Fields of a training that differ from the base.
    """

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
class Run:
    """One variant, one seed."""

    variant: str
    seed: int

    @property
    def name(self) -> str:
        """Of its folder and its line in the log."""
        return f"{self.variant}-{self.seed}"


@dataclass(frozen=True)
class Study:
    """A study's file, checked: fields that all trainings share, budgets, and variants in the order they are trained."""

    base: dict[str, Any]
    budgets: dict[str, Budget]
    variants: dict[str, Variant]

    def runs(self, only: Sequence[str] = (), seeds: Sequence[int] = ()) -> list[Run]:
        """The runs that are asked for, in order: by default all variants, each with its own seeds.

        Raises:
            ValueError: If there is no such variant.
        """
        for name in only:
            if name not in self.variants:
                raise refusal("--only", f"among {', '.join(self.variants)}", name, "See study --list.")
        chosen = [(name, variant) for name, variant in self.variants.items() if not only or name in only]
        return [Run(name, seed) for name, variant in chosen for seed in seeds or range(variant.seeds)]

    def budget(self, name: str) -> Budget:
        """A budget by its name.

        Raises:
            ValueError: If there is none.
        """
        if name not in self.budgets:
            raise refusal("--budget", f"among {', '.join(self.budgets)}", name, "Budgets stand in the study's file.")
        return self.budgets[name]

    def num_rows(self, budget: Budget) -> int:
        """Texts that a run of this budget trains on."""
        return budget.rows or budget.steps * self.base["per_device_train_batch_size"]


def load_study(path: Path = STUDY_FILE) -> Study:
    """Read a study's YAML file with `base`, `budgets` and `variants`.

    Raises:
        ValueError: If it holds something else, a budget is not of whole numbers above 0, or a variant names one that is
            not there before it.
    """
    if not path.is_file():
        raise ValueError(f"--study must be a YAML file, got {str(path)!r}: there is none of that name.")
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or set(found) != set(SECTIONS):
        raise ValueError(f"{path} must hold {', '.join(SECTIONS)}, each a mapping: see {STUDY_FILE.name}.")
    budgets = {name: _budget(name, values, path) for name, values in found["budgets"].items()}
    variants: dict[str, Variant] = {}
    for name, values in found["variants"].items():
        variants[name] = _variant(values)
        _check(name, variants, path)
    return Study(found["base"], budgets, variants)


def _budget(name: str, values: dict[str, Any], path: Path) -> Budget:
    own = [entry.name for entry in fields(Budget)]
    needed = [entry.name for entry in fields(Budget) if entry.default is MISSING]
    for field_name in dict.fromkeys((*values, *needed)):
        if field_name not in own:
            raise refusal(f"{path}: a field of budget {name}", f"among {', '.join(own)}", field_name, "Correct it.")
        value = values.get(field_name)
        if type(value) is not int or value < 1:
            remedy = "Leave rows out to train on as many as the steps take." if field_name == "rows" else "Give one."
            raise refusal(f"{path}: {field_name} of budget {name}", "a whole number above 0", value, remedy)
    return Budget(**values)


def _variant(values: dict[str, Any]) -> Variant:
    own = {entry.name for entry in fields(Variant)}
    changes = {name: value for name, value in values.items() if name not in own}
    return Variant(**{name: value for name, value in values.items() if name in own}, changes=changes)


def _check(name: str, variants: dict[str, Variant], path: Path) -> None:
    variant = variants[name]
    if variant.text not in TEXTS:
        raise refusal(f"{path}: text of {name}", f"among {', '.join(TEXTS)}", variant.text, "Choose one of them.")
    if not variant.effort > 0:
        raise refusal(f"{path}: effort of {name}", "above 0", variant.effort, "1 is as many steps as the budget's.")
    for role in ("against", "backbone_of"):
        other = getattr(variant, role)
        if other is not None and other not in variants:
            raise refusal(f"{path}: {role} of {name}", "a variant that stands before it", other, "Move that one up.")
