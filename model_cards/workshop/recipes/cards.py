"""Model cards of our own models: what each is, how it was made, on which sources, under which licence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from hf_domino._common.run_record import RUN_FILE
from hf_domino.cards.sections import CARD
from hf_domino.cards.training import FIGURE
from hf_domino.publishing.folder_card import card_for
from recipes.corpus import REQUIREMENTS

TARGET = Path(__file__).with_name("card_target.md")
RECIPE = Path(__file__).with_name("drafter.yaml")
LICENCE = {"license": "apache-2.0"}
# Those of `python model_cards/workshop figures`, by their titles.
PICTURES = {"speed-up": "Speed-up", "acceptance": "Acceptance by position", "round": "Time in a round"}
ABOUT_PAIR = """
## About the bundled pair

`python model_cards/workshop recipe pair` trained this drafter on text that the target wrote itself. The names above are
folders beside each other, as in the project's `model_cards/`. `{target}-domino` and `{target}-dflash` have the same
backbone, block size, loss weights, data and steps, which are in `model_cards/workshop/recipes/drafter.yaml`. Both were
measured in one run, whose results are in the card of `{target}-domino`.
"""


def write_cards(target_folder: Path, work: Path) -> None:
    """Write `README.md` into the folders of the bundled target, its drafter and its DFlash baseline."""
    name = target_folder.name
    penalty = json.loads((target_folder / "generation_config.json").read_text(encoding="utf-8"))["repetition_penalty"]
    about_target = TARGET.read_text(encoding="utf-8").format(name=name, sources=_sources(), penalty=str(penalty))
    (target_folder / CARD).write_text(about_target, encoding="utf-8")
    for kind in ("domino", "dflash"):
        folder = target_folder.with_name(f"{name}-{kind}")
        write_drafter_card(folder, work / kind, name, ABOUT_PAIR.format(target=name))


def write_drafter_card(folder: Path, run: Path, target: str, about: str) -> Path:
    """Write a drafter's card anew from its configuration, its training and its rows, if it was measured.

    Args:
        folder (`Path`): Folder of the drafter.
        run (`Path`): Folder of its training, whose record is copied beside the drafter. Without one, the record that
            is there already counts.
        target (`str`): Name of the target.
        about (`str`): What else there is to say, as Markdown.
    """
    for name in (RUN_FILE, FIGURE):
        if (run / name).is_file():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(run / name, folder / name)
    path = folder / CARD
    path.unlink(missing_ok=True)
    path.write_text(card_for(folder, target=target, metadata=LICENCE) + _pictures(folder) + about, encoding="utf-8")
    return path


def _pictures(folder: Path) -> str:
    """Show the pictures of the results, if there are some."""
    there = {title: name for name, title in PICTURES.items() if (folder / "figures" / f"{name}.svg").is_file()}
    return "".join(f"\n![{title}](figures/{name}.svg)\n" for title, name in there.items())


def _sources() -> str:
    """The packages of the corpus as a Markdown table."""
    pins = [line for line in REQUIREMENTS.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    rows = [line.replace("==", " | ").replace("  # ", " | ") for line in pins]
    return "\n".join(["| package | version | licence |", "|---|---|---|", *(f"| {row} |" for row in rows)])
