"""Model cards of the bundled pair: what each model is, how it was made, on which sources, under which licence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import yaml
from transformers import TrainerState

from hf_domino.cards import read_sections, render_card, training_section
from hf_domino.cards.sections import CARD, read_text
from hf_domino.cards.training import FIGURE
from hf_domino.configuration import DominoConfig
from hf_domino.pair import dflash_folder, domino_folder
from hf_domino.training.fields import RECORDED
from recipes.corpus import REQUIREMENTS

TARGET = Path(__file__).with_name("card_target.md")
RECIPE = Path(__file__).with_name("drafter.yaml")
LICENCE = {"license": "apache-2.0"}
ABOUT = """
## About the bundled pair

Made by `python model_cards/workshop recipe`, on text that the target wrote itself. The names above are folders side by
side, as in `model_cards/` of the project. `{target}-domino` and `{target}-dflash` share backbone, block size, loss
weights, data and steps; `model_cards/workshop/recipes/drafter.yaml` holds them. Both were measured in one run, whose
results are in the card of `{target}-domino`.
"""


def write_cards(target_folder: Path, work: Path) -> None:
    """Write `README.md` into the folders of a target, its drafter and the drafter's twin."""
    name = target_folder.name
    penalty = json.loads((target_folder / "generation_config.json").read_text(encoding="utf-8"))["repetition_penalty"]
    about_target = TARGET.read_text(encoding="utf-8").format(name=name, sources=_sources(), penalty=str(penalty))
    (target_folder / CARD).write_text(about_target, encoding="utf-8")
    for kind, folder in (("domino", domino_folder(target_folder)), ("dflash", dflash_folder(target_folder))):
        config = DominoConfig.from_pretrained(folder)
        card = render_card(config, name=folder.name, target=name, training=_training(work / kind), metadata=LICENCE)
        (folder / CARD).write_text(card + ABOUT.format(target=name), encoding="utf-8")
        if (figure := work / kind / FIGURE).exists():
            (folder / FIGURE).parent.mkdir(exist_ok=True)
            shutil.copy(figure, folder / FIGURE)


def _training(run: Path) -> str:
    """The section of a trainer's card on how the drafter was trained; the recipe where no card was written."""
    recorded = read_sections(read_text(run / CARD)).get("training")
    recipe = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    facts = {field: recipe[field] for field in RECORDED if field in recipe}
    return recorded or training_section(TrainerState(global_step=recipe["max_steps"]), facts)


def _sources() -> str:
    """The packages of the corpus as a Markdown table."""
    rows = ["| package | version | licence |", "|---|---|---|"]
    for line in REQUIREMENTS.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            pin, licence = line.split("  # ")
            rows.append(f"| {' | '.join(pin.split('=='))} | {licence} |")
    return "\n".join(rows)
