"""Which run a folder belongs to: whether this run may go on with it, and whether anything is left to do.

A checkpoint's configuration names its target and shape, and `run.json` beside it what its optimizer keeps; these cannot
be changed on the way.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_domino._common.refusal import refusal
from hf_domino.configuration import DominoConfig
from hf_domino.kinds import KINDS
from hf_domino.kinds.kind import HEAD_FIELDS, OF_BLOCKS
from hf_domino.target.identity import TargetIdentity, check_same
from hf_domino.training.arguments import DominoTrainingArguments
from hf_domino.training.runs.checkpoints import STATE_FILE, is_whole, last_checkpoint

RUN_FILE, CONFIG_FILE = "run.json", "config.json"
SHAPE = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "block_size", "mask_token_id", "target_layer_ids", "projector_type"),
    *("pure_draft_prefix_len", "shift_label", "layer_types", "sliding_window", "conv_group_size"),
    *(*HEAD_FIELDS, *OF_BLOCKS),
    *("sliding_window_non_causal", "draft_vocab_size", "hidden_act", "rms_norm_eps", "rope_parameters"),
    *KINDS["eagle3"].own,
)
# What the optimizer's state decides.
KEPT = ("optim", "learning_rate", "muon_learning_rate", "weight_decay", "train_only")
START_AGAIN = "Choose another output_dir, or start again (--overwrite true; in Python, without resume_from_checkpoint)."
FINISHED = (
    "{} holds a finished run ({} steps, {:g} epochs), so nothing was trained. For more of it, raise max_steps or "
    "num_train_epochs; for another run, choose another output_dir, or start again with --overwrite true."
)


def prepare_folder(
    args: DominoTrainingArguments, config: DominoConfig, overwrite: bool = False
) -> tuple[str | None, str | None]:
    """Find out what is left to do in `output_dir`, before any work.

    Args:
        args (`DominoTrainingArguments`): Of this run.
        config (`DominoConfig`): Of its drafter, which names its target.
        overwrite (`bool`, *optional*, defaults to `False`): Delete the checkpoints and records of an earlier run.

    Returns:
        `tuple[str | None, str | None]`: The checkpoint to go on from, and, if the run is finished, a line that says so.
    """
    folder = Path(str(args.output_dir))
    if overwrite:
        if args.resume_from_checkpoint:
            remedy = "Leave one of them out: a run goes on or starts again."
            raise refusal("resume_from_checkpoint with overwrite", None, args.resume_from_checkpoint, remedy)
        if args.process_index == 0:
            for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
                shutil.rmtree(path, ignore_errors=True)
            for name in (STATE_FILE, RUN_FILE):
                (folder / name).unlink(missing_ok=True)
        args.distributed_state.wait_for_everyone()
        return None, None
    state = _read(folder / STATE_FILE) if is_whole(folder) else {}
    checkpoint = args.resume_from_checkpoint or last_checkpoint(folder)
    if state and state["global_step"] >= state["max_steps"]:
        check_resumable(folder, config, args)
        is_enough = (state["epoch"] or 0.0) >= args.num_train_epochs - 1e-6
        if state["global_step"] >= args.max_steps if args.max_steps > 0 else is_enough:
            return checkpoint, FINISHED.format(folder, state["global_step"], state["epoch"])
        if checkpoint is None:
            remedy = f"Start from its drafter, --drafter {folder} with another output_dir, or use --overwrite true."
            raise refusal(f"{folder}, a finished run that is to go on,", "with checkpoints", "none", remedy)
    if checkpoint:
        check_resumable(checkpoint, config, args)
    return checkpoint, None


def check_resumable(checkpoint: str | Path, config: DominoConfig, args: DominoTrainingArguments) -> None:
    """Refuse a checkpoint, or a finished run, of another target, shape or optimizer."""
    saved, run = _read(Path(checkpoint) / CONFIG_FILE), _read(Path(checkpoint) / RUN_FILE)
    recorded = TargetIdentity.recorded_in(DominoConfig.from_dict(saved)) if saved else None
    if found := TargetIdentity.recorded_in(config):
        check_same(recorded, found, str(checkpoint), START_AGAIN)
    wanted = {name: getattr(config, name) for name in SHAPE} | kept_of(args)
    wanted |= {"ema_decay": None, "lora_rank": None}  # of older versions
    for name, value in wanted.items():
        before = (saved | run).get(name, value)
        if before != value:
            made = f"{before!r}, with which {checkpoint} was trained"
            raise refusal(name, made, value, f"Set it back. {START_AGAIN}")


def kept_of(args: DominoTrainingArguments) -> dict[str, Any]:
    """What may not change in a run, for `run.json` beside a drafter that was saved."""
    values = {name: getattr(args, name) for name in KEPT}
    return {name: getattr(value, "value", value) for name, value in values.items()}


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
