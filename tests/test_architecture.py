"""The house rules that a machine can check: import direction, docstrings, what an import costs."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from quick_tier import QUICK

import hf_domino
from hf_domino import training

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hf_domino"
MODULES = sorted(PACKAGE.rglob("*.py"))
KERNELS = sorted([*(ROOT / "kernels").rglob("*.py"), *(ROOT / "model_cards/workshop/benchmarks").glob("*.py")])

PLAN = re.search(r"```text\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)[1]
FLOORS = [set(line.replace(",", " ").split()) for line in PLAN.splitlines()]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
LAZY_ONLY = {"triton", "datasets", "matplotlib", "rich"}  # `import hf_domino` must not pay for these


@functools.cache
def module_name(path: Path) -> str:
    """Dotted name of a module of the package, e.g. `decoding.loop`; empty for the package itself."""
    folder = PACKAGE if path.is_relative_to(PACKAGE) else ROOT
    parts = path.relative_to(folder).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a module, which several tests walk."""
    return ast.parse(path.read_text())


def imports_of(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield every imported dotted name, also for type checkers, with whether it is at the top of the module."""
    tree = parsed(path)
    for node in ast.walk(tree):
        top = node in tree.body
        if isinstance(node, ast.Import):
            yield from ((alias.name, top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(path, node)
            yield from ((f"{base}.{alias.name}", top) for alias in node.names)


def _absolute(path: Path, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = path.relative_to(ROOT).parts[: -node.level]
    return ".".join([*package, *filter(None, [node.module])])


@functools.cache
def internal_imports(path: Path) -> set[str]:
    """Modules of the package that a module imports anywhere in it, or names, as what is imported by name is."""
    known = {module_name(module) for module in MODULES}
    names = [name for name, _ in imports_of(path)]
    strings = (getattr(node, "value", None) for node in ast.walk(parsed(path)))
    names += [text for text in strings if isinstance(text, str) and text.removeprefix("hf_domino.") in known]
    found = set()
    for name in names:
        if name.startswith("hf_domino."):
            inner = name.removeprefix("hf_domino.")
            found.add(inner if inner in known else inner.rpartition(".")[0])
    return found & known - {module_name(path)}


def public_names(path: Path) -> Iterator[ast.ClassDef | ast.FunctionDef]:
    """Classes and functions of a module, and methods of its classes, that begin with no underscore."""
    for node in parsed(path).body:
        methods = node.body if isinstance(node, ast.ClassDef) else []
        named = [each for each in (node, *methods) if isinstance(each, (ast.ClassDef, ast.FunctionDef))]
        yield from (each for each in named if not each.name.startswith("_"))


def hooks() -> set[str]:
    """Names of methods that base classes of drafters document, from where subclasses inherit the docstring."""
    paths = [path for path in MODULES if module_name(path).split(".")[0] in ("configuration", "methods")]
    classes = [node for path in paths for node in parsed(path).body if isinstance(node, ast.ClassDef)]
    methods = [each for node in classes for each in node.body if isinstance(each, ast.FunctionDef)]
    return {each.name for each in methods if ast.get_docstring(each) is not None}


def test_public_names_are_documented():
    public = [(module_name(path), node) for path in MODULES + KERNELS for node in public_names(path)]
    bare = [(name, node) for name, node in public if ast.get_docstring(node) is None]
    inherited = hooks()
    assert [f"{name}: {each.name}" for name, each in bare if each.name not in inherited] == []


def test_every_room_stands_in_the_floor_plan():
    names = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert names - {"__init__"} == FLOOR_OF.keys(), "give each package a layer in CONTRIBUTING.md"


@pytest.mark.parametrize("room", sorted(FLOOR_OF))
def test_a_room_imports_from_the_floors_below_it(room):
    # So there is no circle between rooms either.
    open_to_it = {room, *(other for other, floor in FLOOR_OF.items() if floor < FLOOR_OF[room])}
    paths = [path for path in MODULES if module_name(path).split(".")[0] == room]
    found = {(module_name(path), name) for path in paths for name in internal_imports(path) - {""}}
    assert {pair for pair in found if pair[1].split(".")[0] not in open_to_it} == set()


def test_no_room_imports_from_the_package_above_it():
    found = {module_name(path): dict(imports_of(path)) for path in MODULES if module_name(path)}
    names = {f"hf_domino.{name}" for name in [*hf_domino.__all__, "__version__"]}
    assert [name for name, imported in found.items() if names & imported.keys()] == []


def test_no_import_cycles():
    TopologicalSorter({module_name(path): internal_imports(path) for path in MODULES}).prepare()  # raises CycleError


def test_import_is_light():
    script = "import sys, hf_domino; print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("package", [hf_domino, training], ids=lambda package: package.__name__)
def test_names_that_come_late_are_those_that_editors_see(package):
    for_editors = next(node for node in ast.parse(Path(package.__file__).read_text()).body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in for_editors.body for alias in node.names}
    assert {name: f"{package.__name__}.{module}" for name, module in package._LATER.items()} == seen
    assert all(getattr(package, name) is not None for name in package.__all__)


def test_locks_and_blocks_survive_forks_and_generators():
    """A plain lock hangs a forked process, and a plain ContextVar cannot be reset by whoever ends a generator."""
    made = {
        (module_name(path), name)
        for path in MODULES
        for name in re.findall(r"\b(Lock|RLock|Condition|ContextVar)\(", path.read_text())
        if name != "Lock" or "import Lock" not in path.read_text()
    }
    assert made == {("_common.forks", "RLock"), ("_common.blocks", "ContextVar")}


def test_optional_dependencies_are_imported_lazily():
    reached, open_ = set(), {"", *hf_domino._LATER.values()}
    while open_:  # everything `import hf_domino` and its public names reach
        name = open_.pop()
        reached.add(name)
        path = next(path for path in MODULES if module_name(path) == name)
        open_ |= internal_imports(path) - reached
        tops = {imported.split(".")[0] for imported, top in imports_of(path) if top}
        assert tops & LAZY_ONLY == set(), path


def test_what_is_imported_is_declared():
    declared = re.findall(r'"([\w-]+)(?:\[[^]]*\])?(?:[>;][^"]*)?"', (ROOT / "pyproject.toml").read_text())
    imported = {name.split(".")[0] for path in MODULES for name, _ in imports_of(path)} - sys.stdlib_module_names
    # vLLM runs our plugin, and the startup hook looks for another sitecustomize.
    others = {"hf_domino", "domino_kernels", "vllm", "sitecustomize"}
    assert {{"yaml": "pyyaml"}.get(name, name) for name in imported - others} - set(declared) == set()


def test_no_paths_of_one_machine():
    pattern = re.compile(r"(?<![\w.<>/])/(?:home|root|Users|tmp|work)/\w")
    texts = [path for suffix in ("py", "md", "toml", "yaml", "txt") for path in ROOT.glob(f"[!.]*/**/*.{suffix}")]
    texts += [path for path in ROOT.glob("*") if path.is_file() and path.name != ".git"]  # a file in a worktree
    tracked = [path for path in texts if not {"work", "outputs", "build"} & set(path.relative_to(ROOT).parts)]
    assert [str(path) for path in tracked if pattern.search(path.read_text())] == []


def test_kernels_is_no_package():
    assert not (ROOT / "kernels" / "__init__.py").exists(), "it would shadow Hugging Face's kernels package"


def test_kernels_import_nothing_of_the_package():
    imported = {name.split(".")[0] for path in (ROOT / "kernels").rglob("*.py") for name, _ in imports_of(path)}
    assert "hf_domino" not in imported


def test_documents_name_the_oldest_transformers():
    oldest = re.search(r'"transformers>=([\d.]+),<6"', (ROOT / "pyproject.toml").read_text())[1]
    assert f"transformers from {oldest} up to 6" in (ROOT / "README.md").read_text()
    assert f'"transformers=={oldest}"' in (ROOT / "CONTRIBUTING.md").read_text()


def test_the_quick_tier_has_a_file_for_each_package():
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} | {
        path.stem for path in PACKAGE.glob("[!_]*.py")
    }
    assert rooms - QUICK.keys() == set()
    assert [name for name in QUICK.values() if not (ROOT / "tests" / name).is_file()] == []
