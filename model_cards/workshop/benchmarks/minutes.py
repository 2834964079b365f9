r"""What `hf-domino train --minutes` makes of its time: tokens a forward of each method and learning rate.

    python model_cards/workshop/benchmarks/minutes.py --train-file train.jsonl --eval-file evaluation.jsonl \
        --results model_cards/pycoder-13m-domino/minutes.jsonl

The minutes are CPU-time of one thread, so that a busy machine plans as an idle core does. Further flags are those of
`hf-domino train`, such as `--max-steps 300` in place of the minutes. The held-out text must be the target's own greedy
text, over which rounds are simulated.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_domino import DominoDraftModel
from hf_domino._common.provenance import provenance
from hf_domino._common.run_record import Run
from hf_domino.cli.main import main as hf_domino
from hf_domino.data.rows import load_rows
from hf_domino.evaluation.check.estimate import estimate_mean
from hf_domino.evaluation.results import Result, append_results
from hf_domino.training.evidence.acceptance import simulate_acceptance

TARGET = Path(__file__).parents[2] / "pycoder-13m"
METHODS = ("domino", "dflash", "dspark", "eagle3")


def train(options: argparse.Namespace, flags: Sequence[str], folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train a drafter into a folder, and return settings and figures of the training."""
    given = {"target": options.target, "train_file": options.train_file, "output_dir": folder, "seed": options.seed}
    usual = {"save_strategy": "no", "report_to": "none", "disable_tqdm": "true", "use_cpu": "true"}
    fields = [part for name, value in (given | usual).items() for part in (f"--{name}", str(value))]
    start = time.process_time()
    with mock.patch("time.perf_counter", time.process_time):
        if hf_domino(["train", *fields, *flags]):
            raise SystemExit(f"training with {' '.join(flags)} failed.")
    spent = time.process_time() - start
    run = Run.load(folder)
    assert run is not None
    recorded = ("minutes", "muon_learning_rate", "learning_rate", "num_anchors", "seed")
    settings = {name: run.arguments[name] for name in recorded} | {
        "rows": run.arguments["per_device_train_batch_size"],
        "flags": " ".join(flags),
    }
    return settings, {"steps": run.steps, "cpu_seconds": round(spent, 1)}


def measure(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Simulate greedy rounds over the held-out texts."""
    drafter = DominoDraftModel.from_pretrained(folder, dtype=torch.float32)
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=torch.float32).eval()
    read = load_rows(
        options.eval_file, AutoTokenizer.from_pretrained(options.target), drafter.config.max_position_embeddings
    )
    texts = [read[index] for index in range(min(options.num_texts, len(read)))]
    starts = [max(1, list(row["loss_mask"]).index(1)) for row in texts]
    length = estimate_mean(simulate_acceptance(drafter, target, [row["input_ids"] for row in texts], starts))
    return {
        "tokens_per_forward": round(float(length), 4),
        "error": round(length.error, 4),
        "num_texts": len(texts),
        "block_size": drafter.config.block_size,
        "parameters": drafter.num_parameters(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(TARGET), help="folder or Hub name of the target")
    parser.add_argument("--train-file", required=True, help="text that the target wrote")
    parser.add_argument("--eval-file", required=True, help="greedy text that the target wrote after other prompts")
    parser.add_argument("--num-texts", type=int, default=64, help="held-out texts to simulate rounds over")
    parser.add_argument("--methods", nargs="+", default=METHODS, help="methods to train")
    parser.add_argument("--rates", nargs="+", help="Muon's rates to try; by default those of the plan")
    parser.add_argument("--minutes", default="3", help="CPU-minutes of each training")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the training")
    parser.add_argument("--results", type=Path, help="append rows to this JSONL file")
    options, others = parser.parse_known_args(arguments)
    torch.set_num_threads(1)
    length = [] if "--max-steps" in others else ["--minutes", options.minutes]
    for method in options.methods:
        for rate in options.rates or [None]:
            flags = ["--projector-type", method, *length, *others]
            if rate is not None:
                flags += ["--muon-learning-rate", rate]
            with TemporaryDirectory() as folder:
                settings, figures = train(options, flags, folder)
                settings["target"] = Path(options.target).name
                result = Result(method, settings, figures | measure(options, folder), provenance())
            print(result.to_line(), end="", flush=True)
            if options.results is not None:
                append_results(options.results, [result])


if __name__ == "__main__":
    main()
