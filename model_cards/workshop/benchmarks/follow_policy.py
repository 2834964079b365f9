"""What it is worth that a drafter follows the policy it drafts for: GRPO on the bundled pair, with TRL.

    python model_cards/workshop/benchmarks/follow_policy.py --rows follow_policy.jsonl

The reward is the share of capitals among the letters of a completion, which moves the policy away from the text that
the drafter was trained on. Each run trains the same policy with the same seed, so all runs write the same completions,
and their tokens per forward pass compare step by step. Rounds draft whole blocks, because shorter drafts and pauses
depend on how busy the machine is. A row is one step of one run.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import set_seed

from hf_domino._common.provenance import provenance
from hf_domino.pair import Pair, load_pair, read_prompts
from hf_domino.trl import DraftedRollouts

PROMPT_TOKENS = 48
# Options of the callback by the name of a run; None for a training without it.
RUNS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "frozen": {},
    "every_8": {"update_every": 8},
    "every_2": {"update_every": 2},
}
FIGURES = ("reward", "completions/mean_length", "step_time")  # of TRL's log


def reward(completions: list[str], **kwargs: Any) -> list[float]:
    """The share of capitals among the letters of each completion."""
    letters = [[each for each in text if each.isalpha()] for text in completions]
    return [sum(each.isupper() for each in some) / max(len(some), 1) for some in letters]


def train(pair: Pair, name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train a copy of the target; returns a row for each step."""
    from trl import GRPOConfig, GRPOTrainer

    set_seed(options.seed)
    prompts = []
    for prompt in read_prompts(pair.folder / "prompts.jsonl"):
        ids = pair.tokenizer(prompt["text"])["input_ids"][:PROMPT_TOKENS]
        prompts.append(pair.tokenizer.decode(ids))
    callbacks = []
    if (chosen := RUNS[name]) is not None:
        drafter = copy.deepcopy(pair.drafter)
        drafter.config.draft_length = "full"
        callbacks = [DraftedRollouts(drafter, **chosen)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            folder, max_steps=options.steps, learning_rate=options.learning_rate, num_generations=8,
            per_device_train_batch_size=8, max_completion_length=options.max_new_tokens, logging_steps=1, beta=0.0,
            lr_scheduler_type="constant", save_strategy="no", report_to="none", bf16=False, use_cpu=True,
            disable_tqdm=True, seed=options.seed,
        )  # fmt: skip
        trainer = GRPOTrainer(
            copy.deepcopy(pair.target), reward, arguments, train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=pair.tokenizer, callbacks=callbacks,
        )  # fmt: skip
        trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    kept = [{key: log[key] for key in log if key in FIGURES or key.startswith("rollout/")} for log in logs]
    return [{"run": name, "step": step} | log for step, log in enumerate(kept, start=1)]


def main() -> None:
    """Train each run in turn, print a summary and write rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, help="JSONL file to write")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of the policy (default: 60)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="tokens of a completion (default: 64)")
    parser.add_argument("--learning-rate", type=float, default=3e-4, help="of the policy (default: 3e-4)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    pair = load_pair()
    origin = {"pair": pair.name, "max_new_tokens": options.max_new_tokens, "learning_rate": options.learning_rate}
    origin |= {"seed": options.seed} | provenance()
    for name in options.runs:
        rows = train(pair, name, options)
        print(json.dumps(rows[-1]), flush=True)
        if options.rows:
            with options.rows.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row | {"options": RUNS[name]} | origin) + "\n" for row in rows)


if __name__ == "__main__":
    main()
