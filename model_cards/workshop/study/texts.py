"""What all variants train on: one set of prompts, and what the target writes after them, greedily and at T 0.7.

A folder of texts holds `plain.jsonl` (prompts with the text they were cut from), `greedy.jsonl` and `sampled.jsonl`
(the same prompts, continued by the target), `mixed.jsonl` (every other row of each) and `evaluation.jsonl` (greedy
continuations of held-out prompts). Row i of the first four has the same prompt. Where rows are taken as they are,
there are `mixed.jsonl` and `evaluation.jsonl` alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_domino._common.dtypes import fast_dtype
from hf_domino._common.refusal import refusal
from hf_domino._common.whole_files import write_whole
from hf_domino.data.rows import load_rows
from hf_domino.data.units import do_units
from hf_domino.data.writers import SEED_STRIDE, Sampling, TargetWriter
from hf_domino.target.identity import identify
from study.plan import TEXTS
from study.schedule import Command, python

EVALUATION = "evaluation"
TEMPERATURES = {"greedy": 0.0, "sampled": 0.7, EVALUATION: 0.0}
HELD_OUT = "held_out"  # prompts of the evaluation, with the text they were cut from
PLAIN = TEXTS[-1]  # prompts of the training, with the text they were cut from
BATCH_SIZE, SEED = 64, 0

Row = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """Where prompts come from, and who continues them.

    Args:
        target (`str`): Folder or name of the target.
        rows (`Callable[[str, int], list[Row]]`): Rows of `plain` or `held_out`, so many: `input_ids`, and how many of
            them are the prompt, as `prompt_length`.
        max_new_tokens (`int`): Longest text of the target.
        as_written (`str`, *optional*): Where rows are the target's text already, a digest of their files.
    """

    target: str
    rows: Callable[[str, int], list[Row]]
    max_new_tokens: int
    as_written: str | None = None


def rows_of_files(
    files: Mapping[str, Path], target: str, prompt_length: int, max_length: int
) -> Callable[[str, int], list[Row]]:
    """The `rows` of a [`Source`] that cuts its prompts from files.

    Args:
        files (`Mapping`): Rows as for `hf-domino train`, by `plain` and `held_out`.
        target (`str`): Folder or name of the target.
        prompt_length (`int`): Tokens of a row that is supervised from its start to use as a prompt.
        max_length (`int`): Longest row.

    Raises:
        ValueError: When called, if a file holds fewer rows.
    """

    def rows(name: str, count: int) -> list[Row]:
        found = load_rows(files[name], AutoTokenizer.from_pretrained(target), max_length)
        _check_count(files[name], len(found), count)
        some = [found[index] for index in range(count)]
        return [
            {"input_ids": row["input_ids"], "prompt_length": row["loss_mask"].index(1) or prompt_length} for row in some
        ]

    return rows


def rows_as_written(files: Mapping[str, Path], target: str, max_length: int) -> Source:
    """A [`Source`] that takes rows of one answer from files as they are, a random choice; see [`rows_of_files`]."""

    def rows(name: str, count: int) -> list[Row]:
        read = load_rows(files[name], AutoTokenizer.from_pretrained(target), max_length)
        found = [
            {field: list(map(int, read[index][field])) for field in ("input_ids", "loss_mask")}
            for index in range(len(read))
        ]
        found = [row for row in found if "10" not in "".join(map(str, row["loss_mask"]))]
        _check_count(files[name], len(found), count)
        return random.Random(SEED).sample(found, count)

    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files.values())).hexdigest()[:8]
    return Source(target, rows, 0, digest)


def _check_count(file: Path, there: int, wanted: int) -> None:
    if there < wanted:
        raise refusal(str(file), f"a file of at least {wanted} rows for this --budget", there, "Add rows.")


def take_rows(source: Source, folder: Path, num_rows: int, num_texts: int) -> None:
    """Write `mixed.jsonl` and `evaluation.jsonl` from rows as they are, unless they are there."""
    named = {TEXTS[0]: (PLAIN, num_rows), EVALUATION: (HELD_OUT, num_texts)}
    if all((folder / f"{name}.jsonl").exists() for name in named):
        return
    folder.mkdir(parents=True, exist_ok=True)
    identity = identify(AutoModelForCausalLM.from_pretrained(source.target, dtype="auto")).to_dict()
    write_whole(settings_file(folder / f"{EVALUATION}.jsonl"), json.dumps({"target": identity}))
    for name, (role, count) in named.items():
        write_rows(folder / f"{name}.jsonl", source.rows(role, count))


def cut_prompts(source: Source, folder: Path, num_rows: int, num_texts: int) -> None:
    """Write `plain.jsonl` and `held_out.jsonl`, unless they are there."""
    wanted = {PLAIN: num_rows, HELD_OUT: num_texts}
    if all((folder / f"{name}.jsonl").exists() for name in wanted):
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in wanted.items():
        rows = sorted(source.rows(name, count), key=lambda row: row["prompt_length"])
        write_rows(folder / f"{name}.jsonl", rows)


def writing(source: Source, folder: Path) -> list[Command]:
    """Commands that let the target continue the prompts of a folder; they go on where they were broken off."""
    arguments = ["study.texts", "--target", source.target, "--folder", str(folder)]
    arguments += ["--max-new-tokens", str(source.max_new_tokens)]
    return [
        Command(f"text, {kind}", python(*arguments, "--kind", kind), folder / f"{kind}.log")
        for kind in TEMPERATURES
        if not (folder / f"{kind}.done").exists()
    ]


def write_text(target: str, folder: Path, kind: str, max_new_tokens: int) -> None:
    """Let the target continue one set of prompts, `kind` of which is `greedy`, `sampled` or `evaluation`."""
    is_evaluation = kind == EVALUATION
    # What is measured on must be exact; what is trained on takes half the time in bf16 where the CPU has it.
    dtype = torch.float32 if is_evaluation else fast_dtype("cpu")
    model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype).eval()
    rows = read_rows(folder / f"{HELD_OUT if is_evaluation else PLAIN}.jsonl")
    continue_prompts(
        model,
        [row["input_ids"][: row["prompt_length"]] for row in rows],
        folder / f"{kind}.jsonl",
        max_new_tokens,
        (TEMPERATURES[kind],),
    )
    (folder / f"{kind}.done").touch()


def settings_file(output: Path) -> Path:
    """Where the target of a text is written down."""
    return output.with_name(output.name + ".settings.json")


def continue_prompts(
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    output: Path,
    max_new_tokens: int,
    temperatures: Sequence[float],
    shard: tuple[int, int] = (0, 1),
) -> Path:
    """Let a target continue prompts of token ids, in batches of like length that take the temperatures in turn.

    A process that was broken off goes on where it stopped; `shard` is its number, and how many there are.
    """
    ordered = sorted(map(list, prompts), key=len)
    starts = range(0, len(ordered), BATCH_SIZE)
    batches = list(enumerate(ordered[start : start + BATCH_SIZE] for start in starts))[shard[0] :: shard[1]]
    writer, identity = TargetWriter(target), identify(target).to_dict()

    def make(unit: int) -> tuple[list[Row], int]:
        number, batch = batches[unit]
        temperature = temperatures[number % len(temperatures)]
        texts = writer.write(batch, Sampling(max_new_tokens, temperature), SEED * SEED_STRIDE + number)
        rows = [
            {"input_ids": prompt + text.ids, "prompt_length": len(prompt), "temperature": temperature}
            for prompt, text in zip(batch, texts, strict=True)
        ]
        return rows, sum(len(text.ids) for text in texts)

    made_of = json.dumps([ordered, max_new_tokens, list(temperatures), shard, identity["weights_digest"]])
    units = output.with_suffix("." + hashlib.sha256(made_of.encode()).hexdigest()[:8])
    rows = do_units(units, (0, 1), shard[0] == 0, output.stem, len(batches), make)
    write_whole(settings_file(output), json.dumps({"target": identity}))
    write_rows(output, rows)
    return output


def mix(folder: Path) -> None:
    """Write `mixed.jsonl`: every other row of the greedy text, and of the sampled one the rows between."""
    greedy, sampled = (read_rows(folder / f"{kind}.jsonl") for kind in ("greedy", "sampled"))
    write_rows(
        folder / "mixed.jsonl", [pair[index % 2] for index, pair in enumerate(zip(greedy, sampled, strict=True))]
    )


def digest_of(folder: Path) -> str:
    """A short digest of all texts of a folder: equal where all runs had the same data."""
    files = [path for kind in (*TEXTS, EVALUATION) if (path := folder / f"{kind}.jsonl").exists()]
    return hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).hexdigest()[:16]


def read_rows(path: Path) -> list[Row]:
    """Rows of one of these files."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write one of these files, whole or not at all."""
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    """Run [`write_text`] in a process of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kind", choices=list(TEMPERATURES), required=True)
    parser.add_argument("--max-new-tokens", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    write_text(options.target, options.folder, options.kind, options.max_new_tokens)


if __name__ == "__main__":
    main()
