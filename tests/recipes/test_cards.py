"""Cards of the bundled pair: each drafter's tells how it was trained where that was recorded."""

from __future__ import annotations

import json

from hf_domino.recipes.cards import write_cards


def test_a_drafters_card_has_the_training_of_its_run(tmp_path):
    folders = {name: tmp_path / name for name in ("tiny", "tiny-domino", "tiny-dflash", "work/domino")}
    for folder in folders.values():
        folder.mkdir(parents=True)
    (folders["tiny"] / "generation_config.json").write_text(json.dumps({"repetition_penalty": 1.04}))
    (folders["work/domino"] / "README.md").write_text("# run\n\nUsage.\n\n## Training\n\n| steps | 1,600 |\n")
    write_cards(folders["tiny"], tmp_path / "work")
    domino, dflash = ((folders[f"tiny-{kind}"] / "README.md").read_text() for kind in ("domino", "dflash"))
    assert domino.endswith("results.jsonl`.\n\n## Training\n\n| steps | 1,600 |\n")
    assert dflash.endswith("results.jsonl`.\n")
    assert "Usage." not in domino
