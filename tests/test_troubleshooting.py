"""The page on troubleshooting quotes errors as they are: each is provoked here, and must stand on the page."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import pytest
import torch
from builders import TINY, build_drafter
from transformers import Qwen3Config, Qwen3ForCausalLM

from hf_domino import DominoDraftModel

pytestmark = pytest.mark.transformers

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
QUOTED = [line for line in PAGE.read_text().splitlines() if line.startswith("`") and " must be " in line]
PROMPT = torch.tensor([[5, 6, 7]])


def without_head(target, folder):
    build_drafter(target).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    of_dflash = {name: value for name, value in config.items() if name not in ("emb_dim", "gru_hidden_dim")}
    (folder / "config.json").write_text(json.dumps(of_dflash | {"projector_type": "dflash"}))
    DominoDraftModel.from_pretrained(folder)


def lilicorr(target, folder):
    (folder / "config.json").write_text('{"architectures": ["LiLiCorrDraftModel"], "model_type": "qwen3"}')
    DominoDraftModel.from_pretrained(folder)


def other_target(target, folder):
    Qwen3ForCausalLM(Qwen3Config(**TINY | {"hidden_size": 64})).generate(PROMPT, assistant_model=build_drafter(target))


def call(**arguments):
    def generate(target, folder):
        target.generate(PROMPT, assistant_model=build_drafter(target), **arguments)

    return generate


PROVOKED = {
    "folder or a Hub name": lambda *_: DominoDraftModel.from_pretrained("model_cards/pycoder-13m-domno"),
    "projector_type": without_head,
    "method must be": lilicorr,
    "hidden_size": other_target,
    "num_beams": call(num_beams=2),
    "cache_implementation": call(cache_implementation="quantized"),
    "must be the target": lambda target, _: build_drafter(target).generate(PROMPT),
}


@pytest.mark.parametrize("quoted", QUOTED, ids=lambda quoted: quoted[:40])
def test_errors_are_quoted_as_they_are(quoted, tiny_qwen3, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pieces = map(re.escape, quoted.strip("`").split("…"))
    (provoke,) = (provoke for name, provoke in PROVOKED.items() if name in quoted)
    with pytest.raises(ValueError, match=".*".join(pieces)):
        provoke(tiny_qwen3, tmp_path)


def test_a_plain_forward_leaves_a_target_that_cannot_be_pickled(tmp_path):
    target = Qwen3ForCausalLM(Qwen3Config(**TINY))
    pickle.dumps(target)
    target(PROMPT, output_hidden_states=True)
    quoted = re.search(r"^`… (local object .*)`$", PAGE.read_text(), re.MULTILINE).group(1)
    with pytest.raises((AttributeError, pickle.PicklingError), match=re.escape(quoted)):
        pickle.dumps(target)
    target.save_pretrained(tmp_path)
    pickle.dumps(Qwen3ForCausalLM.from_pretrained(tmp_path))
