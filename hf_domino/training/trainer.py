"""`DominoTrainer`: Transformers' trainer for drafters, with the frozen target in the same process.

The anchors of an example depend only on the seed, the epoch and the example itself, and both losses are divided by the
sum of the loss weights of the whole step over all processes. Therefore a resumed run gives the same result as an
uninterrupted one, and gradient accumulation or several processes give the same result as one large batch (arXiv
2605.29707).
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel, Trainer, TrainerCallback, TrainerState, set_seed
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_domino._common.errors import invalid_argument
from hf_domino._common.notices import notice
from hf_domino.data.rows import encode_dataset
from hf_domino.formats.adapters import finish_saving, save_adapter
from hf_domino.methods import DominoDraftModel
from hf_domino.pair import find_drafter, find_target
from hf_domino.targets.compatibility import check_causal, check_target, drafter_of
from hf_domino.targets.identity import identify, weights_digest
from hf_domino.targets.loading import load_target, place_target
from hf_domino.targets.view import TargetModel
from hf_domino.training.arguments import DominoTrainingArguments
from hf_domino.training.drafter_training import DrafterTraining
from hf_domino.training.evidence.acceptance import first_examples, simulated_metrics
from hf_domino.training.evidence.meter import Meter
from hf_domino.training.evidence.printing import print_less
from hf_domino.training.evidence.record import recorded_arguments, run_of, texts_of, write_card
from hf_domino.training.faults import check_losses, check_weights
from hf_domino.training.hidden_states.folder import CachedRows
from hf_domino.training.loading import new_drafter, notice_default_draft_vocabulary
from hf_domino.training.losses.eager import DraftLosses, lambda_base_at
from hf_domino.training.muon import muon_factory
from hf_domino.training.objective.anchors import EVALUATION_STREAM, collate_and_draw, collate_rows, sample_anchors
from hf_domino.training.objective.forward import Batch, check_final
from hf_domino.training.parts import choose_parts
from hf_domino.training.resuming import STATE_FILE, check_resumable, last_checkpoint

LENGTHS = 8  # maximum number of padded lengths on a GPU, where each of them needs its own memory and kernels

# Functions of Transformers' trainer that need the logits of a batch, which are never all in memory here.
UNUSED_FUNCTIONS = ("compute_metrics", "preprocess_logits_for_metrics", "compute_loss_func")
INSTEAD = (
    "a drafter is trained and evaluated by its own losses and metrics. To add a metric, compute it in `on_evaluate` of "
    "a TrainerCallback, which gets `metrics`."
)


class DominoTrainer(Trainer):
    """Trains a drafter for a target.

    In addition to the usual fields of Transformers, training logs `base_loss`, `corrected_loss`, `lambda_base`, the
    teacher-forced `acceptance_length`, `num_input_tokens_seen` and `hours`. Evaluation logs the losses and the
    acceptance length, too, and the acceptance at each draft position (`accept_at_1`, `accept_at_2`, ...); names that
    start with `base_` are measured without the correction head. Evaluation also logs `walked_acceptance_length`, the
    tokens per target forward in real rounds that are simulated over the evaluation text. Generation measures the same
    number if that text is the target's own greedy continuation.

    Args:
        model (`DominoDraftModel`, `PeftModel` or `str`): The drafter, or its folder or Hub name. It is trained in fp32,
            whatever dtype it was loaded in. If PEFT wraps it, or with `use_peft`, only the adapter is trained and
            saved. Without `target`, `model` is the target, for which a new Domino drafter is made.
        target (`PreTrainedModel` or `str`, *optional*): The target, or its folder or Hub name. It is frozen
            (`requires_grad_(False)`, evaluation mode) and never saved. It is moved to the training device, unless a
            `device_map`, offloading or sharding has placed its parts.
        args (`DominoTrainingArguments`, *optional*): Training arguments. Defaults to those that `hf-domino train` has,
            with a folder like `Qwen3-0.6B-Domino` for the results.
        data_collator (*optional*): Defaults to [`~training.objective.anchors.collate_rows`] with the drafter's pad
            token.
        train_dataset, eval_dataset (*optional*): [`~data.rows.RowDataset`]s, or records with `messages`, `prompt`
            and `completion`, `text` or `input_ids`: a list, a data set or a stream, which the trainer reads and cuts to
            `max_length` as [`~data.load_rows`] does with files. With [`~training.CachedRows`], the target does not run.
            If you pass your own `data_collator`, the data sets are used as they are.
        processing_class (`PreTrainedTokenizerBase`, *optional*): The target's tokenizer, for records with text. It is
            loaded if the target is given by its name.
        kwargs: Further arguments of [`~transformers.Trainer`].

    Raises:
        ValueError: If the drafter does not fit the target, a record is malformed, or an argument is not supported.

    Example:
    ```python
    >>> from tempfile import TemporaryDirectory
    >>> from transformers import Qwen3Config, Qwen3ForCausalLM, set_seed
    >>> from hf_domino import DominoConfig, DominoDraftModel
    >>> from hf_domino.training import DominoTrainer, DominoTrainingArguments
    >>> set_seed(0)
    >>> target = Qwen3ForCausalLM(Qwen3Config(
    ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
    ...     num_key_value_heads=1, head_dim=16,
    ... ))
    >>> drafter = DominoDraftModel(DominoConfig.for_target(target.config, block_size=4))
    >>> rows = [{"input_ids": [1, 2, 3, 4, 5, 6, 7, 8], "prompt_length": 2}]
    >>> with TemporaryDirectory() as folder:
    ...     args = DominoTrainingArguments(folder, max_steps=1, use_cpu=True, report_to="none", disable_tqdm=True)
    ...     trainer = DominoTrainer(drafter, target, args, train_dataset=rows)
    ...     trainer.train().global_step
    {'loss': ...}
    {'train_runtime': ...}
    1

    ```
    """

    optimizer: torch.optim.Optimizer | None
    args: DominoTrainingArguments

    def __init__(
        self,
        model: DominoDraftModel | PreTrainedModel | str | os.PathLike,
        target: PreTrainedModel | str | os.PathLike | None = None,
        args: DominoTrainingArguments | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        **kwargs: Any,
    ):
        given, target_model, args, processing_class = _loaded(model, target, args, processing_class)
        drafter = drafter_of(given) or given
        check_target(drafter.config, target_model)
        text_config = target_model.config.get_text_config(decoder=True)
        drafter.config.vocab_size = text_config.vocab_size  # it is saved for this target
        check_causal(target_model)
        drafter.config.check_supports("training")
        if args.gradient_checkpointing:
            drafter.config.check_supports("gradient_checkpointing")
        for name in UNUSED_FUNCTIONS:
            if kwargs.get(name) is not None:
                raise invalid_argument(name, "left out", kwargs[name], f"It would never be called: {INSTEAD}")
        if args.n_gpu > 1:
            raise invalid_argument("n_gpu", "at most 1 per process", args.n_gpu, "Use torchrun, one process per GPU.")
        self._reading: dict[str, Any] | None = None
        if data_collator is None:
            multiple = 1
            if args.is_static:
                multiple = -(-args.max_length // LENGTHS)
            data_collator = partial(collate_rows, pad_token_id=drafter.config.pad_token_id or 0, multiple=multiple)
            self._reading = {
                "tokenizer": processing_class,
                "max_length": min(args.max_length, drafter.config.max_position_embeddings),
                "vocab_size": drafter.config.vocab_size,
                "chat_template_kwargs": args.template_kwargs,
                "num_proc": args.dataset_num_proc,
            }
        train_dataset = self._read(train_dataset, "train_dataset")
        eval_dataset = self._read(eval_dataset, "eval_dataset")
        # Epoch of the examples that are collated next, in memory that the data loader's processes share.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        data_collator = partial(collate_and_draw, data_collator, args, self._epoch)
        self.base_digest = weights_digest(drafter) if args.use_peft else None
        self.given_optimizer = _name_of_optimizer(**kwargs)
        if self.given_optimizer is not None:
            args.muon_learning_rate = None
        if args.muon_learning_rate is not None:
            rates = {"muon_lr": args.muon_learning_rate, "adamw_lr": args.learning_rate}
            muon = (muon_factory, rates | {"weight_decay": args.weight_decay})
            kwargs["optimizer_cls_and_kwargs"] = muon
        super().__init__(
            model=choose_parts(given, drafter, args).float(), args=args, data_collator=data_collator,
            train_dataset=train_dataset, eval_dataset=eval_dataset, processing_class=processing_class, **kwargs,
        )  # fmt: skip
        self.label_names = ["loss_mask"]  # a batch with this column is evaluated
        # `compute_loss` already divides by the weights of the whole step, so Transformers must not divide by the number
        # of micro-batches.
        self.model_accepts_loss_kwargs = True
        self.drafter = drafter
        place_target(target_model, args.device)
        self.target = TargetModel(
            target_model.requires_grad_(False).eval(), drafter.config.layer_ids(target_model.config)
        )
        self.drafter_training = DrafterTraining(drafter, self.target, args)
        self._losses: list[tuple[int, torch.Tensor]] = []  # steps and their losses that are not yet checked
        self._order = torch.Generator()  # of examples that are grouped by length
        self._sampler: Any = None
        self._new_tokens = torch.zeros((), dtype=torch.int64, device=args.device)  # not yet counted in the state
        self.meter = Meter(drafter.config, args.device)
        self.add_callback(_OwnSteps())
        print_less(self)

    def _read(self, dataset: Any, name: str) -> Any:
        """Read a data set like a file of the same records, unless its items are for a collator of one's own."""
        if self._reading is None:
            return dataset
        return encode_dataset(dataset, name, **self._reading)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train the drafter; the arguments are those of [`~transformers.Trainer.train`].

        Raises:
            ValueError: If the checkpoint was trained with another target, text, shape or argument. Only the number of
                steps and what is logged and evaluated can change.
        """
        identify(self.target.model).record_in(self.drafter.config)
        checkpoint = resume_from_checkpoint
        if checkpoint is True:
            checkpoint = last_checkpoint(str(self.args.output_dir)) or True
        if isinstance(checkpoint, str):
            arguments = recorded_arguments(self.args, self.drafter.config, self.given_optimizer)
            check_resumable(checkpoint, self.drafter.config, arguments, texts_of(self), self.base_digest)
            notice(f"training continues from {checkpoint}.")
        if not checkpoint:  # a checkpoint has its own draft vocabulary
            notice_default_draft_vocabulary(self.drafter)
        # With cached states, the target does not run.
        if self.args.distillation_weight and not isinstance(self.train_dataset, CachedRows):
            with self.accelerator.autocast():
                check_final(self.target)
        self._clock = time.monotonic()
        with _quiet_about_steps():
            return super().train(checkpoint, *args, **kwargs)

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        """Return what computes the loss, wrapped for several processes or compiled; `self.model` is what is saved."""
        if not training:
            return self.drafter_training
        if model is self.model:
            return self.accelerator.prepare_model(self.drafter_training)
        return model  # wrapped by an earlier call of `train`

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Return the sampler that the arguments ask for, without reading hidden states to learn the lengths."""
        rows = train_dataset or self.train_dataset
        sampler: Any = super()._get_train_sampler(rows.rows if isinstance(rows, CachedRows) else rows)
        if isinstance(sampler, LengthGroupedSampler):  # else torch's own random state decides
            sampler.generator = self._order
        self._sampler = sampler
        return sampler

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list[Batch], torch.Tensor]:
        """Fetch the micro-batches of one optimizer step, and the sum of their loss weights over all processes."""
        if self.state.global_step >= self.state.max_steps:  # resumed at its end; Transformers would train one step more
            self.control.should_training_stop = True
            return [], torch.zeros(())
        epoch = int(self.state.epoch or 0)
        self._epoch.fill_(epoch)
        self._order.manual_seed(self.args.seed + epoch)
        # Accelerate does not pass the epoch on to a sampler behind batches that a resumed run skips.
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        batches = list(itertools.islice(epoch_iterator, num_batches))
        sums = torch.zeros(2, device=device)  # loss weights, tokens
        for batch in batches:
            self.drafter_training.label(batch)
            sums += torch.stack((batch["loss_weight"], batch["attention_mask"].sum().float())).to(device)
        total, num_tokens = self.accelerator.reduce(sums, "sum")
        self._new_tokens += num_tokens.long()
        return batches, total

    def compute_loss(
        self, model: nn.Module, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute this process's share of the loss of one micro-batch, scaled for the averaging of gradients.

        In evaluation, compute the published loss of a batch instead. Both add the batch to a meter.
        """
        if not model.training:
            return self._evaluate_batch(model, inputs)
        step = self.state.global_step
        losses = model(**inputs, lambda_base=self.lambda_base(step))
        self._losses.append((step + 1, losses.loss.detach()))
        if not self.args.is_static:
            self._check_new_losses()
        total = num_items_in_batch.clamp(min=torch.finfo(torch.float32).tiny)
        self.meter.add(losses, inputs, total)
        # Gradients are averaged over the processes, but `total` is the sum over all of them.
        return losses.loss / total * self.accelerator.num_processes

    def _evaluate_batch(self, model: nn.Module, inputs: Batch) -> tuple[torch.Tensor, DraftLosses]:
        """Score an evaluation batch, and add its sums to the evaluation's meter."""
        state = self.accelerator.gradient_state
        # With several processes, the last batches repeat the first examples, which must not count twice.
        if state.end_of_dataloader and state.remainder > 0:
            size = len(inputs["loss_mask"])
            inputs["loss_mask"][max(state.remainder - self.args.process_index * size, 0) :] = 0
        inputs["anchors"] = sample_anchors(inputs, self.args.num_anchors, self.args.seed, EVALUATION_STREAM)
        self.drafter_training.label(inputs, evaluating=True)
        with self.accelerator.autocast():
            losses = model(**inputs)
        self._evaluation_meter.add(losses, inputs)
        return losses.corrected / inputs["loss_weight"].clamp(min=1e-6), losses

    def _check_new_losses(self) -> None:
        """Raise a `ValueError` if a new loss is not finite in some process; a GPU checks only when a line is logged."""
        seen = self._losses
        self._losses = []
        if seen:
            check_losses(seen, self.accelerator)

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate the drafter; the arguments are those of [`~transformers.Trainer.evaluate`].

        Args:
            eval_dataset (*optional*): Examples or records as for the trainer itself, or the name of one of its
                evaluation sets. Defaults to all of them.
        """
        if not isinstance(eval_dataset, str):
            eval_dataset = self._read(eval_dataset, "eval_dataset")
        return super().evaluate(eval_dataset, *args, **kwargs)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate with the same anchors every time, then simulate rounds over the first `walk_rows` examples."""
        meter = self._evaluation_meter = Meter(self.drafter.config, self.args.device)
        output = super().evaluation_loop(dataloader, *args, **kwargs)
        metrics = meter.means(self.accelerator, by_position=True)
        metrics["loss"] = metrics["corrected_loss"]
        if self.args.walk_rows:
            # All processes simulate the same examples.
            rows = first_examples(dataloader.dataset, self.args.walk_rows)
            batches = [self.data_collator([row]) for row in rows]
            metrics |= simulated_metrics(self.drafter, self.target.model, batches)
        prefix = kwargs.get("metric_key_prefix", "eval")
        output.metrics.update({f"{prefix}_{name}": value for name, value in metrics.items()})
        return output

    def lambda_base(self, step: int) -> float:
        """Return the weight of the base loss in a step, counted from 0; it is 0 if only the head is trained."""
        args = self.args
        if args.train_only == "head":
            return 0.0
        return lambda_base_at(step, self.state.max_steps, args.lambda_base_decay_ratio, args.lambda_base_start)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add the tokens and hours so far to training logs, and the drafter's metrics averaged since the last log."""
        self._check_new_losses()
        self._count_tokens()
        if "loss" in logs:
            # The hours before a resumed checkpoint count, too.
            before = next((entry["hours"] for entry in reversed(self.state.log_history) if "hours" in entry), 0.0)
            since = self._clock
            self._clock = time.monotonic()
            logs["hours"] = before + (self._clock - since) / 3600
            logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
            logs |= self.meter.means(self.accelerator)
            if self.drafter.has_correction_head:
                logs["lambda_base"] = self.lambda_base(self.state.global_step - 1)  # in the last step
            self.meter = Meter(self.drafter.config, self.args.device)
        super().log(logs, *args, **kwargs)

    def create_model_card(
        self, model_name: str | None = None, dataset: Any = None, dataset_tags: Any = None,
        finetuned_from: str | None = None, **metadata: Any,
    ) -> None:  # fmt: skip
        """Write the drafter's card to `output_dir`, and the record of the training that it is made from.

        Args:
            model_name (`str`, *optional*): Name of the drafter. Defaults to the name of `output_dir`. A run with
                `push_to_hub` uses the name on the Hub instead.
            dataset, dataset_tags (`str` or `list[str]`, *optional*): Data sets on the Hub on which it was trained.
            finetuned_from (`str`, *optional*): The target's name.
            metadata (*optional*): Fields for the card's metadata block, such as `license`.
        """
        if self.is_world_process_zero():
            name = self.hub_model_id or model_name
            write_card(self, name, finetuned_from, metadata | {"datasets": dataset_tags or dataset})

    def _count_tokens(self) -> None:
        """Add the tokens since the last call to the trainer's state, which waits for the device."""
        self.state.num_input_tokens_seen += int(self._new_tokens)
        self._new_tokens.zero_()

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Save the drafter or its adapter with everything beside it, or raise an error if a weight is not finite."""
        check_weights(self.drafter, self.state.global_step)
        self._count_tokens()
        if not self.args.should_save:
            return
        folder = Path(output_dir or str(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        if folder.name.startswith(PREFIX_CHECKPOINT_DIR):  # an earlier run's is not complete any more
            (folder / STATE_FILE).unlink(missing_ok=True)
        is_adapter = self.model is not self.drafter
        if is_adapter:
            save_adapter(self.model, folder)
        else:
            self.drafter.config.__dict__.pop("use_cache", None)  # Transformers sets it; a drafter has no such option
            self.drafter.save_pretrained(folder, state_dict=state_dict)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        torch.save(self.args, folder / TRAINING_ARGS_NAME)
        run_of(self).save(folder)
        finish_saving(folder, self.drafter.config, is_adapter)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()  # the state is written next, and it marks the checkpoint as complete


def _loaded(
    model: Any, target: Any, args: DominoTrainingArguments | None, tokenizer: Any
) -> tuple[Any, PreTrainedModel, DominoTrainingArguments, Any]:
    """Load what is given by its name, and make a new drafter and arguments if there are none."""
    is_new = target is None
    if is_new:
        model, target = None, model
        if drafter_of(target) is not None:
            remedy = "Pass it, or its folder or Hub name: DominoTrainer(drafter, target, ...)."
            raise invalid_argument("target", "given with a drafter", None, remedy)
    name = getattr(target, "name_or_path", target)
    if args is None:
        args = DominoTrainingArguments(f"{Path(str(name) or 'drafter').name}-Domino")
    if isinstance(target, (str, os.PathLike)):
        name = find_target(str(target), "target")
        if tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(name)
        target = load_target(name, args.device.type)
    if is_new:
        set_seed(args.seed)
        model = new_drafter(target, tokenizer, args)
    elif isinstance(model, (str, os.PathLike)):
        model = DominoDraftModel.from_pretrained(find_drafter(str(model), "model"), dtype=torch.float32)
    return model, target, args, tokenizer


def _name_of_optimizer(optimizers: Any = None, optimizer_cls_and_kwargs: Any = None, **_: Any) -> str | None:
    """Return the class of an optimizer that was passed to the trainer; None if its arguments name it."""
    if optimizers is not None and optimizers[0] is not None:
        return type(optimizers[0]).__name__
    if optimizer_cls_and_kwargs is not None:
        return getattr(optimizer_cls_and_kwargs[0], "__name__", str(optimizer_cls_and_kwargs[0]))
    return None


class _OwnSteps(TrainerCallback):
    """Lets a resumed run log, evaluate and save as often as it asks for itself, not as often as the earlier one."""

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Forget how often the checkpoint's run did so."""
        state.compute_steps(args, state.max_steps)


@contextmanager
def _quiet_about_steps() -> Iterator[None]:
    """Keep Transformers from warning that a resumed run logs or saves at other steps, which it may (`_OwnSteps`)."""
    logger = logging.getLogger("transformers.trainer_utils")

    def is_other(record: logging.LogRecord) -> bool:
        return "do not match the ones in the `trainer_state.json`" not in record.getMessage()

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)
