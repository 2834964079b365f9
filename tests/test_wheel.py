"""The wheel, installed beside nothing of the checkout: it generates, saves and loads, and says what it has not got."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SMOKE = """
import sys, torch
from transformers import AutoModel, Qwen3Config, Qwen3ForCausalLM
import domino_kernels, hf_domino
from hf_domino import DominoConfig, DominoDraftModel
from hf_domino.cli.main import main

assert all(module.__file__.startswith(sys.argv[1]) for module in (hf_domino, domino_kernels))
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "head_dim": 16}
heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "eos_token_id": None}
target = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).eval()
drafter = DominoDraftModel(DominoConfig.for_target(target.config, block_size=4))
prompt = torch.tensor([[1, 2, 3]])
drafted = target.generate(prompt, assistant_model=drafter, max_new_tokens=8)
assert torch.equal(drafted, target.generate(prompt, max_new_tokens=8))
drafter.save_pretrained("drafter")
assert isinstance(AutoModel.from_pretrained("drafter"), DominoDraftModel)
assert main(["env"]) == 0
assert main(["generate", "--compare"]) == main(["chat"]) == 2
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder that the wheel was installed into."""
    built, site = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    copy = tmp_path_factory.mktemp("source")
    for name in ("hf_domino", "kernels", "pyproject.toml", "README.md", "LICENSE"):  # pip would leave build/ behind
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", built, copy], check=True)
    (wheel,) = built.iterdir()
    subprocess.run([*pip, "install", "--no-deps", "--target", site, wheel], check=True)
    return site


def test_the_wheel_works_without_a_checkout(installed, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SMOKE, str(installed)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "hf-domino chat: no pair at" in done.stderr
    assert "hf-domino generate: no pair at" in done.stderr


def test_the_wheel_holds_what_the_package_reads(installed):
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "hf_domino").rglob("*") if path.is_file()}
    data = {name for name in files if "__pycache__" not in name}
    assert {name for name in data if not (installed / name).is_file()} == set()
