"""What of a drafter's folder is published: its weights, configuration, card and results, and nothing else.

A folder that was trained in also holds checkpoints, the optimizer's state, texts and logs. So files are named that go,
not those that stay.
"""

from __future__ import annotations

import fnmatch
import json
import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import ModelCard, get_token
from transformers.utils import logging

from hf_domino._common.refusal import refusal
from hf_domino.cards.sections import CARD
from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.formats.source import ADAPTER_CONFIG, CONFIG
from hf_domino.publishing import folder_card as card

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# Beside configuration, weights and card; a pattern with a folder is for files in it.
PUBLISHED = (
    *("generation_config.json", "results*.jsonl", "figures/*.svg", "figures/*.png"),
    *("LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE", "NOTICE.md", "NOTICE.txt"),
    *("custom_generate/*.py", "custom_generate/requirements.txt", "custom_generate/README.md"),
)
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
TOKEN = re.compile(rb"\bhf_(?:[A-Za-z0-9]{30,}|oauth_[\w.-]{30,})")
HEADER_LENGTH = 8  # bytes in front of a safetensors header that say how long it is
LARGE = 10 * 2**20  # bytes from which the Hub keeps a file outside of git; weights always


@dataclass(frozen=True)
class PlannedFile:
    """A file that is published.

    Args:
        path (`str`): Its place in the repository.
        size (`int`): Bytes.
        source (`Path` or `bytes`): The file, or what is in it: of the card, which names the repository.
    """

    path: str
    size: int
    source: Path | bytes

    @property
    def is_large(self) -> bool:
        """Whether the Hub keeps it outside of git (LFS, Xet), so that an upload that broke off keeps what arrived."""
        return self.path.endswith(".safetensors") or self.size > LARGE


@dataclass(frozen=True)
class PushPlan:
    """What a push sends, in the order of names, and what stays, and why."""

    files: tuple[PlannedFile, ...]
    left_out: dict[str, str]

    @property
    def card(self) -> str:
        """The card's text."""
        return next(file.source for file in self.files if isinstance(file.source, bytes)).decode()

    @property
    def base_model(self) -> str | None:
        """The target that the card names."""
        return ModelCard(self.card, ignore_metadata_errors=True).data.get("base_model")

    def __str__(self) -> str:
        width = max(len(name) for name in [*(file.path for file in self.files), *self.left_out])
        lines = [
            f"  {file.path:<{width}}{file.size:>16,} bytes{', LFS' if file.is_large else ''}" for file in self.files
        ]
        lines += [f"  {name:<{width}}  stays: {why}" for name, why in self.left_out.items()]
        return "\n".join(lines)


def plan_push(folder: Path, repo_id: str) -> PushPlan:
    """Check a drafter's folder and say what of it is published. Nothing is asked of the network.

    Args:
        folder (`Path`): Holds the drafter. Without a card, one is made from its rows and its training.
        repo_id (`str`): Name on the Hub, which the card tells in place of the folder's.

    Raises:
        ValueError: If it holds no drafter that loads, its card does not fit its rows, or a file holds a token.
    """
    folder = Path(folder)
    _check_drafter(folder)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    going = {
        CONFIG,
        *_weights(folder),
        *(name for name in names if _is_published(name) and not _leads_out(name, folder)),
    }
    files = {name: PlannedFile(name, (folder / name).stat().st_size, folder / name) for name in going}
    files[CARD] = _card(folder, repo_id)
    for file in files.values():
        _check_holds_no_token(file)
    return PushPlan(
        files=tuple(files[name] for name in sorted(files)),
        left_out={name: _why_left_out(name, folder) for name in _summed_up(names, files, folder)},
    )


def _check_drafter(folder: Path) -> None:
    """Load it without its values: configuration, names and shapes of tensors, and whole files."""
    if (folder / ADAPTER_CONFIG).is_file() and not (folder / CONFIG).is_file():
        remedy = "Merge it, adapted.merge_and_unload(), or publish it with PEFT's own adapted.push_to_hub()."
        raise refusal("the folder", "that of a whole drafter", f"an adapter ({folder})", remedy)
    if not (folder / CONFIG).is_file():
        remedy = "Save a drafter there, drafter.save_pretrained(folder)."
        raise refusal("the folder", f"that of a drafter, with {CONFIG}", str(folder), remedy)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # Transformers' report of what is missing; the error says it
    try:
        DominoDraftModel.from_pretrained(folder, device_map="meta", local_files_only=True)
    finally:
        logging.set_verbosity(verbosity)


def _weights(folder: Path) -> list[str]:
    """The files that `from_pretrained` reads weights from."""
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    return [INDEX, *json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()]


def _card(folder: Path, repo_id: str) -> PlannedFile:
    """The folder's card, which must fit its rows, with the name that the drafter is loaded by."""
    if (folder / CARD).is_file():
        card.check_folder(folder)
    try:
        text = card.card_for(folder, name=repo_id).encode()
    except ValueError as error:
        raise ValueError(f"{error} Write the card first: hf-domino card {folder} --target OWNER/NAME.") from error
    return PlannedFile(CARD, len(text), text)


def _is_published(name: str) -> bool:
    return any(name.count("/") == pattern.count("/") and fnmatch.fnmatchcase(name, pattern) for pattern in PUBLISHED)


def _leads_out(name: str, folder: Path) -> bool:
    """Whether this is a link to what lies elsewhere, and not in the cache of downloads that the folder is part of."""
    place, folder = (folder / name).resolve(), folder.resolve()
    return not any(place.is_relative_to(home) for home in (folder, folder.parent.parent / "blobs"))


def _check_holds_no_token(file: PlannedFile) -> None:
    content = file.source if isinstance(file.source, bytes) else _text_of(file.source)
    own = (get_token() or "").encode()
    if (own and own in content) or TOKEN.search(content):
        remedy = "Remove it there, and revoke it on https://huggingface.co/settings/tokens if anybody saw it."
        raise refusal(file.path, "free of tokens", "what looks like a token of the Hub", remedy)


def _text_of(path: Path) -> bytes:
    """What of a file somebody may have written: of weights the header."""
    with path.open("rb") as file:
        if path.suffix != ".safetensors":
            return file.read()
        return file.read(int.from_bytes(file.read(HEADER_LENGTH), "little"))


def _summed_up(names: list[str], going: dict[str, PlannedFile], folder: Path) -> list[str]:
    """What stays, a folder of which nothing goes as one."""
    open_folders = {name.partition("/")[0] for name in going if "/" in name}
    tops = {name if name.partition("/")[0] in open_folders else name.partition("/")[0] for name in names}
    return sorted(name + "/" * (folder / name).is_dir() for name in tops - set(going))


def _why_left_out(name: str, folder: Path) -> str:
    if _leads_out(name, folder):
        return "a link out of the folder"
    if name.startswith("checkpoint-"):
        return "a checkpoint of the training"
    if name.startswith("."):
        return "hidden"
    if name.endswith(PICKLES):
        return "a pickle, which can hold anything"
    if name.endswith(".safetensors"):
        return "not read by from_pretrained"
    return "no weights, configuration, card or results"
