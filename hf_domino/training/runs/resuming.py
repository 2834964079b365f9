"""What the folder of a run belongs to: whether this run may go on with it, and whether anything is left to do.

A checkpoint's configuration names its target and shape, and `run.json` beside it the rest. What its optimizer keeps
cannot be changed on the way, nor the drafter under adapters, nor the rule by which anchors are drawn; what can be is
said. What else an older checkpoint does not say is not compared.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_domino._common.notices import notice
from hf_domino._common.refusal import refusal
from hf_domino.configuration import DominoConfig
from hf_domino.drafter.adapters import TARGET_FILE
from hf_domino.kinds import KINDS
from hf_domino.target.identity import TargetIdentity, check_same
from hf_domino.training.arguments import DominoTrainingArguments
from hf_domino.training.objective.anchors import ANCHOR_RULE
from hf_domino.training.runs.checkpoints import STATE_FILE, UNFINISHED, is_whole, last_checkpoint
from hf_domino.training.scale.placing import files_digest

RUN_FILE, CONFIG_FILE = "run.json", "config.json"
SHAPE = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "block_size", "mask_token_id", "target_layer_ids", "projector_type", "emb_dim"),
    *("gru_hidden_dim", "pure_draft_prefix_len", "shift_label", "layer_types", "sliding_window"),
    *("sliding_window_non_causal", "draft_vocab_size", "hidden_act", "rms_norm_eps", "rope_parameters"),
    *KINDS["eagle3"].own,
)
# By the optimizer's state, whatever is asked; and a checkpoint holds an average or none.
KEPT = (
    *("optim", "learning_rate", "muon_learning_rate", "weight_decay", "ema_decay"),
    *("lora_rank", "lora_alpha", "train_only"),
)
CHANGEABLE = (
    *("max_steps", "num_train_epochs", "lr_scheduler_type", "warmup_steps", "lambda_base_decay_ratio", "loss_decay"),
    *("lambda_base_start", "position_weights", "dpace_alpha", "own_prefix_share"),
    *("distillation_weight", "distillation_loss", "distillation_temperature"),
    *("num_anchors", "max_length", "packing"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "world_size", "seed"),
)
PREFIX = "pure_draft_prefix_len"
RULE = "anchors"  # how they are drawn
OLD_RULE = "by seed, step and process"  # before 0.2
BASE = "digest of the drafter under the adapters"
SAMPLED_ROWS = 64
START_AGAIN = "Choose another output_dir, or start again (--overwrite true; in Python, without resume_from_checkpoint)."


def begun_with(folder: str, drafter: str | None) -> dict[str, Any]:
    """What a run goes on with where nothing else is asked: what it was begun with, whatever the defaults are now.

    Args:
        folder (`str`): Of the run, or a checkpoint; there need be none.
        drafter (`str`, *optional*): The one that is trained further, whose shape is its own.
    """
    checkpoint = Path(last_checkpoint(folder) or folder)
    run = _read(checkpoint / RUN_FILE)
    if run and not drafter:
        run[PREFIX] = _read(checkpoint / CONFIG_FILE).get(PREFIX, DominoConfig.pure_draft_prefix_len)
    return {name: run[name] for name in (*KEPT, "distillation_weight", PREFIX) if name in run}


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

    Raises:
        ValueError: If what is there is of another target, shape or optimizer, or left no checkpoint to go on from, and
            if a run is to go on and to start again.
    """
    folder = Path(str(args.output_dir))
    if overwrite:
        if args.resume_from_checkpoint:
            remedy = "Leave one of them out: a run goes on or starts again."
            raise refusal("resume_from_checkpoint with overwrite", None, args.resume_from_checkpoint, remedy)
        if args.process_index == 0:
            _delete_run(folder)
        args.distributed_state.wait_for_everyone()
        return None, None
    state = _read(folder / STATE_FILE) if is_whole(folder) else {}
    checkpoint = args.resume_from_checkpoint or last_checkpoint(folder)
    if state and state["global_step"] >= state["max_steps"]:
        check_resumable(folder, config, args, goes_on=False)
        if _has_enough(state, args):
            return checkpoint, _say_finished(folder, state)
        if checkpoint is None:
            remedy = f"Start from its drafter, --drafter {folder} with another output_dir, or use --overwrite true."
            raise refusal(f"{folder}, a finished run that is to go on,", "with checkpoints", "none", remedy)
    if checkpoint:
        check_resumable(checkpoint, config, args)
    return checkpoint, None


def check_resumable(
    checkpoint: str | Path, config: DominoConfig, args: DominoTrainingArguments, rows: Any = None, goes_on: bool = True
) -> None:
    """Refuse a checkpoint that this run would not really go on with; what else differs is said.

    Args:
        checkpoint (`str` or `Path`): Its folder, or that of a finished run.
        config (`DominoConfig`): Of the drafter to be trained, which names its target.
        args (`DominoTrainingArguments`): Of this run.
        rows (*optional*): The training rows, where they are known already.
        goes_on (`bool`, *optional*, defaults to `True`): Whether steps are to follow.

    Raises:
        ValueError: If target, shape, optimizer or the rule of its anchors differ; naming the first field that does.
    """
    saved, run = _read(Path(checkpoint) / CONFIG_FILE), _read(Path(checkpoint) / RUN_FILE)
    adapter = TargetIdentity.from_dict(_read(Path(checkpoint) / TARGET_FILE))
    recorded = TargetIdentity.recorded_in(DominoConfig.from_dict(saved)) if saved else adapter
    if found := TargetIdentity.recorded_in(config):
        check_same(recorded, found, str(checkpoint), START_AGAIN)
    _check_equal(checkpoint, saved, {name: getattr(config, name) for name in SHAPE})
    now = _facts(args, rows, config)
    if None not in (now[BASE], run.get(BASE)):
        _check_equal(checkpoint, run, {BASE: now[BASE]})
    _check_equal(checkpoint, run, {name: now[name] for name in KEPT})
    if goes_on and run.get(RULE) != ANCHOR_RULE:
        found = run.get(RULE, OLD_RULE)
        remedy = f"Finish it with the version that began it, or train its drafter further: --drafter {checkpoint} with "
        raise refusal(f"the anchors of {checkpoint}", f"drawn {ANCHOR_RULE}", found, f"{remedy}another output_dir.")
    changed = [name for name in (*CHANGEABLE, "rows") if name in run and now[name] != run[name]]
    if rows is not None:
        words = ", ".join(f"{name} {now[name]} (until then: {run[name]})" for name in changed)
        notice(f"training goes on from {checkpoint}{' with ' if words else ''}{words}.")


def save_run(folder: str | Path, args: DominoTrainingArguments, rows: Any, config: DominoConfig) -> None:
    """Write what a run is to `run.json`, beside a drafter that was saved.

    Args:
        folder (`str` or `Path`): Of the drafter.
        args (`DominoTrainingArguments`): Of the run.
        rows: Its training rows.
        config (`DominoConfig`): Of the drafter.
    """
    facts = _facts(args, rows, config)
    (Path(folder) / RUN_FILE).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def _facts(args: DominoTrainingArguments, rows: Any, config: DominoConfig) -> dict[str, Any]:
    values = {name: getattr(args, name) for name in (*KEPT, *CHANGEABLE)}
    values[RULE] = ANCHOR_RULE
    values[BASE] = None if args.lora_rank is None else files_digest(config.name_or_path)
    return {name: getattr(value, "value", value) for name, value in values.items()} | {"rows": _digest_rows(rows)}


def _digest_rows(rows: Any) -> str | None:
    """Number and digest of the training rows, from a few of them."""
    if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
        return None
    while hasattr(rows, "rows"):  # not packed, and without the hidden states that they may carry
        rows = rows.rows
    some = [rows[index] for index in range(0, len(rows), max(1, len(rows) // SAMPLED_ROWS))]
    digest = hashlib.sha256(json.dumps(some, default=str, sort_keys=True).encode()).hexdigest()[:8]
    return f"{len(rows)} of {digest}"


def _check_equal(checkpoint: str | Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    for name, value in now.items():
        if name in before and before[name] != value:
            raise refusal(
                name, f"{before[name]!r}, with which {checkpoint} was trained", value, f"Set it back. {START_AGAIN}"
            )


def _has_enough(state: dict[str, Any], args: DominoTrainingArguments) -> bool:
    if args.max_steps > 0:
        return state["global_step"] >= args.max_steps
    return (state["epoch"] or 0.0) >= args.num_train_epochs - 1e-6


def _say_finished(folder: Path, state: dict[str, Any]) -> str:
    return (
        f"{folder} holds a finished run ({state['global_step']} steps, {state['epoch']:g} epochs), so nothing was "
        "trained. For more of it, raise max_steps or num_train_epochs; for another run, choose another output_dir, or "
        "start again with --overwrite true."
    )


def _delete_run(folder: Path) -> None:
    """Delete checkpoints and records; texts of the target stay, and are checked by their own settings."""
    for path in (*folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"), folder / UNFINISHED):
        shutil.rmtree(path, ignore_errors=True)
    for name in (STATE_FILE, RUN_FILE):
        (folder / name).unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
