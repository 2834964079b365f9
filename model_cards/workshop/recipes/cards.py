"""Model cards of our own models: what each is, how it was made, on which sources, under which licence."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import yaml
from transformers import TrainerState

from hf_domino.cards.render import render_card
from hf_domino.cards.sections import CARD, read_sections, read_text
from hf_domino.cards.training import training_section
from hf_domino.configuration.domino_config import DominoConfig
from hf_domino.publishing.folder_card import card_for
from hf_domino.training.fields import RECORDED
from recipes.corpus import REQUIREMENTS
from recipes.smollm2_target import HUB_NAME, PACKAGE

TARGET = Path(__file__).with_name("card_target.md")
RECIPE = Path(__file__).with_name("drafter.yaml")
LICENCE = {"license": "apache-2.0"}
# Those of `python model_cards/workshop figures`, by their titles.
PICTURES = {"speed-up": "Speed-up", "acceptance": "Acceptance by position", "round": "Time in a round"}
ABOUT_PAIR = """
## About the bundled pair

Made by `python model_cards/workshop recipe`, on text that the target wrote itself. The names above are folders side by
side, as in `model_cards/` of the project. `{target}-domino` and `{target}-dflash` share backbone, block size, loss
weights, data and steps; `model_cards/workshop/recipes/drafter.yaml` holds them. Both were measured in one run, whose
results are in the card of `{target}-domino`.
"""
ABOUT_SMOLLM2 = f"""
## About the target

Trained and measured with {HUB_NAME} (Apache-2.0) as the package `{PACKAGE}` has it, in four bits, de-quantised to bf16:
`python model_cards/workshop recipe smollm2` makes it again. With the original weights acceptance is expected to be
close, and was not measured; where the Hub can be reached, `hf-domino bench --target {HUB_NAME} --drafter FOLDER` does
it. The drafter began with the weights of the target's last layers (`start_from_target`). It had 3,520 steps on two
cores, and then on an H200, beside other work, 700 of 64 rows, 1,400 of 32, and those that are told above. The prompts
it was measured on are `model_cards/workshop/recipes/smollm2_prompts.jsonl` and, of about 1,500 tokens each, for
`results-long.jsonl`, `model_cards/workshop/recipes/smollm2_long_prompts.jsonl`. The text it was trained on, in `text`,
was written apart from them; rows of `serving`, `gpu-speed` and `sampled-speed` are of the drafter of 3,520 steps.
"""


def write_cards(target_folder: Path, work: Path) -> None:
    """Write `README.md` into the folders of the bundled target, its drafter and the drafter's twin."""
    name = target_folder.name
    penalty = json.loads((target_folder / "generation_config.json").read_text(encoding="utf-8"))["repetition_penalty"]
    about_target = TARGET.read_text(encoding="utf-8").format(name=name, sources=_sources(), penalty=str(penalty))
    (target_folder / CARD).write_text(about_target, encoding="utf-8")
    for kind in ("domino", "dflash"):
        folder = target_folder.with_name(f"{name}-{kind}")
        config = DominoConfig.from_pretrained(folder)
        card = render_card(config, name=folder.name, target=name, training=_training(work / kind), metadata=LICENCE)
        (folder / CARD).write_text(card + _pictures(folder) + ABOUT_PAIR.format(target=name), encoding="utf-8")


def write_smollm2_card(folder: Path, run: Path) -> Path:
    """Write the card of a drafter of SmolLM2 from its configuration, its training and its rows, if it was measured."""
    path = folder / CARD
    if (run / CARD).is_file():
        shutil.copy(run / CARD, path)
    # The title is not the run's.
    path.write_text(
        re.sub("^# .*$", f"# {folder.name}", read_text(path), count=1, flags=re.MULTILINE), encoding="utf-8"
    )
    card = card_for(folder, target=HUB_NAME, metadata=LICENCE)
    path.write_text(card + _pictures(folder) + ABOUT_SMOLLM2, encoding="utf-8")
    return path


def _pictures(folder: Path) -> str:
    """Show the pictures of the results, if there are some."""
    there = {title: name for name, title in PICTURES.items() if (folder / "figures" / f"{name}.svg").is_file()}
    return "".join(f"\n![{title}](figures/{name}.svg)\n" for title, name in there.items())


def _training(run: Path) -> str:
    """The section of a trainer's card on how the drafter was trained; the recipe where no card was written."""
    recorded = read_sections(read_text(run / CARD)).get("training")
    recipe = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    facts = {field: recipe[field] for field in RECORDED if field in recipe}
    return recorded or training_section(TrainerState(global_step=recipe["max_steps"]), facts)


def _sources() -> str:
    """The packages of the corpus as a Markdown table."""
    pins = [line for line in REQUIREMENTS.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    rows = [line.replace("==", " | ").replace("  # ", " | ") for line in pins]
    return "\n".join(["| package | version | licence |", "|---|---|---|", *(f"| {row} |" for row in rows)])
