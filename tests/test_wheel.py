"""What pip installs. The wheel, beside nothing of the checkout: it generates, saves and loads, and says what it lacks.

And a checkout that is installed to be edited.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
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
assert main(["export", "--drafter", "drafter", "--output", "exported"]) == 0
assert main(["generate", "--compare"]) == main(["chat"]) == 2
"""


PIP = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
NO_DOWNLOADS = ["--no-deps", "--no-build-isolation"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder that the wheel was installed into, which is built from the source distribution."""
    built, site = tmp_path_factory.mktemp("built"), tmp_path_factory.mktemp("site")
    build = "import sys; from hatchling.build import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(built)], cwd=ROOT, check=True)
    (source,) = built.iterdir()
    subprocess.run([*PIP, "wheel", *NO_DOWNLOADS, "-w", built, source], check=True)
    (wheel,) = built.glob("*.whl")
    subprocess.run([*PIP, "install", "--no-deps", "--target", site, wheel], check=True)
    return site


def test_an_editable_clone_named_like_the_package_is_imported_from_the_folder_beside_it(tmp_path):
    """Python could take the clone, which has no `__init__.py`, for a namespace package."""
    (tmp_path / "hf_domino").symlink_to(ROOT)
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv").rglob("site-packages")
    dependencies = [path for path in sys.path if Path(path).name == site.name]
    (site / "z.pth").write_text("\n".join(dependencies))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    install = [*PIP, "--python", python, "install", *NO_DOWNLOADS, "--ignore-installed", "-e", "hf_domino"]
    subprocess.run(install, cwd=tmp_path, env=environment, check=True)
    code = "import hf_domino, domino_kernels as kernels; print(hf_domino.__file__, hf_domino.attach, kernels.gru_step)"
    done = subprocess.run([python, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.startswith(f"{ROOT / 'hf_domino' / '__init__.py'} <function attach"), done.stderr


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
