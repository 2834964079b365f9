"""A drafter for SmolLM2-135M-Instruct, from nothing: target, text in its own words, drafter and twin, rows, card.

Every stage leaves its result in the work folder and is skipped if that is there; one that was broken off goes on where
it stopped. The work folder holds a pair then: `smollm2-135m-instruct` with its `-domino` and `-dflash` beside it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hf_domino._common.whole_files import whole_file
from hf_domino.data.records import read_records
from hf_domino.data.writing import REPORT
from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.pair import FETCHED, dflash_folder, domino_folder
from hf_domino.pair.smollm2 import SHORT_PROMPTS, fetch_target
from recipes.processes import kind_flags, run_command, torchrun
from recipes.smollm2_card import write_card
from recipes.smollm2_tasks import write_tasks

RECIPE = Path(__file__).with_name("smollm2.yaml")
LONG_PROMPTS = Path(__file__).with_name("smollm2_long_prompts.jsonl")
MAX_SHARD_SIZE = "15MB"
FIELDS = ("input_ids", "loss_mask", "temperature")  # of a row; those of the evaluation also have `messages`
HELD_OUT = "evaluation.parquet"
ROWS_PER_STEP = 16  # over all processes, of which no more train
SPEED = ("prompt_lookup", "dflash_adaptive", "domino_adaptive", "domino_lookup")
EQUALITY = ("dflash", "domino", "domino_lookup")
MEASUREMENTS = {  # rows: prompts, how many, dtype, how many at once, methods
    "results.jsonl": (SHORT_PROMPTS, 80, "bfloat16", 1, SPEED),
    "results-fp32.jsonl": (SHORT_PROMPTS, 20, "float32", 1, EQUALITY),
    "results-fp32-batch-4.jsonl": (SHORT_PROMPTS, 20, "float32", 4, EQUALITY),
    "results-long.jsonl": (LONG_PROMPTS, 20, "bfloat16", 1, SPEED),
}
# How it writes. Half of its answers are longer than 160 tokens; one that is cut is as good to learn from.
WRITING = ("--max-new-tokens=384", "--keep-unended")
EVALUATION_ROWS = 32
# Prompts without a nucleus: sorting 49 k logits for every token was half of the time on two cores.
ASKING = ("--prompt-temperature=0.8", "--prompt-top-p=1")


@dataclass(frozen=True)
class SmolLM2Recipe:
    """The stages, in their order; of the `rows` prompts of a part that the target answers it writes half itself."""

    work: Path
    processes: int
    commands: str
    source: str = "package"
    rows: int = 3072
    parts: int = 7
    batch_size: int = 64
    device: str | None = None
    endpoint: str | None = None
    endpoint_model: str | None = None
    text: Path | None = None

    @property
    def stages(self) -> dict[str, Callable[[], Path]]:
        """What makes each stage; every one returns where its result is."""
        return {
            "target": lambda: fetch_target(self.target, self.source),
            "data": self.write_text,
            "drafter": lambda: self.train("domino"),
            "twin": lambda: self.train("dflash"),
            "rows": self.measure,
            "card": self.write_cards,
        }

    @property
    def target(self) -> Path:
        """Folder of the target."""
        return self.work / FETCHED["smollm2"]

    def write_text(self) -> Path:
        """Let the target write chats, apart from the prompts it will be measured on; or take those it wrote before.

        Each part has a file and a seed of its own, so that there may be more of them later. What is held out is of the
        first one.
        """
        if self.text is not None:
            if not (list(self.text.glob("train*.parquet")) and (self.text / HELD_OUT).is_file()):
                raise ValueError(f"text must be a folder with train*.parquet and {HELD_OUT}, got {str(self.text)!r}.")
            return self.text
        output = self.work / "text"
        for part in range(self.parts):
            if not (output / f"train-{part}.parquet").exists():
                self._write_part(part, output)
        return output

    def _write_part(self, part: int, output: Path) -> None:
        """Half of a part answers prompts of the target's own, half tasks with a text, for which these answers are used.

        All but the first part keep out what is held out, too.
        """
        count, held_out = self.rows // 2, output / HELD_OUT
        kept_out = (SHORT_PROMPTS, LONG_PROMPTS, *([held_out] if part else []))
        how = (f"--seed={part}", f"--eval-rows={0 if part else EVALUATION_ROWS}", "--exclude", *map(str, kept_out))
        own = self._write(f"chats-{part}", f"--rows={count}", *ASKING, *how)
        tasks = write_tasks(own / "train.jsonl", self.work / f"tasks-{part}.jsonl", count, part)
        folders = (own, self._write(f"tasks-{part}", f"--prompts={tasks}", *how))
        if not part:
            _join(folders, "evaluation", (*FIELDS, "messages"), held_out)
        _join(folders, "train", FIELDS, output / f"train-{part}.parquet")

    def _write(self, name: str, *arguments: str) -> Path:
        """Let the target answer prompts, in a folder of the work folder."""
        output = self.work / name
        if not (output / REPORT).exists():
            what = (f"--target={self.target}", f"--output={output}", f"--batch-size={self.batch_size}", *WRITING)
            where = {"device": self.device, "endpoint": self.endpoint, "endpoint-model": self.endpoint_model}
            given = (f"--{flag}={value}" for flag, value in where.items() if value is not None)
            processes = self.processes if self.endpoint is None else 1  # a server is asked for all at once
            torchrun(processes, self.commands, "data", *what, *arguments, *given)
        return output

    def run_of(self, projector_type: str) -> Path:
        """Folder of a training."""
        return self.work / "runs" / projector_type

    def drafter(self, projector_type: str) -> Path:
        """Folder of a drafter, beside the target's."""
        return {"domino": domino_folder, "dflash": dflash_folder}[projector_type](self.target)

    def train(self, projector_type: str) -> Path:
        """Train a drafter and save it as bf16 beside the target."""
        output = self.drafter(projector_type)
        if (output / "config.json").exists():
            return output
        run, data = self.run_of(projector_type), self.write_text()
        processes = min(self.processes, ROWS_PER_STEP)
        torchrun(
            processes,
            self.commands,
            "train",
            str(RECIPE),
            f"--target={self.target}",
            f"--train_dataset={data}",
            "--train_split=train",
            f"--eval_file={data / HELD_OUT}",
            f"--cache_hidden_states={self.work / 'states'}",
            *kind_flags(projector_type),
            f"--per_device_train_batch_size={ROWS_PER_STEP // processes}",
            f"--output_dir={run}",
        )
        DominoDraftModel.from_pretrained(run, dtype=torch.bfloat16).save_pretrained(
            output, max_shard_size=MAX_SHARD_SIZE
        )
        return output

    def measure(self) -> Path:
        """Measure drafter and twin on the prompts, short and long, in the target's dtype and in fp32."""
        folder = self.drafter("domino")
        for name, (prompts, count, dtype, at_once, methods) in MEASUREMENTS.items():
            what = (f"--target={self.target}", f"--dtype={dtype}", f"--methods={','.join(methods)}")
            texts = (f"--prompts={prompts}", f"--num-prompts={count}", f"--batch-size={at_once}", "--max-new-tokens=64")
            run_command(self.commands, "bench", *what, *texts, "--repeats=1", f"--rows={folder / name}", "--resume")
        return folder

    def write_cards(self) -> Path:
        """Write the cards of both."""
        write_card(self.drafter("dflash"), self.run_of("dflash"))
        return write_card(self.drafter("domino"), self.run_of("domino"))


def _join(folders: Sequence[Path], name: str, fields: Sequence[str], output: Path) -> None:
    """Put rows of several folders into one file, which takes a tenth of their room."""
    import pyarrow
    from pyarrow.parquet import write_table

    records = [record for folder in folders for _, record in read_records(folder / f"{name}.jsonl")]
    table = pyarrow.Table.from_pylist([{field: record[field] for field in fields} for record in records])
    for field, kind in (("input_ids", pyarrow.int32()), ("loss_mask", pyarrow.int8())):
        place = table.schema.get_field_index(field)
        table = table.set_column(place, field, table[field].cast(pyarrow.list_(kind)))
    output.parent.mkdir(exist_ok=True)
    with whole_file(output) as temporary:
        write_table(table, temporary, compression="zstd", compression_level=19, use_dictionary=False)


def make_smollm2(options: argparse.Namespace, commands: str) -> int:
    """Run all stages up to the one that is asked for, with the commands of the module `commands`."""
    names = "work processes source rows parts batch_size device endpoint endpoint_model text"
    fields = {name: getattr(options, name) for name in names.split()}
    for name, make in SmolLM2Recipe(commands=commands, **fields).stages.items():
        print(f"[{name}] {make()}", flush=True)
        if name == options.stage:
            break
    return 0
