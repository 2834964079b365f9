"""Cards of the bundled pair: each drafter's tells how it was trained where that was recorded, else the recipe."""

from __future__ import annotations

import json

import yaml

from hf_domino import DominoConfig
from hf_domino.cards import read_sections
from hf_domino.cards.sections import mark
from hf_domino.cards.training import FIGURE
from recipes.cards import RECIPE, write_cards


def test_a_drafters_card_has_the_training_of_its_run(tmp_path):
    folders = {name: tmp_path / name for name in ("tiny", "tiny-domino", "tiny-dflash", "work/domino")}
    for folder in folders.values():
        folder.mkdir(parents=True)
    for kind in ("domino", "dflash"):
        DominoConfig(projector_type=kind).save_pretrained(folders[f"tiny-{kind}"])
    (folders["tiny"] / "generation_config.json").write_text(json.dumps({"repetition_penalty": 1.04}))
    recorded = "## Training\n\n| steps | 7 |"
    (folders["work/domino"] / "README.md").write_text(f"# run\n\nUsage.\n\n{mark('training', recorded)}\n")
    (folders["work/domino"] / FIGURE).parent.mkdir()
    (folders["work/domino"] / FIGURE).write_text("<svg/>")
    write_cards(folders["tiny"], tmp_path / "work")
    domino, dflash = ((folders[f"tiny-{kind}"] / "README.md").read_text() for kind in ("domino", "dflash"))
    assert read_sections(domino)["training"] == recorded
    steps = yaml.safe_load(RECIPE.read_text())["max_steps"]
    assert f"| steps | {steps:,} |" in read_sections(dflash)["training"]
    assert (tmp_path / "tiny-domino" / FIGURE).read_text() == "<svg/>"
    assert "Usage." not in domino
    assert "penalty of 1.04" in (folders["tiny"] / "README.md").read_text()
