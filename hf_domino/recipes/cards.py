"""Model cards of the bundled pair: what each model is, how it was made, on which sources, under which licence."""

from __future__ import annotations

import json
from pathlib import Path

from hf_domino.pair import dflash_folder, domino_folder
from hf_domino.recipes.corpus import REQUIREMENTS
from hf_domino.training.card import WHAT

TEMPLATES = Path(__file__).parent


def write_cards(target_folder: Path, work: Path) -> None:
    """Write `README.md` into the folders of a target, its drafter and the drafter's twin.

    Args:
        target_folder (`Path`): The target's folder.
        work (`Path`): Folder in which both were trained, for what their trainers' cards tell.
    """
    name = target_folder.name
    penalty = json.loads((target_folder / "generation_config.json").read_text(encoding="utf-8"))["repetition_penalty"]
    _write("card_target.md", target_folder, name=name, sources=_sources(), penalty=str(penalty))
    for kind, folder in (("domino", domino_folder(target_folder)), ("dflash", dflash_folder(target_folder))):
        fields = {"name": folder.name, "target": name, "kind": kind, "what": WHAT[kind]}
        _write("card_drafter.md", folder, **fields, training=_training(work / kind))


def _write(template: str, folder: Path, **fields: str) -> None:
    text = (TEMPLATES / template).read_text(encoding="utf-8").format(**fields)
    (folder / "README.md").write_text(text, encoding="utf-8")


def _training(run: Path) -> str:
    """The section of a trainer's card on how the drafter was trained; nothing where no card was written."""
    card = run / "README.md"
    _, heading, section = (card.read_text(encoding="utf-8") if card.exists() else "").partition("\n## Training")
    return heading + section


def _sources() -> str:
    """The packages of the corpus as a Markdown table."""
    rows = ["| package | version | licence |", "|---|---|---|"]
    for line in REQUIREMENTS.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            pin, licence = line.split("  # ")
            rows.append(f"| {' | '.join(pin.split('=='))} | {licence} |")
    return "\n".join(rows)
