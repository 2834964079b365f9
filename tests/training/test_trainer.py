"""Training: it learns, resumes bit for bit, accumulates exactly, and leaves the target alone."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from datasets import Dataset
from method_table import METHODS

from hf_domino import DominoDraftModel
from hf_domino.training.arguments import DominoTrainingArguments
from hf_domino.training.trainer import DominoTrainer

pytestmark = pytest.mark.transformers

# One fp32 rounding per sum; Adam divides by gradients' own size, so differences do not shrink with them.
ACCUMULATION_TOL = {"rtol": 1e-4, "atol": 1e-6}


PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ tag }} {{ m.role == 'user' and 't10' or 't11' }} {{ m.content }} end {% endfor %}"
    "{% if add_generation_prompt %}t9 t11 {% endif %}"
)
NAMES = ("loss", "base_loss", "corrected_loss", "lambda_base")


def weights_of(trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.drafter.state_dict().items()}


def logged(trainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@pytest.mark.parametrize(
    "kind",
    METHODS.values(),
    ids=METHODS,
)
def test_overfitting_lowers_the_loss_and_raises_acceptance(kind, target, make_drafter, make_trainer, greedy_rows):
    drafter = make_drafter(target, **kind)
    trainer = make_trainer(
        drafter, greedy_rows, greedy_rows, max_steps=40, num_anchors=16, logging_steps=5, eval_strategy="steps",
        eval_steps=40, learning_rate=6e-3,
    )  # fmt: skip
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_loss"] < 0.6 * before["eval_loss"]
    assert after["eval_acceptance_length"] > before["eval_acceptance_length"] + 0.3
    assert after["eval_walked_acceptance_length"] > before["eval_walked_acceptance_length"] + 0.3
    assert logged(trainer, "acceptance_length")[-1] > logged(trainer, "acceptance_length")[0]
    assert len(logged(trainer, "lambda_base")) == 8 * drafter.has_correction_head
    if not drafter.has_correction_head:
        assert logged(trainer, "base_loss") == logged(trainer, "corrected_loss")


def test_logged_losses_are_averages_of_the_steps(target, make_drafter, make_trainer, greedy_rows):
    histories = []
    for steps in (1, 4):
        trainer = make_trainer(
            make_drafter(target), greedy_rows, max_steps=4, gradient_accumulation_steps=2, logging_steps=steps
        )
        trainer.train()
        histories.append({name: logged(trainer, name) for name in NAMES})
    each, mean = histories
    for name in NAMES[:3]:
        assert mean[name][0] == pytest.approx(sum(each[name]) / 4, rel=1e-4)
    assert each["lambda_base"] == [1.0, 0.75, 0.5, 0.25]
    for loss, base, corrected, share in zip(*each.values(), strict=True):
        assert loss == pytest.approx(share * base + (1 - share) * corrected, rel=1e-4)


@pytest.mark.parametrize(
    ("accumulation", "muon_learning_rate", "kind", "order"),
    [
        (2, 0.01, "domino", "random"),
        (1, None, "eagle3", "random"),
        (2, None, "dflash", "group_by_length"),
    ],
)
def test_a_resumed_training_equals_an_uninterrupted_one(
    accumulation, muon_learning_rate, kind, order, target, make_drafter, make_trainer, greedy_rows, tmp_path
):
    fields = {
        "max_steps": 7, "per_device_train_batch_size": 2, "gradient_accumulation_steps": accumulation,
        "save_strategy": "steps", "save_steps": 3, "logging_steps": 1, "muon_learning_rate": muon_learning_rate,
        "train_sampling_strategy": order,
    }  # fmt: skip
    whole = make_trainer(make_drafter(target, projector_type=kind), greedy_rows, **fields)
    whole.train()
    expected = weights_of(whole)
    # Another drafter on purpose: everything must come from the checkpoint.
    another = make_drafter(target, initializer_range=0.1, projector_type=kind)
    for weight in another.parameters():
        weight.data.mul_(1.5)
    for step in (3, 7):  # 7: killed before the drafter was saved beside it
        torch.manual_seed(123)
        resumed = make_trainer(another, greedy_rows, **fields, output_dir=str(tmp_path / "resumed"))
        resumed.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-{step}")
        assert resumed.state.global_step == 7
        assert all(torch.equal(tensor, expected[name]) for name, tensor in weights_of(resumed).items())
        assert logged(resumed, "loss") == logged(whole, "loss")


def test_accumulation_equals_a_large_batch(target, make_drafter, make_trainer, greedy_rows):
    results = []
    for batch_size, accumulation in ((8, 1), (2, 4)):
        trainer = make_trainer(
            make_drafter(target), greedy_rows, max_steps=4, per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulation, max_grad_norm=0.0, optim="sgd", learning_rate=0.05,
            logging_steps=1,
        )  # fmt: skip
        trainer.train()
        results.append((weights_of(trainer), logged(trainer, "loss")))
    torch.testing.assert_close(results[0][0], results[1][0], **ACCUMULATION_TOL)
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-4)


def test_evaluation_does_not_depend_on_batches_and_order(target, make_drafter, make_trainer, greedy_rows):
    drafter, results = make_drafter(target), []
    stream = Dataset.from_list(greedy_rows).to_iterable_dataset()
    for rows, batch_size, walked in ((greedy_rows, 8, 1), (greedy_rows[::-1], 3, 0), (stream, 3, 1)):
        fields = {"num_anchors": 2, "per_device_eval_batch_size": batch_size, "walk_rows": walked}
        metrics = make_trainer(drafter, greedy_rows, rows, **fields).evaluate()
        results.append([metrics["eval_loss"], metrics["eval_base_loss"], metrics["eval_acceptance_length"]])
        assert ("eval_walked_acceptance_length" in metrics) == walked
    assert results[1:] == [pytest.approx(results[0], rel=1e-5)] * 2


def test_the_target_is_neither_trained_nor_saved(target, make_drafter, make_trainer, greedy_rows, tmp_path):
    before = copy.deepcopy(target.state_dict())
    trainer = make_trainer(make_drafter(target), greedy_rows, save_strategy="steps", save_steps=6)
    trainer.train()
    torch.testing.assert_close(target.state_dict(), before, rtol=0, atol=0)
    saved = DominoDraftModel.from_pretrained(tmp_path / "run" / "checkpoint-6")
    torch.testing.assert_close(saved.state_dict(), trainer.drafter.state_dict(), rtol=0, atol=0)


def test_bf16_keeps_masters_and_losses_in_fp32(target, make_drafter, make_trainer, greedy_rows):
    drafter = make_drafter(target).to(torch.bfloat16)
    # More queries than one tile takes: its kernels are called below what autocast reaches.
    rows = [{"input_ids": torch.randint(4, 64, (200,)).tolist(), "loss_mask": [1] * 200}]
    trainer = make_trainer(drafter, rows, greedy_rows, bf16=True, max_steps=2, num_anchors=128)
    trainer.train()
    assert {parameter.dtype for parameter in drafter.parameters()} == {torch.float32}
    assert trainer.evaluate()["eval_loss"] > 0
    assert not torch.is_autocast_enabled("cpu")  # entered twice, one context would never be left


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_anchors", 0),
        ("loss_decay", 0.0),
        ("walk_rows", -1),
        ("distillation_weight", 1.5),
        ("position_weights", "cosine"),
    ],
)
def test_arguments_out_of_range(field, value, tmp_path):
    with pytest.raises(ValueError, match=f"{field} must be .*{value}"):
        DominoTrainingArguments(output_dir=str(tmp_path), **{field: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, "use_reentrant in gradient_checkpointing_kwargs"),
        ({"walk_rows": 0, "metric_for_best_model": "walked_length"}, "metric_for_best_model with walk_rows=0 must be"),
    ],
)
def test_arguments_that_do_not_go_together(fields, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        DominoTrainingArguments(output_dir=str(tmp_path), **fields)


def test_records_with_text_are_tokenized(target, make_drafter, word_tokenizer, tmp_path):
    tokenizer = copy.deepcopy(word_tokenizer)
    tokenizer.chat_template = PLAIN_TEMPLATE
    chat = [{"role": "user", "content": "t20"}, {"role": "assistant", "content": "t30 t31 t32 t33"}]
    rows = [{"messages": chat}, {"prompt": "t4", "completion": "t5 t6"}]
    evaluation = {"chat": rows[:1], "text": [{"text": "t4 t5 t6 t7"}]}
    args = DominoTrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, report_to="none", max_length=9)
    args.chat_template_kwargs = {"tag": "t9"}
    build = partial(DominoTrainer, make_drafter(target), target, args, eval_dataset=evaluation)
    trainer = build(train_dataset=rows, processing_class=tokenizer)
    assert list(trainer.train_dataset) == [
        {"input_ids": [9, 10, 20, 1, 9, 11, 30, 31, 32], "loss_mask": [0, 0, 0, 0, 0, 0, 1, 1, 1]},
        {"input_ids": [4, 5, 6, 1], "loss_mask": [0, 1, 1, 1]},
    ]
    assert {"eval_chat_loss", "eval_text_loss"} <= set(trainer.evaluate())
    with pytest.raises(ValueError, match=r"eval_dataset\['chat'\]\[0\]: needs a tokenizer, got none"):
        build()
