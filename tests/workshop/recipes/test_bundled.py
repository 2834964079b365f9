"""The recipe of the bundled pair skips what is there, unless it is of another target."""

from __future__ import annotations

import argparse
import json
import shutil

import pytest
from transformers import AutoModelForCausalLM

from hf_domino import DominoDraftModel
from hf_domino.pair import BUNDLED
from hf_domino.target.identity import identify
from recipes.bundled import make_pair
from study.texts import settings_file


def test_text_and_drafters_of_another_target_are_refused(tiny_pair_folder, tmp_path):
    work, output = tmp_path / "work", tmp_path / "cards"
    shutil.copytree(tiny_pair_folder, output / BUNDLED)
    target = AutoModelForCausalLM.from_pretrained(output / BUNDLED)
    work.mkdir()  # without the stages of a target: one is in the output folder
    for name in ("held_out.npy", "cards.done"):
        (work / name).touch()
    (work / "on_policy.jsonl").touch()
    settings_file(work / "on_policy.jsonl").write_text(json.dumps({"target": identify(target).to_dict()}))
    drafter = DominoDraftModel.from_pretrained(f"{tiny_pair_folder}-domino")
    for kind in ("domino", "dflash"):
        drafter.save_pretrained(work / kind)  # names no target: nothing is said
    options = argparse.Namespace(work=work, output=output, packages=None, processes=1)
    assert make_pair(options, "hf_domino.cli") == 0

    target.model.layers[0].mlp.up_proj.weight.data.normal_()
    identify(target).record_in(drafter.config)
    drafter.save_pretrained(work / "dflash")
    with pytest.raises(ValueError, match=r"weights_digest must be .*Delete .*dflash and call the command again"):
        make_pair(options, "hf_domino.cli")
    settings_file(work / "on_policy.jsonl").write_text(json.dumps({"target": identify(target).to_dict()}))
    with pytest.raises(ValueError, match=r"weights_digest must be .*Delete .*on_policy.jsonl and call"):
        make_pair(options, "hf_domino.cli")
