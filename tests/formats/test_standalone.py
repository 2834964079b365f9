"""`save_pretrained(..., standalone=True)`: files that run where the package is not installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from transformers.dynamic_module_utils import get_relative_imports

import domino_kernels
import hf_domino
from hf_domino import DominoDraftModel
from hf_domino.formats.standalone import LICENCE, REQUIREMENTS, rewrite

pytestmark = pytest.mark.transformers

ROOT = Path(__file__).parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def standalone(saved_pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("standalone") / "drafter"
    DominoDraftModel.from_pretrained(saved_pair[1]).save_pretrained(folder, standalone=True)
    return folder


@pytest.fixture
def hub_cache(saved_pair, standalone, tmp_path):
    """A cache of downloads: user/another is the folder, user/a-drafter.v2 has a draft vocabulary and another commit."""
    restricted = tmp_path / "restricted"
    DominoDraftModel.from_pretrained(saved_pair[1]).restricted(range(40, 64)).save_pretrained(
        restricted, standalone=True
    )
    for name, commit, folder in (("a-drafter.v2", COMMIT, restricted), ("another", COMMIT[::-1], standalone)):
        repository = tmp_path / "hub" / f"models--user--{name}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(commit)
        (repository / "snapshots").mkdir()
        (repository / "snapshots" / commit).symlink_to(folder)
    return tmp_path / "hub"


@pytest.mark.slow
def test_without_the_package(saved_pair, standalone, hub_cache, tmp_path):
    """From a folder, as from the Hub: greedy, sampled, in batches, with stop strings, streamed."""
    script = Path(__file__).with_name("without_package.py")
    places = {"HF_HUB_CACHE": hub_cache, "HF_MODULES_CACHE": tmp_path / "modules", "HF_HUB_OFFLINE": "1"}
    path = Path(transformers.__file__).parents[1]  # under test; a venv's own may be another
    environment = os.environ | {key: str(value) for key, value in places.items()} | {"PYTHONPATH": str(path)}
    done = subprocess.run(
        [sys.executable, script, saved_pair[0], standalone, "user/a-drafter.v2"],
        env=environment, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "all equal"
    assert list((tmp_path / "modules").rglob(f"{COMMIT}/custom_generate/decoding_loop.py"))


def test_files(standalone):
    files = {path.stem: path.read_text() for path in (standalone / "custom_generate").glob("*.py")}
    assert "decoding_loop" in files
    kernels = {f"domino_kernels_{path.stem}" for path in Path(domino_kernels.__file__).parent.glob("triton_*.py")}
    assert kernels
    assert kernels <= set(files)
    for name, text in files.items():
        first = text.splitlines()[0]
        assert re.match(rf"# \S+, hf_domino {hf_domino.__version__}, SPDX-License-Identifier: {LICENCE}", first), name
        assert not re.search(r"^\s*(from|import) (hf_domino|domino_kernels)", text, flags=re.MULTILINE), name
        compile(text, name, "exec")
        found = get_relative_imports(standalone / "custom_generate" / f"{name}.py")
        assert set(found) <= set(files), name


def test_an_older_bundle_is_replaced(standalone, tmp_path, tiny_drafter):
    old = tmp_path / "custom_generate" / "gone.py"
    old.parent.mkdir()
    old.write_text("")
    tiny_drafter.save_pretrained(tmp_path, standalone=True)
    assert not old.exists()
    assert len(list(old.parent.iterdir())) == len(list((standalone / "custom_generate").iterdir()))


def test_constants_are_those_of_the_package():
    project = (ROOT / "pyproject.toml").read_text()
    assert f'license = "{LICENCE}"' in project
    assert all(f'"{requirement}"' in project for requirement in REQUIREMENTS)


def test_saved_without(tiny_drafter, tmp_path):
    tiny_drafter.save_pretrained(tmp_path)
    assert not (tmp_path / "custom_generate").exists()
    with pytest.raises(ValueError, match=r"push_to_hub of save_pretrained with standalone=True must be False"):
        tiny_drafter.save_pretrained(tmp_path, standalone=True, push_to_hub=True)


FLAT = {"p.a": "a", "p.b.c": "b_c", "p.b": "b", "k": "k"}


@pytest.mark.parametrize(
    ("line", "rewritten"),
    [
        ("from p.b.c import x, y as z", "from .b_c import x, y as z"),
        ("from p.b import c, d", "from .b_c import __name__ as _\nfrom . import b_c as c\nfrom .b import d"),
        ("import p.b.c as z", "from .b_c import __name__ as _\nfrom . import b_c as z"),
        ("import k", "from .k import __name__ as _\nfrom . import k"),
        ("from .b.c import x", "from .b_c import x"),
        ("import torch.nn as nn", "import torch.nn as nn"),
        ("def f():\n    from p.a import (\n        x,\n    )\n    x()", "def f():\n    from .a import x\n    x()"),
        ("import triton", "try:  # optional: Transformers does not ask for it\n    import triton\nfinally:\n    pass"),
        ("if TYPE_CHECKING:\n    from p.a import X\nx = 1", "x = 1"),
    ],
)  # fmt: skip
def test_rewriting(line, rewritten):
    assert rewrite(f"{line}\n", "p.main", False, FLAT.get)[0] == f"{rewritten}\n"
