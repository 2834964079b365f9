"""What it is worth that a drafter follows the policy it drafts for: GRPO on the bundled pair, with TRL.

    python model_cards/workshop/benchmarks/follow_policy.py --rows follow-policy.jsonl --work follow-policy

The reward is the share of capitals among the letters of a completion, which moves the policy away from the text that
the drafter was trained on. Each run trains the same policy with the same seed, so all runs write the same completions,
and their tokens per forward pass compare step by step. Rounds draft whole blocks, because shorter drafts and pauses
depend on how busy the machine is. The runs whose names end in `memory` also look tokens up, in the other completions of
the group and in those of earlier steps. A row is one step of one run and is written when the step is done.

With `--work`, a command that is repeated goes on from the last checkpoint of a run, also to a larger number of steps.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback, set_seed
from transformers.trainer_utils import get_last_checkpoint

from hf_domino._common.provenance import provenance
from hf_domino.evaluation.results import Result, append_results, read_results
from hf_domino.pair import Pair, load_pair, read_prompts
from hf_domino.targets.identity import check_same_models
from hf_domino.trl import DraftedRollouts

PROMPT_TOKENS = 48
SAVE_STEPS = 10
# Options of the callback by the name of a run; None for a training without it.
RUNS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "frozen": {"memory": False},
    "frozen_memory": {},
    "every_8": {"update_every": 8, "memory": False},
    "every_8_memory": {"update_every": 8},
    "every_2": {"update_every": 2, "memory": False},
}
FIGURES = ("reward", "completions/mean_length", "step_time")  # of TRL's log


def reward(completions: list[str], **kwargs: Any) -> list[float]:
    """The share of capitals among the letters of each completion."""
    letters = [[each for each in text if each.isalpha()] for text in completions]
    return [sum(each.isupper() for each in some) / max(len(some), 1) for some in letters]


class TimedRollouts(DraftedRollouts):
    """Measures the CPU time of updates: other processes do not change it."""

    update_cpu_seconds = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Update the drafter if it is time."""
        start = time.process_time()
        super().on_step_begin(*args, **kwargs)
        self.update_cpu_seconds = time.process_time() - start


class Recorder(TrainerCallback):
    """Appends a row for each step that has none yet; it comes after the callback that drafts.

    Args:
        origin (`Result`): What all rows say, without figures.
        rollouts (`TimedRollouts`, *optional*): The callback that drafts.
        file (`Path`): The rows.
        num_written (`int`): Steps that have a row.
    """

    def __init__(self, origin: Result, rollouts: TimedRollouts | None, file: Path, num_written: int):
        self.origin = origin
        self.rollouts = rollouts
        self.file = file
        self.num_written = num_written
        self.start = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start the clock, after an update of the drafter."""
        self.start = time.process_time()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Write the row of a step."""
        if "loss" not in logs or state.global_step <= self.num_written:
            return
        figures = {"cpu_seconds": time.process_time() - self.start}
        if self.rollouts is not None:
            figures["update_cpu_seconds"] = self.rollouts.update_cpu_seconds
        figures |= {key: logs[key] for key in logs if key in FIGURES or key.startswith("rollout/")}
        settings = {"step": state.global_step, **self.origin.settings}
        append_results(self.file, [replace(self.origin, settings=settings, figures=figures)])


def train(pair: Pair, name: str, options: argparse.Namespace, folder: Path) -> None:
    """Train a copy of the target, and write a row for each step."""
    from trl import GRPOConfig, GRPOTrainer
    from trl import __version__ as trl_version

    num_written = 0
    models = pair.models
    if options.rows.exists():
        written = [row for row in read_results(options.rows) if row.method == name]
        for row in written:
            check_same_models(row.get("models"), models, str(options.rows), "Write to another file (--rows).")
        num_written = max((row["step"] for row in written), default=0)
    if num_written >= options.steps:
        return
    set_seed(options.seed)
    prompts = []
    for prompt in read_prompts(pair.folder / "prompts.jsonl"):
        ids = pair.tokenizer(prompt["text"])["input_ids"][:PROMPT_TOKENS]
        prompts.append(pair.tokenizer.decode(ids))
    chosen = RUNS[name]
    rollouts = None
    if chosen is not None:
        drafter = copy.deepcopy(pair.drafter)
        drafter.config.draft_length = "full"
        rollouts = TimedRollouts(drafter, **chosen)
    settings = {"options": chosen, "target": pair.name, "models": models, "max_new_tokens": options.max_new_tokens}
    settings |= {"learning_rate": options.learning_rate, "seed": options.seed}
    origin = Result(name, settings, provenance=provenance() | {"trl": trl_version})
    recorder = Recorder(origin, rollouts, options.rows, num_written)
    arguments = GRPOConfig(
        str(folder), max_steps=options.steps, learning_rate=options.learning_rate, num_generations=8,
        per_device_train_batch_size=8, max_completion_length=options.max_new_tokens, logging_steps=1, beta=0.0,
        lr_scheduler_type="constant", save_strategy="steps", save_steps=SAVE_STEPS, save_total_limit=1,
        report_to="none", bf16=False, use_cpu=True, disable_tqdm=True, seed=options.seed,
    )  # fmt: skip
    trainer = GRPOTrainer(
        copy.deepcopy(pair.target), reward, arguments, train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=pair.tokenizer, callbacks=[*filter(None, [rollouts]), recorder],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))


def main() -> None:
    """Train each run in turn and write rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True, help="JSONL file to append to")
    parser.add_argument("--work", type=Path, help="folder for checkpoints (default: a temporary one)")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of the policy (default: 60)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="tokens of a completion (default: 64)")
    parser.add_argument("--learning-rate", type=float, default=3e-4, help="of the policy (default: 3e-4)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    pair = load_pair()
    for name in options.runs:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(options.work or temporary, name)
            folder.mkdir(parents=True, exist_ok=True)
            train(pair, name, options, folder)


if __name__ == "__main__":
    main()
