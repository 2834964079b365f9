"""A drafter for SmolLM2-135M-Instruct, from nothing: target, text in its own words, drafter, rows, card.

Every stage leaves its result in the work folder and is skipped if that is there. The work folder holds a pair then:
`smollm2-135m-instruct` with its `-domino` beside it. The drafter is trained from nothing as two cores can, and three
times further, with convolutions and more text, as a GPU can.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from hf_domino.data.writing import REPORT
from hf_domino.methods import DominoDraftModel
from recipes.cards import write_drafter_card
from recipes.drafter_recipe import DrafterRecipe, check_text
from recipes.parquet import join_rows
from recipes.processes import HF_DOMINO, run_command, torchrun
from recipes.smollm2_target import HUB_NAME, NAME, PACKAGE, SHORT_PROMPTS, fetch_target
from recipes.smollm2_tasks import write_tasks

RECIPE, GOING_ON = (Path(__file__).with_name(name) for name in ("smollm2.yaml", "smollm2_going_on.yaml"))
LONG_PROMPTS = Path(__file__).with_name("smollm2_long_prompts.jsonl")
HELD_OUT = "evaluation.parquet"
PARTS = (3072, 3072, 16384, 8192, 8192)  # prompts of each, a file of its own; those of three were answered on a GPU
EVALUATION_ROWS = 32
TRAININGS = (  # recipe, rows of a step over all processes, and what is set otherwise
    (RECIPE, 16, ()),
    (GOING_ON, 64, ()),
    (GOING_ON, 32, ("--max_steps=1400", "--seed=9")),
    (GOING_ON, 32, ("--max_steps=1100", "--seed=11", "--lambda_base_start=0.2")),
)
METHODS = "packed,prompt_lookup,recycling_lookup,domino_adaptive,domino_lookup"
MEASUREMENTS = {  # rows: prompts, how many, dtype, how many at once
    "results.jsonl": (SHORT_PROMPTS, 24, "bfloat16", 1),
    "results-fp32.jsonl": (SHORT_PROMPTS, 24, "float32", 1),
    "results-long.jsonl": (LONG_PROMPTS, 20, "bfloat16", 1),
}
# How it writes. Half of its answers are longer than 160 tokens; one that is cut is as good to learn from.
WRITING = ("--max-new-tokens=384", "--keep-unended", f"--batch-size={2048 if torch.cuda.is_available() else 64}")
# Prompts without a nucleus: sorting 49 k logits for every token was half of the time on two cores.
ASKING = ("--prompt-temperature=0.8", "--prompt-top-p=1")

ABOUT = f"""
## About the target

The drafter was trained and measured with {HUB_NAME} (Apache-2.0) as the package `{PACKAGE}` contains it: in four bits,
dequantized to bf16. `python model_cards/workshop recipe smollm2` builds this target. We expect a similar acceptance
with the original weights, but have not measured it. If you can reach the Hub, measure it with
`hf-domino bench --target {HUB_NAME} --drafter FOLDER`.

The drafter started as a copy of the target's last layers (`start_from_target`). It was trained for 3,520 steps on two
cores, and then on an H200 that also did other work: 700 steps of 64 examples, 1,400 of 32, and the steps listed above.
The prompts for the measurements are in `model_cards/workshop/recipes/smollm2_prompts.jsonl`; those for
`results-long.jsonl`, with about 1,500 tokens each, are in `model_cards/workshop/recipes/smollm2_long_prompts.jsonl`.
The training text, in `text`, was written separately. The results in `gpu-speed` and `sampled-speed` belong to the
drafter of 3,520 steps.
"""


@dataclass(frozen=True)
class SmolLM2Recipe(DrafterRecipe):
    """The stages, in their order; `text` is a folder of text that it wrote before."""

    name = NAME
    text: Path | None = None

    @property
    def stages(self) -> dict[str, Callable[[], Path]]:
        """What makes each stage."""
        return {
            "target": lambda: fetch_target(self.target),
            "data": self.write_text,
            "train": self.train,
            "measure": self.measure,
            "card": self.write_cards,
        }

    def write_text(self) -> Path:
        """Let the target write chats, apart from the prompts it will be measured on; or take those it wrote before."""
        if self.text is not None:
            return check_text(self.text, self.text / HELD_OUT)
        output = self.work / "text"
        for part in range(len(PARTS)):
            if not (output / f"train-{part}.parquet").exists():
                self._write_part(part, output)
        return output

    def _write_part(self, part: int, output: Path) -> None:
        """Half of a part answers prompts of the target's own, half tasks with a text, for which these answers are used.

        All but the first part keep out what is held out, too.
        """
        count, held_out = PARTS[part] // 2, output / HELD_OUT
        kept_out = (SHORT_PROMPTS, LONG_PROMPTS, *([held_out] if part else []))
        held_out_examples = f"--num-eval-examples={0 if part else EVALUATION_ROWS}"
        how = (f"--seed={part}", held_out_examples, "--exclude", *map(str, kept_out))
        own = self._write(f"chats-{part}", f"--num-examples={count}", *ASKING, *how)
        tasks = write_tasks(own / "train.jsonl", self.work / f"tasks-{part}.jsonl", count, part)
        folders = (own, self._write(f"tasks-{part}", f"--prompts={tasks}", *how))
        if not part:
            join_rows([folder / "evaluation.jsonl" for folder in folders], held_out, keep_messages=True)
        written = [folder / "train.jsonl" for folder in folders]
        join_rows(written, output / f"train-{part}.parquet", keep_messages=False)

    def _write(self, name: str, *arguments: str) -> Path:
        """Let the target answer prompts, in a folder of the work folder."""
        output = self.work / name
        if not (output / REPORT).exists():
            what = (f"--target={self.target}", f"--output={output}", *WRITING)
            torchrun(self.processes, HF_DOMINO, "data", *what, *arguments)
        return output

    @property
    def run_folder(self) -> Path:
        """Folder of the last training."""
        return self.work / "runs" / str(len(TRAININGS))

    def train(self) -> Path:
        """Train a drafter from nothing, go on with it, and save it as bf16 beside the target."""
        if (self.drafter / "config.json").exists():
            return self.drafter
        data = self.write_text()
        texts = (f"--train_file={data}", "--train_split=train", f"--eval_file={data / HELD_OUT}")
        begin = f"--cache_hidden_states={self.work / 'states'}"  # the target is as dear as the drafter on two cores
        for number, (recipe, rows, otherwise) in enumerate(TRAININGS, start=1):
            run, processes = self.work / "runs" / str(number), min(self.processes, rows)
            batch = f"--per_device_train_batch_size={rows // processes}"
            folders = (f"--target={self.target}", f"--output_dir={run}")
            torchrun(processes, HF_DOMINO, "train", str(recipe), *folders, *texts, begin, *otherwise, batch)
            begin = f"--drafter={run}"
        drafter = DominoDraftModel.from_pretrained(self.run_folder, dtype=torch.bfloat16)
        drafter.save_pretrained(self.drafter, max_shard_size="15MB")
        return self.drafter

    def measure(self) -> Path:
        """Measure the drafter on the prompts, short and long, in the target's dtype and in fp32."""
        for name, (prompts, count, dtype, at_once) in MEASUREMENTS.items():
            what = (f"--target={self.target}", f"--dtype={dtype}", f"--methods={METHODS}")
            texts = (f"--prompts={prompts}", f"--num-prompts={count}", f"--batch-size={at_once}", "--max-new-tokens=64")
            rows = f"--results={self.drafter / name}"
            run_command(HF_DOMINO, "bench", *what, *texts, "--repeats=1", rows)
        return self.drafter

    def write_cards(self) -> Path:
        """Write its card."""
        return write_drafter_card(self.drafter, self.run_folder, HUB_NAME, ABOUT)
