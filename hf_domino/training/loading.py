"""Load the examples of a training from files or data sets, make a new drafter, and choose the tokens that it drafts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import PreTrainedModel

from hf_domino._common.errors import invalid_argument
from hf_domino._common.notices import notice
from hf_domino.configuration.domino_config import DominoConfig
from hf_domino.configuration.from_target import within_window
from hf_domino.data.records import RECORD_SUFFIXES, Source, check_file, from_dataset, from_files
from hf_domino.data.rows import load_rows
from hf_domino.data.token_counts import count_tokens, most_frequent
from hf_domino.formats.draft_vocabulary import d2t_of
from hf_domino.methods import DominoDraftModel
from hf_domino.training.arguments import DominoTrainingArguments
from hf_domino.training.fields import DataArguments
from hf_domino.training.parts import BLOCK_SIZE

SAME_TEXT = "the evaluation text is the training text, so its metrics say nothing about other text."
FIRST_TOKENS = (
    "The drafter only proposes the first {0} tokens of the vocabulary, because no others were chosen. hf-domino train "
    "chooses the most frequent ones of its text. In Python, use most_frequent(count_tokens(rows, vocab_size), {0}) of "
    "hf_domino.data, and DominoDraftModel.restricted."
)
SHORT_BLOCK = 8  # block size of a new drafter with `minutes`: in a short training, longer blocks gain less
FEW_ROWS = 64  # distinct examples; a useful training has thousands


def new_drafter(
    target: PreTrainedModel,
    tokenizer: Any,
    args: DominoTrainingArguments,
    overrides: Mapping[str, Any] | None = None,
) -> DominoDraftModel:
    """Make a new drafter for a target.

    Args:
        target (`PreTrainedModel`): The target.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Its tokenizer, for the mask token.
        args (`DominoTrainingArguments`): Arguments, of which `max_length` and `minutes` are read.
        overrides (`Mapping`, *optional*): Fields of the configuration that do not follow the target.
    """
    fields = dict(overrides or {})
    config = DominoConfig.for_target(target.config, tokenizer, **fields)
    if config.draft_window_size is None and "draft_window_size" not in config.fixed:
        config.draft_window_size = min(args.max_length, config.max_position_embeddings)
    if args.minutes is not None and BLOCK_SIZE not in fields:
        config.block_size = min(config.block_size, SHORT_BLOCK)
    return DominoDraftModel(config)


def sources_of(data: DataArguments) -> dict[str, Source]:
    """Find the sources of the records for `"train"` and, if there are any, `"eval"`.

    Raises:
        ValueError: If a name stands for no text, or an option is out of range.
    """
    if data.train_file is None:
        raise ValueError(
            "train_file must name a file, folder or data set, got None. Set --train-file, or do so in the YAML file."
        )
    sources = {}
    for use in ("train", "eval"):
        name, split, most = (getattr(data, field) for field in (f"{use}_file", f"{use}_split", f"max_{use}_rows"))
        if most is not None and most < 1:
            raise invalid_argument(f"max_{use}_rows", "at least 1", most, "Leave it out for all.")
        if name is None:
            continue
        path = Path(name)
        flag = f"{use}_file (--{use}-file)"
        if path.is_file():
            if not path.stat().st_size:
                raise ValueError(f"{use}_file must hold at least one record, got {name!r}: it is empty.")
            sources[use] = from_files([name])
        elif path.suffix in RECORD_SUFFIXES:
            check_file(path, flag)
        else:
            sources[use] = from_dataset(name, split, streaming=most is not None, field=flag)
    return sources


def load_training_rows(
    data: DataArguments, args: DominoTrainingArguments, target: PreTrainedModel, tokenizer: Any
) -> list[Any]:
    """Read the examples of a training and of its evaluation; the latter are None if there are none."""
    args.max_length = within_window(target.config, args.max_length)
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    sources = sources_of(data)
    rows = {
        use: load_rows(
            source,
            tokenizer,
            args.max_length,
            vocab_size,
            getattr(data, f"max_{use}_rows"),
            args.template_kwargs,
            args.dataset_num_proc,
        )
        for use, source in sources.items()
    }
    train = rows["train"]
    evaluation = rows.get("eval")
    if evaluation is not None and sources["train"].fingerprint() == sources["eval"].fingerprint():
        notice(SAME_TEXT)
    if (distinct := train.counts.rows - train.counts.copies) < FEW_ROWS:
        notice(
            f"there are only {distinct} distinct examples to train on, which a drafter just memorises. "
            "Let the target write thousands (hf-domino data), or give more of its text."
        )
    return [train, evaluation]


def notice_default_draft_vocabulary(drafter: DominoDraftModel) -> None:
    """Print a notice if a drafter has a draft vocabulary whose tokens nobody has chosen."""
    if drafter.config.draft_vocab_size is not None and not drafter.d2t.any():
        notice(FIRST_TOKENS.format(drafter.config.draft_vocab_size))


def take_frequent_tokens(drafter: DominoDraftModel, rows: Any, args: DominoTrainingArguments) -> None:
    """Make a new drafter propose the supervised tokens that are most frequent in its text; the first process counts."""
    size = drafter.config.draft_vocab_size
    vocab_size = drafter.config.vocab_size
    if size is None:
        return
    found: list[Any] = [None]
    if args.process_index == 0:
        counts = count_tokens(rows, vocab_size)
        found = [most_frequent(counts, size)]
        share = counts[found[0]].sum() / max(counts.sum(), 1)
        said = f"{share:.2%} of the training text, which has {int((counts > 0).sum())} different ones"
        notice(f"the draft vocabulary: {size} of {vocab_size} tokens make up {said}.")
    broadcast_object_list(found)
    drafter.d2t.copy_(d2t_of(found[0], vocab_size))
