"""What a model gains without a trained drafter, by task, and what a memory of earlier texts adds.

    python model_cards/workshop/benchmarks/no_drafter.py --target FOLDER --questions FILE --rows ROWS

FILE is Spec-Bench's `question.jsonl` (github.com/hemingkx/Spec-Bench). Its six tasks take turns, so that the
second half of the questions is asked when each memory has read the first half of every task (`half` of a row: cold,
warm). Then comes a conversation of ten turns, whose prompts repeat all that was said. Every prompt is answered greedily
by each method, another one first each time, after plain generation of one token, because a prompt of a new length takes
longer. Methods of hf_domino keep their drafter, table and memory from one prompt to the next. A row is one answer of
one method, in float32. All rows are written when an answer is done.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_domino
from hf_domino._common.atomic_writes import check_writable, write_atomic
from hf_domino._common.errors import invalid_argument
from hf_domino._common.provenance import provenance
from hf_domino.evaluation.benchmark.options import BASELINE, LOOKUP, PACKED
from hf_domino.evaluation.benchmark.prompts import encode
from hf_domino.evaluation.results import Result, to_lines
from hf_domino.targets.identity import identify

LOOKUP_TOKENS = 10
WITH_MEMORY = "token recycling with a memory"
TASKS = ("translation", "summarization", "qa", "math_reasoning", "rag")  # all other categories are MT-Bench's
CHAT, CONVERSATION = "mt_bench", "conversation"
TURNS = (
    "Write a Python class for a shopping cart.",
    "Add a method that removes an item.",
    "Add a method that returns the total price.",
    "Give every item a quantity.",
    "Add a discount in percent to the total.",
    "Raise an error if a quantity is negative.",
    "Write a docstring for each method.",
    "Write a test for the method that removes an item.",
    "Write a test for the discount.",
    "Show the whole class once more.",
)


def questions(path: Path, per_task: int) -> list[tuple[str, str]]:
    """Tasks and first turns: as many questions of each task, spread over all of them, the tasks in turn."""
    of_task: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        of_task.setdefault(row["category"] if row["category"] in TASKS else CHAT, []).append(row["turns"][0])
    fewest = min(map(len, of_task.values()))
    if per_task > fewest:
        raise invalid_argument("--per-task", f"at most {fewest}", per_task, "A task has no more questions.")
    return [
        (task, texts[number * len(texts) // per_task]) for number in range(per_task) for task, texts in of_task.items()
    ]


class Measurement:
    """All methods over one target, with the drafters that they keep."""

    def __init__(self, target: PreTrainedModel, tokenizer: Any, name: str, max_new_tokens: int):
        self.target = target
        self.tokenizer = tokenizer
        self.made = provenance()
        self.max_new_tokens = max_new_tokens
        self.about: dict[str, Any] = {"target": name, "dtype": "float32", "device": "cpu", "mode": "greedy"}
        self.about["models"] = {"target": identify(target).known}
        self.rows: list[Result] = []
        remembering = hf_domino.recycling(target)
        remembering.memory = hf_domino.LookupMemory()
        lookup = {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
        self.methods: dict[str, dict[str, Any]] = {
            BASELINE: {},
            PACKED: {},
            LOOKUP: lookup,
            "recycling": {"assistant_model": hf_domino.recycling(target)},
            "recycling_lookup": {"assistant_model": hf_domino.recycling(target), **lookup},
            WITH_MEMORY: {"assistant_model": remembering},
        }

    def warm_up(self) -> None:
        """Pack weights and time products, with drafters that are not measured."""
        inputs = self.tokenizer("Once upon a time", return_tensors="pt")
        for arguments in ({}, {"assistant_model": hf_domino.recycling(self.target)}):
            self.target.generate(**inputs, **arguments, do_sample=False, max_new_tokens=8)

    def answer(self, messages: Sequence[dict[str, str]], task: str, half: str) -> str:
        """Let every method answer; return plain generation's answer."""
        inputs = encode(self.tokenizer, [{"messages": messages}])
        length = inputs["input_ids"].shape[1]
        prompt = len({row["prompt"] for row in self.rows})
        settings = self.about | {
            "max_new_tokens": self.max_new_tokens,
            "task": task,
            "half": half,
            "prompt": prompt,
            "prompt_tokens": length,
        }
        for name in (BASELINE, PACKED):
            self._generate(name, inputs, 1)
        names = list(self.methods)
        first = prompt % len(names)
        timed = {name: self._generate(name, inputs, self.max_new_tokens) for name in names[first:] + names[:first]}
        plain, _ = timed[BASELINE]
        for name, arguments in self.methods.items():
            output, seconds = timed[name]
            new = output.shape[1] - length
            figures = {"new_tokens": new, "seconds": seconds, "tokens_per_second": new / seconds}
            figures |= {"equals_plain": torch.equal(output, plain)}
            if drafter := arguments.get("assistant_model"):
                figures["tokens_per_forward"] = drafter.stats.tokens_per_forward
            self.rows.append(Result(name, settings, figures, self.made))
        return self.tokenizer.decode(plain[0, length:], skip_special_tokens=True)

    def _generate(self, name: str, inputs: Any, max_new_tokens: int) -> tuple[torch.Tensor, float]:
        """The text of a method with its prompt, and the seconds that it took."""
        how = self.methods[name] | {"do_sample": False, "max_new_tokens": max_new_tokens}
        with hf_domino.packed_linears(self.target) if name == PACKED else nullcontext():
            start = time.perf_counter()
            output = self.target.generate(**inputs, **how)
            return output, time.perf_counter() - start


def prompts(path: Path, per_task: int) -> Iterator[tuple[str, str, str]]:
    """Task, half and text of every prompt, those of the conversation last."""
    asked = questions(path, per_task)
    for number, (task, text) in enumerate(asked):
        yield task, "cold" if number < len(asked) // 2 else "warm", text
    for text in TURNS:
        yield CONVERSATION, "warm", text


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="folder of the target, a chat model")
    parser.add_argument("--questions", type=Path, required=True, help="Spec-Bench's questions, a JSONL file")
    parser.add_argument("--per-task", type=int, default=4, help="questions of each task (default: 4)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="length of the answers (default: 64)")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default: 2)")
    parser.add_argument("--rows", type=Path, required=True, help="JSONL file to write")
    options = parser.parse_args(arguments)
    check_writable(options.rows.parent, "the folder of --rows")
    torch.set_num_threads(options.threads)
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    measurement = Measurement(target, tokenizer, options.target.name, options.max_new_tokens)
    measurement.warm_up()
    said: list[dict[str, str]] = []  # the conversation so far
    for task, half, text in tqdm(list(prompts(options.questions, options.per_task)), unit="prompt"):
        message = {"role": "user", "content": text}
        answer = measurement.answer([*said, message], task, half)
        if task == CONVERSATION:
            said += [message, {"role": "assistant", "content": answer}]
        write_atomic(options.rows, to_lines(measurement.rows))


if __name__ == "__main__":
    main()
