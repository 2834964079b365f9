"""What an evaluation says: by draft position, without the head, what a round is worth, and which checkpoint is best."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset

from hf_domino import DominoConfig, DominoDraftModel
from hf_domino.training.arguments import DominoTrainingArguments
from hf_domino.training.evidence.acceptance import simulate_acceptance, simulate_rounds
from hf_domino.training.evidence.meter import Meter
from hf_domino.training.losses.eager import DraftLosses
from hf_domino.training.objective.anchors import collate_rows
from hf_domino.training.trainer import DominoTrainer

pytestmark = pytest.mark.transformers


class OneProcess:
    """Sums over processes where there is one."""

    def reduce(self, tensor, reduction):
        return tensor


def scored(base, corrected, weights):
    """A batch of given hits, whose losses do not matter."""
    zero = torch.zeros(())
    return DraftLosses(zero, zero, zero, corrected.flatten(0, 1), base.flatten(0, 1)), {
        "weights": weights,
        "loss_weight": zero,
    }


@pytest.mark.parametrize("shift_label", [True, False])
def test_acceptance_by_position_equals_plain_loops(shift_label):
    config = DominoConfig(block_size=5, shift_label=shift_label)
    generator = torch.Generator().manual_seed(0)
    hits = torch.rand(2, 12, 7, 5, generator=generator) < torch.tensor([0.5, 0.8])[:, None, None, None]
    weights = (torch.rand(12, 7, 5, generator=generator) < 0.95).float()
    meter = Meter(config, torch.device("cpu"))
    for rows in (slice(0, 5), slice(5, 12)):
        meter.add(*scored(hits[0, rows], hits[1, rows], weights[rows]))
    means, first = meter.means(OneProcess(), by_position=True), config.label_offset

    for prefix, of_kind in zip(("base_", ""), hits.flatten(1, 2)[..., first:].tolist(), strict=True):
        is_counted = (weights.flatten(0, 1)[:, first:] > 0).all(-1).tolist()
        blocks = [block for block, counts in zip(of_kind, is_counted, strict=True) if counts]
        for place in range(config.num_draft_tokens):
            reached = [block[place] for block in blocks if all(block[:place])]
            assert means[f"{prefix}accept_at_{place + 1}"] == pytest.approx(sum(reached) / len(reached))
    assert means["acceptance_length"] > means["base_acceptance_length"] > 1


def test_walking_without_the_head_equals_walking_a_drafter_without_one(target, make_drafter, greedy_rows):
    drafter = make_drafter(target)
    texts = [row["input_ids"] for row in greedy_rows]
    base, _ = simulate_rounds(drafter, target, [(text, 4, None) for text in texts])
    assert base == simulate_acceptance(drafter.view(projector_type="dflash"), target, texts, [4] * len(texts))


@pytest.mark.parametrize("kind", ["domino", "dflash"])
def test_evaluation_logs_everything_under_flat_names(kind, target, make_drafter, make_trainer, greedy_rows):
    drafter = make_drafter(target, projector_type=kind)
    trainer = make_trainer(drafter, greedy_rows, greedy_rows, max_steps=2, learning_rate=0.0)
    trainer.train()
    metrics = trainer.evaluate()
    base = {f"eval_base_{name}" for name in ("accept_at_1", "acceptance_length", "walked_acceptance_length")}
    assert base & set(metrics) == (base if kind == "domino" else set())
    assert all(isinstance(value, (int, float)) for value in metrics.values())
    assert trainer.state.log_history[-1]["eval_accept_at_1"] == metrics["eval_accept_at_1"]


def test_the_best_checkpoint_is_the_one_that_walks_furthest(target, make_drafter, make_trainer, greedy_rows, tmp_path):
    trainer = make_trainer(
        make_drafter(target), greedy_rows, greedy_rows, max_steps=12, save_strategy="steps", save_steps=3,
        eval_strategy="steps", eval_steps=3, load_best_model_at_end=True, learning_rate=0.03, warmup_steps=0,
        metric_for_best_model="walked_acceptance_length",
    )  # fmt: skip
    trainer.train()
    name = "eval_walked_acceptance_length"
    walked = {entry["step"]: entry[name] for entry in trainer.state.log_history if name in entry}
    best = max(walked, key=walked.get)
    assert len(set(walked.values())) > 1
    saved = DominoDraftModel.from_pretrained(tmp_path / f"run/checkpoint-{best}").state_dict()
    torch.testing.assert_close(trainer.drafter.state_dict(), saved, rtol=0, atol=0)


def test_evaluation_is_by_the_published_loss_whatever_is_trained(target, make_drafter, make_trainer, greedy_rows):
    objectives = ({}, {"position_weights": "dpace"}, {"distillation_weight": 1.0})
    losses = [
        make_trainer(make_drafter(target), greedy_rows, greedy_rows, walk_rows=0, **fields).evaluate()["eval_loss"]
        for fields in objectives
    ]
    assert losses == [losses[0]] * 3


def tensors_with_a_collator_of_ones_own(rows):
    """Rows in torch format and a collator that knows nothing of this package."""

    def collate(some):
        columns = {name: [row[name] for row in some] for name in ("input_ids", "loss_mask")}
        columns["attention_mask"] = [torch.ones_like(ids) for ids in columns["input_ids"]]
        return {name: torch.nn.utils.rnn.pad_sequence(values, batch_first=True) for name, values in columns.items()}

    return Dataset.from_list(rows).with_format("torch"), collate


def tokens_of_ones_own(rows):
    """Rows whose columns have other names, which only the collator can read."""

    def collate(some):
        return collate_rows([{"input_ids": row["tokens"], "loss_mask": row["learned"]} for row in some])

    return [{"tokens": row["input_ids"], "learned": row["loss_mask"]} for row in rows], collate


@pytest.mark.parametrize(
    "prepare",
    [
        lambda rows: (Dataset.from_list(rows).with_format("torch"), None),
        lambda rows: (Dataset.from_list(rows).with_format("numpy"), None),
        lambda rows: ([*rows, {"input_ids": [4, 5, 6], "loss_mask": [0, 0, 0]}], None),
        tensors_with_a_collator_of_ones_own,
        tokens_of_ones_own,
    ],
    ids=["torch format", "numpy format", "a row without a supervised token", "torch and a collator", "own columns"],
)
def test_the_first_evaluation_takes_what_training_takes(prepare, target, make_drafter, greedy_rows, tmp_path):
    args = DominoTrainingArguments(str(tmp_path), use_cpu=True, report_to="none", num_anchors=6)
    expected = DominoTrainer(make_drafter(target), target, args, eval_dataset=greedy_rows).evaluate()
    rows, collator = prepare(greedy_rows)
    trainer = DominoTrainer(make_drafter(target), target, args, collator, train_dataset=rows, eval_dataset=rows)
    metrics = trainer.evaluate()
    for name in ("eval_loss", "eval_acceptance_length", "eval_walked_acceptance_length"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-5)


def test_examples_of_ones_own_without_a_supervised_token(target, make_drafter, greedy_rows, tmp_path):
    args = DominoTrainingArguments(str(tmp_path), use_cpu=True, report_to="none", num_anchors=6)
    rows = [{"input_ids": [4, 5, 6], "loss_mask": [0, 0, 0]}, *greedy_rows]
    walked = [
        DominoTrainer(make_drafter(target), target, args, collate_rows, eval_dataset=some).evaluate()
        for some in (rows, greedy_rows, rows[:1])
    ]
    assert walked[0]["eval_walked_acceptance_length"] == walked[1]["eval_walked_acceptance_length"] > 1
    assert "eval_walked_acceptance_length" not in walked[2]


@pytest.mark.parametrize("name", ["compute_metrics", "preprocess_logits_for_metrics", "compute_loss_func"])
def test_functions_that_would_never_be_called_are_refused(name, target, make_drafter, greedy_rows, tmp_path):
    args = DominoTrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    with pytest.raises(ValueError, match=f"{name} must be left out, got .* It would never be called"):
        DominoTrainer(make_drafter(target), target, args, train_dataset=greedy_rows, **{name: print})
