"""The notebooks run from top to bottom on the bundled pair, and are kept as they should be read.

They share a kernel, which imports the libraries once; each begins without the names of the one before.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hf_domino.pair import BUNDLED

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_BYTES, MAX_CELLS = 300_000, 24
TIMEOUT_SECONDS = 600  # a notebook; on a busy machine
PATH_OF_ONE_MACHINE = re.compile(r"(?<![\w.<>/])/(?:home|root|Users|tmp|work|content|private)/\w")
# Fewer steps and prompts than a reader sees: every cell runs all the same.
QUICK = {
    "max_steps=64": "max_steps=4",
    "max_steps=12": "max_steps=3",
    "pieces[:64]": "pieces[:8]",
    "max_new_tokens=256": "max_new_tokens=16",
    "max_new_tokens=128": "max_new_tokens=16",
    "max_new_tokens=64": "max_new_tokens=16",
    "max_new_tokens=48": "max_new_tokens=16",
    "max_new_tokens=40": "max_new_tokens=12",
    "max_new_tokens=24": "max_new_tokens=8",
    '"max_new_tokens": 64': '"max_new_tokens": 16',
    '"max_new_tokens": 48': '"max_new_tokens": 16',
    "num_tokens=64": "num_tokens=16",
    "prompts=kept_aside": "prompts=kept_aside[:1]",
    "[4:9]": "[4:6]",
    "prompts[6:8]": "prompts[6:7]",
    "prompts[5:8]": "prompts[6:7]",
}
QUIET = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # tests run side by side

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path: Path, kind: str) -> list[str]:
    """Sources of a notebook's cells of a kind."""
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def outputs(path: Path) -> list[dict]:
    """Everything that a notebook's cells show."""
    return [output for cell in json.loads(path.read_text())["cells"] for output in cell.get("outputs", [])]


def repository() -> str:
    """The project's public address, from pyproject.toml; empty while there is none."""
    found = re.search(r'^Repository = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    return found[1] if found else ""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """A kernel at the root of the checkout."""
    manager = pytest.importorskip("jupyter_client").KernelManager()
    places = dict.fromkeys(("IPYTHONDIR", "TMPDIR"), str(tmp_path_factory.mktemp("kernel")))
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    manager.start_kernel(cwd=str(ROOT), env=os.environ | QUIET | places | {"PYTHONPATH": paths})
    yield manager
    manager.shutdown_kernel(now=True)


@pytest.mark.skipif(not (ROOT / "model_cards" / BUNDLED).exists(), reason="the bundled pair is not in this checkout")
@each_notebook
def test_it_runs(path, kernel):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    if "trl" in path.stem:
        pytest.importorskip("trl")  # or the notebook would install it
    notebook = nbformat.read(path, as_version=4)
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    for cell in notebook.cells:
        for slow, quick in QUICK.items():
            cell.source = cell.source.replace(slow, quick)
    notebook.cells.insert(0, nbformat.v4.new_code_cell("%reset -f"))
    nbclient.NotebookClient(notebook, kernel, timeout=TIMEOUT_SECONDS).execute()  # raises what a cell raises
    again = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert count_pictures(again) == count_pictures(shown) > 0


def count_pictures(shown: list[dict]) -> int:
    """How many of these outputs are pictures."""
    return sum("image/png" in output.get("data", {}) for output in shown)


def test_what_is_made_quick_is_there():
    text = "".join(source for path in NOTEBOOKS for source in cells(path, "code"))
    assert [slow for slow in QUICK if slow not in text] == []


@each_notebook
def test_it_is_kept_run_and_small(path):
    shown = outputs(path)
    assert path.stat().st_size <= MAX_BYTES
    assert len(json.loads(path.read_text())["cells"]) <= MAX_CELLS
    assert {output["output_type"] for output in shown} <= {"stream", "display_data", "execute_result"}  # no errors
    assert not any(output.get("name") == "stderr" for output in shown), "clear warnings and progress bars"
    assert PATH_OF_ONE_MACHINE.search(path.read_text()) is None


@each_notebook
def test_its_links_lead_somewhere(path):
    for link in re.findall(r"\]\(([^)#:]+)\)", "\n".join(cells(path, "markdown"))):
        assert (path.parent / link).exists(), link


def test_all_install_alike():
    install = {cells(path, "code")[0] for path in NOTEBOOKS}
    assert len(install) == 1
    assert f'REPOSITORY = "{repository()}"' in install.pop(), "the address of [project.urls] in pyproject.toml"


def test_the_install_cell_does_nothing_where_the_package_is(tmp_path):
    code = cells(NOTEBOOKS[0], "code")[0]
    plain = re.sub(r"^(\s*)[!%].*$", r'\1raise AssertionError("installs")', code, flags=re.MULTILINE)
    assert "installs" in plain
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", plain], cwd=tmp_path, env=environment, check=True)
    without = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
    bare = [sys.executable, "-S", "-c", plain]
    (tmp_path / "beside" / "hf_domino").mkdir(parents=True)  # a clone that was not installed is no package
    for folder in (tmp_path, tmp_path / "beside"):
        done = subprocess.run(bare, cwd=folder, env=without, capture_output=True, text=True)
        assert ("pip install -e" if not repository() else "installs") in done.stderr
    with zipfile.ZipFile(tmp_path / "my-domino.zip", "w") as archive:
        archive.writestr("hf_domino-main/pyproject.toml", "")
        archive.writestr("hf_domino-main/tests/pyproject.toml", "")
    uploaded = re.sub(r"^(\s*)[!%].*$", r"\1print(checkout)", code, flags=re.MULTILINE)
    done = subprocess.run([*bare[:3], uploaded], cwd=tmp_path, env=without, capture_output=True, text=True)
    assert done.stdout.strip() == "hf_domino_checkout/hf_domino-main"
    # After a restart of the kernel, the package is there, and the working directory is again the first one.
    restarted = [sys.executable, "-c", f"{plain}\nprint(Path.cwd())"]
    done = subprocess.run(restarted, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == str(tmp_path / "hf_domino_checkout/hf_domino-main")


def test_the_install_cell_adds_matplotlib_to_the_package_alone(tmp_path):
    code = re.sub(r"^(\s*)[!%](.*)$", r"\1print(r'\2')", cells(NOTEBOOKS[0], "code")[0], flags=re.MULTILINE)
    (tmp_path / "hf_domino").mkdir()
    (tmp_path / "hf_domino/__init__.py").touch()
    bare = [sys.executable, "-S", "-c", code]  # without the packages of this environment
    done = subprocess.run(bare, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.stdout.strip() == 'pip install --quiet "matplotlib>=3.8"'
