"""The entry of a drafter's repository: `generate` with its drafter, called as Transformers calls it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from hf_domino import DominoDraftModel
from hf_domino.integration.custom_generate import generate

pytestmark = pytest.mark.transformers

ROOT = Path(__file__).parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"

PROMPT = torch.tensor([[5, 9, 33, 20, 7, 41]])


@pytest.mark.parametrize("field", ["eos_token_id", "stop_strings", "prompt_lookup_num_tokens"])
def test_none_overrides_a_default(target, saved_pair, tiny_tokenizer, field):
    options = {"max_new_tokens": 16, "do_sample": False, "tokenizer": tiny_tokenizer}
    plain = target.generate(PROMPT, **options)
    defaults = {
        "eos_token_id": int(plain[0, 9]),
        "stop_strings": tiny_tokenizer.decode(plain[0, 9:10]),
        "prompt_lookup_num_tokens": 0,  # refused, were it not overridden
    }
    setattr(target.generation_config, field, defaults[field])
    assert torch.equal(generate(target, PROMPT, drafter=str(saved_pair[1]), **options, **{field: None}), plain)


def test_copies_from_the_text(target, saved_pair):
    prompt, options = PROMPT.repeat(1, 4), {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True}
    output = generate(target, prompt, drafter=str(saved_pair[1]), prompt_lookup_num_tokens=4, **options)
    assert torch.equal(output.sequences, target.generate(prompt, **options).sequences)
    assert output.stats.num_lookups


def test_where_no_drafter_is_named(target, saved_pair):
    with pytest.raises(ValueError, match="the name of a drafter must be that of a drafter"):
        generate(target, PROMPT, drafter=str(saved_pair[0]))
    with pytest.raises(ValueError, match="drafter must be the repository of the drafter"):
        generate(target, PROMPT)


@pytest.fixture
def carrying(saved_pair, tmp_path):
    """A drafter's folder with the file, and the same as a download of user/drafter."""
    folder = tmp_path / "drafter"
    DominoDraftModel.from_pretrained(saved_pair[1]).save_pretrained(folder, custom_generate=True)
    repository = tmp_path / "hub" / "models--user--drafter"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / COMMIT).symlink_to(folder)
    return folder


USE = """
import sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
try:
    AutoConfig.from_pretrained(sys.argv[2])
except ValueError as error:
    print(error, flush=True)
target = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
prompt = torch.tensor([[5, 9, 33, 20, 7, 41]])
sys.modules["hf_domino"] = None  # as if it was not installed
try:
    target.generate(prompt, custom_generate=sys.argv[2], trust_remote_code=True)
except ImportError as error:
    print(error, flush=True)
del sys.modules["hf_domino"]
for name in sys.argv[2:]:
    for choice in ({"do_sample": False}, {"do_sample": True, "temperature": 0.8}):
        options = {**choice, "max_new_tokens": 12, "return_dict_in_generate": True}
        torch.manual_seed(7)
        plain = target.generate(prompt, **options)
        torch.manual_seed(7)
        assisted = target.generate(prompt, **options, custom_generate=name, trust_remote_code=True)
        assert torch.equal(plain.sequences, assisted.sequences)
        assert assisted.stats.num_new_tokens > 0
    generate = target.load_custom_generate(name, trust_remote_code=True)
    assert len(generate(target, prompt, max_new_tokens=4, drafter=name)) == 1
    try:
        target.generate(prompt, max_new_tokens=4, custom_generate=name)
    except ValueError as error:
        assert "trust_remote_code" in str(error), error
    else:
        raise AssertionError("code of a folder ran without being trusted")
"""


def started(code, tmp_path, *arguments):
    path = [str(place) for place in (Path(transformers.__file__).parents[1], ROOT, ROOT / "kernels" / "torch-ext")]
    places = {"HF_HUB_CACHE": tmp_path / "hub", "HF_MODULES_CACHE": tmp_path / "modules", "HF_HUB_OFFLINE": "1"}
    environment = os.environ | {key: str(value) for key, value in places.items()} | {"PYTHONPATH": ":".join(path)}
    words = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True)


def test_by_transformers_name_for_it(saved_pair, carrying, tmp_path):
    """By its folder and its Hub name, in a process that never imports this package itself."""
    done = started(USE, tmp_path, saved_pair[0], carrying, "user/drafter")
    assert done.returncode == 0, done.stderr
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    shortened = re.search(r"^``(The checkpoint .*?) …``$", page, re.MULTILINE).group(1)
    assert shortened in done.stdout  # what Transformers alone says of a drafter
    assert "needs the package hf_domino. Install it with: pip install hf-domino\n" in done.stdout


def test_only_where_it_is_asked_for(tiny_drafter, tmp_path):
    tiny_drafter.save_pretrained(tmp_path)
    assert not (tmp_path / "custom_generate").exists()
    with pytest.raises(ValueError, match=r"push_to_hub of save_pretrained with custom_generate=True must be False"):
        tiny_drafter.save_pretrained(tmp_path, custom_generate=True, push_to_hub=True)
