"""The cards of SmolLM2's drafter and its twin: how they were trained, what was measured, and on which weights."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from hf_domino.cards.sections import CARD, read_text
from hf_domino.cards.training import FIGURE
from hf_domino.pair.smollm2 import HUB_NAME, PACKAGE
from hf_domino.publishing.folder_card import card_for

TITLE = re.compile(r"^# .*$", re.MULTILINE)
LICENCE = {"license": "apache-2.0"}
ABOUT = f"""
## About the target

Trained and measured with {HUB_NAME} (Apache-2.0) as the package `{PACKAGE}` has it, in four bits, de-quantised to bf16:
`python model_cards/workshop recipe smollm2` makes it again. With the original weights acceptance is expected to be
close, and was not measured; where the Hub can be reached, `hf-domino bench --target {HUB_NAME} --drafter FOLDER` does
it. The drafter began with the weights of the target's last layers (`start_from_target`). The prompts it was measured
on are `hf_domino/pair/smollm2_prompts.jsonl` and, of about 1,500 tokens each, for `results-long.jsonl`,
`model_cards/workshop/recipes/smollm2_long_prompts.jsonl`. The text it was trained on, in `text`, was written apart
from them.
"""


def write_card(folder: Path, run: Path) -> Path:
    """Write a drafter's card from its configuration, its training and its rows, if it was measured."""
    path = folder / CARD
    for name in (CARD, FIGURE):
        if (run / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(run / name, folder / name)
    path.write_text(TITLE.sub(f"# {folder.name}", read_text(path), count=1), encoding="utf-8")  # not the run's
    card = card_for(folder, target=HUB_NAME, metadata=LICENCE)
    path.write_text(card + ABOUT, encoding="utf-8")
    return path
