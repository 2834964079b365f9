"""What a training reads: rows of its files or data sets, apart from its evaluation, answered by the target if asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from hf_domino._common.notices import notice
from hf_domino._common.refusal import refusal
from hf_domino.configuration.from_target import within_window
from hf_domino.data.encoding import RowEncoder
from hf_domino.data.leaks import keep_apart
from hf_domino.data.on_policy import StateKeeper, generate_on_policy
from hf_domino.data.rows import RowDataset, load_rows
from hf_domino.data.sources import FILE_KINDS, Source, from_dataset, from_files
from hf_domino.training.arguments import DominoTrainingArguments
from hf_domino.training.fields import DataArguments
from hf_domino.training.hidden_states.reading import CachedRows

GREEDY = (0.0,)
PLAIN_PROMPTS = (
    "prompts are strings, which the target continues as text, outside its chat template: for questions to a chat "
    "model, write them as messages, or let `hf-domino data --prompts` answer them."
)
SAME_TEXT = "evaluation is on the training text: its figures say how well that was learned, and nothing of other text."
FEW_ROWS = 64  # distinct ones; useful trainings have thousands


@dataclass(frozen=True)
class TrainingRows:
    """The rows of a training, and those of its evaluation, if there are any."""

    train: RowDataset | CachedRows
    evaluation: RowDataset | CachedRows | None


def check_data(data: DataArguments) -> None:
    """Refuse fields that name no text, before anything is loaded or generated.

    Args:
        data (`DataArguments`): Files or data sets.

    Raises:
        ValueError: If there is no training text, no such file or data set, or both for one use.
    """
    if data.train_file is None and data.train_dataset is None:
        raise ValueError("train_file or train_dataset must be set, as --train-file or in the YAML file.")
    for use in ("train", "eval"):
        file, dataset, _, most = (getattr(data, name) for name in _fields(use))
        if file is not None and dataset is not None:
            raise refusal(f"{use}_dataset", f"left out where {use}_file is set", dataset, "Set one of the two.")
        if file is not None and not Path(file).is_file():
            hint = f" For a folder, set {use}_dataset." if Path(file).is_dir() else ""
            raise ValueError(f"{use}_file must be a {FILE_KINDS}, got {file!r}: there is none of that name.{hint}")
        if file is not None and not Path(file).stat().st_size:
            raise ValueError(f"{use}_file must hold at least one record, got {file!r}: it is empty.")
        if most is not None and most < 1:
            raise refusal(f"max_{use}_rows", "at least 1", most, "Leave it out for all.")
        source_of(data, use)  # there is such a data set


def load_training_rows(
    data: DataArguments,
    args: DominoTrainingArguments,
    target: PreTrainedModel,
    tokenizer: Any,
    overwrite: bool = False,
    states: StateKeeper | None = None,
) -> TrainingRows:
    """Read the rows of a training; with `on_policy`, the target writes their supervised part.

    Args:
        data (`DataArguments`): Files or data sets, and who writes their answers.
        args (`DominoTrainingArguments`): Of the training.
        target (`PreTrainedModel`): The target.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        overwrite (`bool`, *optional*, defaults to `False`): Write anew what the target wrote with other settings.
        states (`StateWriter`, *optional*): Keeps the hidden states of what it writes.

    Raises:
        ValueError: If a record is not as described, no row can be trained on, or evaluation text stands in training
            rows and `evaluation_leaks` is `"error"`.
    """
    answer = data.on_policy_max_new_tokens if data.on_policy else 0
    args.max_length = within_window(target.config, args.max_length + answer, answer) - answer
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    sources = {use: source_of(data, use) for use in ("train", "eval")}
    rows = {
        use: load_rows(
            source, tokenizer, args.max_length, vocab_size, getattr(data, f"max_{use}_rows"),
            args.template_kwargs, data.on_policy, data.drop_duplicates and use == "train",
        )
        for use, source in sources.items()
        if source is not None
    }  # fmt: skip
    if data.on_policy and sources["train"] is not None and getattr(tokenizer, "chat_template", None) is not None:
        _say_plain_prompts(sources["train"])
    if "eval" in rows:
        rows["train"] = _apart(data, args, tokenizer, rows["train"], rows["eval"], sources)
    if data.on_policy:
        rows = {use: _answered(read, use, data, args, target, overwrite, states) for use, read in rows.items()}
    counts = rows["train"].counts
    if (distinct := counts.rows - counts.copies) < FEW_ROWS:
        notice(
            f"distinct rows to train on: {distinct}. A drafter learns so few by heart, and little of other text. "
            "Let the target write thousands (hf-domino data), or give more of its text."
        )
    return TrainingRows(rows["train"], rows.get("eval"))


def _say_plain_prompts(source: Source) -> None:
    """Say that a prompt which is a string is no question, where the target is a chat model."""
    _, record = next(source.records(), (None, {}))
    if isinstance(record, dict) and isinstance(record.get("prompt"), str):
        notice(PLAIN_PROMPTS)


def source_of(data: DataArguments, use: str) -> Source | None:
    """Where the records of `"train"` or `"eval"` come from, if there are any."""
    file, dataset, split, most = (getattr(data, name) for name in _fields(use))
    if file is not None:
        return from_files([file])
    return None if dataset is None else from_dataset(dataset, split, streaming=most is not None)


def _fields(use: str) -> tuple[str, str, str, str]:
    return f"{use}_file", f"{use}_dataset", f"{use}_split", f"max_{use}_rows"


def _apart(
    data: DataArguments,
    args: DominoTrainingArguments,
    tokenizer: Any,
    train: RowDataset,
    evaluation: RowDataset,
    sources: dict[str, Source | None],
) -> RowDataset:
    """Training rows without text of the evaluation; where both are asked to be the same text, that is only said."""
    fingerprints = {source.fingerprint() for source in sources.values() if source is not None}
    if len(fingerprints) == 1:
        notice(SAME_TEXT)
        return train
    frame = RowEncoder(tokenizer, chat_template_kwargs=args.template_kwargs).encode_frame()
    kept = keep_apart(train, evaluation, data.evaluation_leaks, frame)
    if kept is not train:
        said = "training rows are left out, as text of the evaluation stands in them; evaluation_leaks=keep keeps them."
        notice(f"{kept.counts.contaminated} of {len(train)} {said}")
    return kept


def _answered(
    rows: RowDataset,
    use: str,
    data: DataArguments,
    args: DominoTrainingArguments,
    target: PreTrainedModel,
    overwrite: bool,
    states: StateKeeper | None,
) -> RowDataset:
    """What the target writes in place of the supervised part of rows; greedily for evaluation."""
    world = range(args.world_size)
    outputs = [Path(str(args.output_dir)) / f"on_policy_{use}-{rank + 1}-of-{len(world)}.jsonl" for rank in world]
    generate_on_policy(
        target,
        rows.prompts(data.on_policy_prompt_length),
        outputs[args.process_index],
        max_new_tokens=data.on_policy_max_new_tokens,
        temperatures=data.on_policy_temperatures if use == "train" else GREEDY,
        batch_size=data.on_policy_batch_size,
        seed=args.seed,
        shard=(args.process_index, len(world)),
        progress=args.process_index == 0,
        overwrite=overwrite,
        states=states,
    )
    args.distributed_state.wait_for_everyone()
    return load_rows(outputs, max_length=args.max_length + data.on_policy_max_new_tokens)
