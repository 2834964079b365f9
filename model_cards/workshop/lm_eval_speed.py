"""What a drafter saves lm-evaluation-harness: 100 answers without it and with it, by turns.

    pip install lm_eval && python model_cards/workshop/lm_eval_speed.py [TARGET DRAFTER]

It prints a line of JSON, and ends with an error where a prediction differs. The task is made of the target's
`prompts.jsonl`, whole and halved; nothing is downloaded.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM

import hf_domino
from hf_domino._common.provenance import provenance
from hf_domino.evaluation.results import Result
from hf_domino.pair import PROMPTS, load_pair, read_prompts

LENGTH, TURNS, THREADS = 48, 1, 2
TASK = {
    "task": "continuations",
    "dataset_path": "json",
    "test_split": "train",
    "output_type": "generate_until",
    "doc_to_text": "{{text}}",
    "doc_to_target": "",
    "generation_kwargs": {"until": ["<none>"], "max_gen_toks": LENGTH, "do_sample": False},
    "metric_list": [{"metric": "bypass"}],
}


def main(target: str | None = None, drafter: str | None = None) -> None:
    """Measure, and print the row."""
    torch.set_num_threads(THREADS)
    logging.disable(logging.WARNING)
    pair = load_pair(target, drafter)
    texts = [prompt["text"] for prompt in read_prompts(pair.folder / PROMPTS)]
    texts += [text[: len(text) // 2] for text in texts]
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        task = TASK | {"dataset_kwargs": {"data_files": str(rows), "cache_dir": folder}}
        model = HFLM(pretrained=pair.target, tokenizer=pair.tokenizer)
        seconds: dict[str, list[float]] = {"plain": [], "drafted": []}
        _answers(model, task, limit=2)
        for _ in range(TURNS):
            plain, taken = _answers(model, task)
            seconds["plain"].append(taken)
            hf_domino.attach(pair.target, pair.drafter)
            drafted, taken = _answers(model, task)
            seconds["drafted"].append(taken)
            hf_domino.detach(pair.target)
            assert drafted == plain, "predictions differ"
    tokens = sum(len(pair.tokenizer(text)["input_ids"]) for text in plain)
    speed = {name: tokens / median(all_taken) for name, all_taken in seconds.items()}
    figures = {"answers": len(plain), "tokens": tokens, "tokens_per_second": speed, "seconds": seconds}
    figures |= {"speed_up": speed["drafted"] / speed["plain"]}
    print(Result("drafted", {"target": pair.name}, figures, provenance()).to_line(), end="")


def _answers(model: HFLM, task: dict[str, Any], limit: int | None = None) -> tuple[list[str], float]:
    """Predictions, and seconds of the model's part."""
    generate, taken = model.generate_until, 0.0

    def timed(requests: Any, **kwargs: Any) -> list[str]:
        nonlocal taken
        start = time.perf_counter()
        found = generate(requests, **kwargs)
        taken = time.perf_counter() - start
        return found

    model.generate_until = timed
    try:
        results = simple_evaluate(model, tasks=[task], limit=limit, bootstrap_iters=0, log_samples=True)
    finally:
        del model.generate_until
    return [sample["resps"][0][0] for sample in results["samples"][TASK["task"]]], taken


if __name__ == "__main__":
    main(*sys.argv[1:])
