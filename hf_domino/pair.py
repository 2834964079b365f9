"""Find and load a target with its drafters: the bundled pair of a checkout, or any other laid out the same way.

A pair called NAME is three folders side by side: `NAME` (target and tokenizer), `NAME-domino` and `NAME-dflash`. Of a
target that is not ours to publish, the drafters are among the checkout's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_domino._common.refusal import refusal
from hf_domino.data.prompts import prompt_of
from hf_domino.data.records import read_records
from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.formats.source import check_is_target, check_source
from hf_domino.target.compatibility import check_target
from hf_domino.target.loading import AutoTarget

BUNDLED = "pycoder-13m"
CARDS = "model_cards"  # folder of a checkout
PROMPTS = "prompts.jsonl"  # held-out prompts in a target's folder


def check_device(device: str) -> None:
    """Refuse a device that this torch cannot use."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ValueError(
            f"--device must be one that torch {torch.__version__} can use, got {device!r} ({reason}): leave it out or "
            "use cpu."
        ) from error


@dataclass(frozen=True)
class Pair:
    """A target, its tokenizer, its drafter and, where given, its DFlash twin, a small assistant and other drafters."""

    name: str
    folder: Path
    target: Any
    tokenizer: Any
    drafter: DominoDraftModel
    twin: DominoDraftModel | None
    assistant: Any = None
    compared: Mapping[str, DominoDraftModel] = field(default_factory=dict)  # where several were given, by name and kind


def find_pair(path: str | Path | None = None) -> Path:
    """Return the target folder of a pair."""
    candidates = [cards / BUNDLED for cards in _cards()] if _is_bundled(path) else [Path(str(path))]
    for candidate in candidates:
        if (candidate / "config.json").is_file() and _drafter_of(candidate, domino_folder) is not None:
            return candidate
    raise _no_pair(candidates)


def find_target(name: str | Path | None = None, field: str = "--target", revision: str | None = None) -> str:
    """Return the folder or the Hub name of a target, once it is known that there is one."""
    found = str(find_pair(name).resolve()) if _is_bundled(name) else str(name)
    check_source(found, field, revision=revision)
    check_is_target(found, field, **_download(found, revision))
    return found


def find_drafter(
    name: str | Path,
    field: str = "--drafter",
    revision: str | None = None,
    folder_of: Callable[[Path], Path] | None = None,
) -> str:
    """Return the folder or the Hub name of a drafter, once it is known that there is one."""
    if _is_bundled(name):
        folders = [(folder_of or domino_folder)(cards / BUNDLED) for cards in _cards()]
        found = _first_there(folders)
        if found is None:
            raise _no_pair(folders)
        return str(found)
    check_source(name, field, revision=revision)
    return str(name)


def _is_bundled(name: str | Path | None) -> bool:
    """Whether the bundled pair is meant, and not a folder or the Hub."""
    return name is None or (str(name) == BUNDLED and not Path(name).is_dir())


def _no_pair(candidates: list[Path]) -> FileNotFoundError:
    return FileNotFoundError(
        f"no pair at {' or '.join(map(str, candidates))}: a pair is a target folder NAME with NAME-domino beside it. "
        "Give a --target with its --drafter, or run from a checkout of the repository: the installed package has no "
        f"{CARDS}/."
    )


def _cards() -> list[Path]:
    """Where drafters are published: in the checkout, then in the working folder."""
    return [root / CARDS for root in dict.fromkeys((Path(__file__).parents[1], Path.cwd()))]


def domino_folder(target_folder: Path) -> Path:
    """Folder of the Domino drafter beside a target's folder."""
    return _beside(target_folder, "-domino")


def dflash_folder(target_folder: Path) -> Path:
    """Folder of the DFlash twin beside a target's folder."""
    return _beside(target_folder, "-dflash")


def _beside(folder: Path, ending: str) -> Path:
    found = folder.resolve() if folder.is_dir() else folder  # `.` has a name, too
    return found.parent / f"{found.name}{ending}"


def load_pair(
    target: str | Path | None = None,
    drafter: str | Path | None = None,
    twin: str | Path | None = None,
    assistant: str | Path | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    target_revision: str | None = None,
    drafter_revision: str | None = None,
    others: Sequence[str | Path] = (),
    is_drafted: bool = True,
) -> Pair:
    """Load a target and what drafts for it; folders are read without any network access."""
    folder = Path(find_target(target, revision=target_revision))
    twin = twin or (_drafter_of(folder, dflash_folder) if drafter is None else None)  # not of somebody else's drafter
    drafter = drafter or _drafter_of(folder, domino_folder)
    if drafter is None and is_drafted:
        raise ValueError(f"--drafter must be given: there is no {domino_folder(folder)} beside the target {folder}.")
    drafters = [find_drafter(drafter, revision=drafter_revision), *map(find_drafter, others)] if drafter else []
    twin = twin and find_drafter(twin, "--twin", folder_of=dflash_folder)
    names = [Path(drafter).resolve().name for drafter in drafters]
    if taken := next((name for name in names if names.count(name) > 1), None):
        raise refusal("each --drafter", "of another name", taken, "Rename one of the folders.")
    if assistant is not None:
        check_source(assistant, "--assistant")
    tokenizer = AutoTokenizer.from_pretrained(str(folder), **_download(folder, target_revision))
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token

    def load(model_class: Any, name: str | Path | None, revision: str | None = None) -> Any:
        if name is None:
            return None
        model = model_class.from_pretrained(str(name), dtype=dtype, **_download(name, revision))
        return model.to(torch.device(device)).eval()

    model = load(AutoTarget, folder, target_revision)
    loaded = [load(DominoDraftModel, one, None if index else drafter_revision) for index, one in enumerate(drafters)]
    first: Any = next(iter(loaded), None)
    twin_model = load(DominoDraftModel, twin)
    for one in filter(None, [*loaded, twin_model]):
        check_target(one.config, model)
    compared = {f"{name} ({one.config.kind.title})": one for name, one in zip(names, loaded, strict=True)}
    return Pair(
        name=folder.resolve().name,
        folder=folder,
        target=model,
        tokenizer=tokenizer,
        drafter=first,
        twin=twin_model,
        assistant=load(AutoModelForCausalLM, assistant),
        # A Domino drafter alone is compared by names of its own.
        compared={} if [one.config.projector_type for one in loaded] == ["domino"] else compared,
    )


def _download(name: str | Path, revision: str | None) -> dict[str, Any]:
    """Arguments of `from_pretrained` for a folder, which has no revisions, or for a name on the Hub."""
    return {"local_files_only": True} if Path(name).is_dir() else {"revision": revision or "main"}


def _drafter_of(target: Path, folder_of: Callable[[Path], Path]) -> Path | None:
    """The drafter of a kind beside a target, or of its name among those that are published here."""
    return _first_there([folder_of(target), *(folder_of(cards / target.name) for cards in _cards())])


def _first_there(folders: Iterable[Path]) -> Path | None:
    return next((folder for folder in folders if (folder / "config.json").is_file()), None)


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """Read held-out prompts, as records with `text` to continue or `messages` to answer."""
    if not path.is_file():
        raise ValueError(f"--prompts must be a file of records, got {str(path)!r}: there is none of that name.")
    prompts = []
    for place, record in read_records(path):
        prompt = prompt_of(record, place, plain=True)
        said: dict[str, Any] = {"text": prompt.text}
        if messages := list(prompt.messages):
            # An answer that ends a chat, as in the `evaluation.jsonl` of `hf-domino data`, is left out.
            said = {"messages": messages[:-1] if messages[-1]["role"] == "assistant" else messages}
        prompts.append(record | prompt.tools | said)
    return prompts
