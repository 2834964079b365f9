"""Training of a draft vocabulary: losses and gradients against plain ones, what counts as a miss, and whole runs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from naive import naive_positions
from safetensors.torch import load_file
from test_losses import KINDS, TOLERANCE
from transformers import AutoTokenizer, Qwen3Config

from hf_domino import DominoConfig, DominoDraftModel
from hf_domino.data import RowDataset, load_rows
from hf_domino.data.frequencies import count_tokens, most_frequent
from hf_domino.formats.draft_vocabulary import d2t_of
from hf_domino.target.view import TargetModel
from hf_domino.training.arguments import DominoTrainingArguments
from hf_domino.training.evidence.acceptance import accept_lengths, walk_rounds
from hf_domino.training.evidence.meter import accepted_runs
from hf_domino.training.objective.own_prefixes import write_own_prefixes
from hf_domino.training.parts import add_head
from hf_domino.training.scale.plan import plan_training

IDS = [*range(4, 40, 2), *range(41, 64, 3)]
DPACE = {"position_weights": "dpace", "dpace_alpha": 0.5}
DISTILLED = {"distillation_weight": 0.25, "distillation_temperature": 0.7}


def make_batch():
    """Two rows with anchors; half of the labels are not drafted."""
    ids = torch.randint(4, 64, (2, 18), generator=torch.Generator().manual_seed(0))
    loss_mask = torch.ones_like(ids)
    loss_mask[:, :3], loss_mask[0, 16] = 0, 0
    batch = {"input_ids": ids, "loss_mask": loss_mask, "attention_mask": torch.ones_like(ids)}
    return batch | {"anchors": torch.tensor([[3, 9, 14], [5, 12, -1]])}


def naive_loss(drafter, target, batch, lambda_base, options):
    """Masked cross-entropy over the draft vocabulary, by position; also what it is to be divided by."""
    everything = list(naive_positions(drafter, target, batch, target.lm_head.weight[IDS]))
    found = [entry for entry in everything if entry[-1] in IDS]
    total = [0.0, 0.0]
    decay = math.inf if "position_weights" in options else 4.0
    weights = [math.exp(-(k - drafter.config.label_offset) / decay) for _, k, *_ in found]
    for term in (0, 1):
        entropies = [-entry[2 + term].log_softmax(-1)[IDS.index(entry[-1])] for entry in found]
        scale = list(weights)
        if "position_weights" in options:
            scale = []
            known = {(block, k): float((-e.detach()).exp()) for e, (block, k, *_) in zip(entropies, found, strict=True)}
            for block in dict.fromkeys(entry[0] for entry in found):
                # Of a label outside the drafter has no probability at all, and what comes behind it is not accepted.
                steps = [entry[1] for entry in everything if entry[0] == block]
                smooth = [0.5 * known.get((block, k), 0.0) + 0.5 for k in steps]
                accepted = [math.prod(smooth[: index + 1]) for index in range(len(steps))]
                scale += [sum(accepted[index:]) for index, k in enumerate(steps) if (block, k) in known]
        for entropy, entry, weight in zip(entropies, found, scale, strict=True):
            loss = entropy
            if options.keys() & DISTILLED.keys():
                taught, drafted = ((x / 0.7).log_softmax(-1) for x in (entry[4], entry[2 + term]))
                loss = 0.75 * entropy + 0.25 * 0.49 * F.kl_div(drafted, taught, log_target=True, reduction="sum")
            total[term] = total[term] + weight * loss
    return (1 - lambda_base) * total[1] + lambda_base * total[0], sum(weights)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, DPACE, DISTILLED], ids=["published", "dpace", "distilled"])
def test_losses_and_gradients_are_those_of_a_masked_cross_entropy(
    kind, options, target, make_drafter, make_trainer, greedy_rows
):
    drafter, batch = make_drafter(target, **kind).restricted(IDS), make_batch()
    expected, weight = naive_loss(drafter, target, batch, 0.3, options)
    wanted = torch.autograd.grad(expected, list(drafter.parameters()), allow_unused=True)
    for logits_per_chunk in (2**26, 3 * len(IDS)):  # one chunk, and many
        overrides = options | {"loss_decay": 4.0, "max_logits_per_chunk": logits_per_chunk}
        objective = make_trainer(drafter, greedy_rows, **overrides).objective
        scored = objective.score(batch, 0.3)
        torch.testing.assert_close(scored.losses.loss, expected, **TOLERANCE)
        torch.testing.assert_close(scored.loss_weight.item(), weight, **TOLERANCE)
        torch.testing.assert_close(objective.label(dict(batch)), scored.loss_weight)
        found = torch.autograd.grad(scored.losses.loss, list(drafter.parameters()), allow_unused=True)
        torch.testing.assert_close(found, wanted, **TOLERANCE)


def test_labels_that_are_not_drafted_are_misses(target, make_drafter, make_trainer, greedy_rows):
    drafter = make_drafter(target, projector_type="dflash").restricted(IDS)
    trainer = make_trainer(drafter, greedy_rows, greedy_rows)
    batch = make_batch()
    with torch.no_grad():
        scored = trainer.objective.score(batch)
        hits = {
            (block, k): IDS[int(base.argmax())] == label
            for block, k, base, _, _, label in naive_positions(drafter, target, batch, target.lm_head.weight[IDS])
        }
    outside = (scored.weights > 0) & ~scored.has_loss
    assert outside.any()
    assert not (scored.is_correct & outside).any()
    assert int((scored.weights > 0).sum()) == len(hits)
    assert int(scored.is_correct.sum()) == sum(hits.values())
    metrics = trainer.evaluate()
    assert math.isfinite(metrics["eval_loss"])
    assert metrics["eval_acceptance_length"] >= 1


@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_walked_rounds_are_those_of_generation(target, make_drafter, penalty):
    """With a drafter that is always right about the tokens that it drafts: the target itself, as far as it can be."""
    target.generation_config.repetition_penalty = penalty
    drafter, prompt = make_drafter(target).restricted(IDS), torch.arange(5, 13)[None]
    options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 2}
    text = target.generate(prompt, **options)[0].tolist()
    target.generate(prompt, assistant_model=drafter, **options)
    (walked,) = walk_rounds(drafter, target, [text], [8]).corrected
    assert walked == drafter.stats.rows[0][: len(walked)]
    assert len(walked) > 20
    lengths = accept_lengths(drafter, TargetModel(target, drafter.config), {"input_ids": torch.tensor([text])}, 8)
    for anchor, length in enumerate(lengths[1].tolist(), start=8):
        assert set(text[anchor + 1 : anchor + length]) <= set(IDS)


def test_own_prefixes_are_ids_of_the_target(target, make_drafter):
    drafter = make_drafter(target, draft_pool_size=None).restricted(IDS)
    hidden, tokens = torch.randn(2, 3, 6, 32), torch.randint(4, 64, (2, 3, 6))
    chosen = torch.tensor([[True, False, True], [False, False, True]])
    own = write_own_prefixes(drafter, TargetModel(target, drafter.config), hidden, tokens, chosen, 2 * 6 * len(IDS))
    assert torch.equal(own[~chosen], tokens[~chosen])
    assert set(own[chosen][:, 1:].flatten().tolist()) <= set(IDS)


@pytest.mark.parametrize("options", [{}, {"train_only": "head"}, DPACE, DISTILLED, {"own_prefix_share": 0.5}])
def test_training_learns(target, make_drafter, make_trainer, greedy_rows, options):
    said = RowDataset(greedy_rows)
    drafter = make_drafter(target).restricted(most_frequent(count_tokens(said, 64), 24))
    trainer = make_trainer(drafter, greedy_rows, greedy_rows, max_steps=25, **options)
    trainer.train()
    losses = [entry["corrected_loss"] for entry in trainer.state.log_history if "corrected_loss" in entry]
    assert losses[-1] < losses[0]
    assert drafter.d2t.dtype == torch.int64
    rows = [row["input_ids"] for row in greedy_rows]
    assert all(length >= 1 for walked in walk_rounds(drafter, target, rows, [8] * 8).corrected for length in walked)


def test_lora_over_a_restricted_drafter(target, make_drafter, make_trainer, greedy_rows, tmp_path):
    pytest.importorskip("peft")
    make_drafter(target).restricted(IDS).save_pretrained(tmp_path / "base")
    base = DominoDraftModel.from_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match="must be one loaded from a folder or the Hub, got 'a new one'"):
        make_trainer(base.restricted(IDS[:9]), greedy_rows, lora_rank=2)  # its adapter would name the other
    trainer = make_trainer(base, greedy_rows, lora_rank=2, max_steps=3, output_dir=str(tmp_path / "adapter"))
    trainer.train()
    trainer.save_model()
    again = DominoDraftModel.from_pretrained(tmp_path / "adapter")
    assert again.vocabulary.token_ids.tolist() == IDS
    assert not torch.equal(
        again.embed_proj[2].weight, load_file(tmp_path / "base/model.safetensors")["embed_proj.2.weight"]
    )


def test_a_head_for_a_restricted_dflash_drafter(target, make_drafter, make_trainer, greedy_rows):
    dflash = make_drafter(target, projector_type="dflash").restricted(IDS)
    drafter = add_head(dflash, {"projector_type": "domino", "emb_dim": 8, "gru_hidden_dim": 8})
    assert drafter.vocabulary.token_ids.tolist() == IDS
    assert drafter.embed_proj[2].weight.shape == (len(IDS), 8)
    make_trainer(drafter, greedy_rows, train_only="head", max_steps=3).train()
    assert drafter.embed_proj[2].weight.any()


def test_tokens_are_counted_where_they_carry_loss():
    rows = [
        {"input_ids": [9, 9, 9, 5, 6, 7], "loss_mask": [0, 0, 0, 1, 1, 1]},
        {"input_ids": [9, 7, 6, 7], "loss_mask": [0, 1, 1, 1]},
    ]
    counts = count_tokens(RowDataset(rows), 12)
    assert counts.tolist() == [0, 0, 0, 0, 0, 1, 2, 3, 0, 0, 0, 0]
    assert most_frequent(counts, 2) == [6, 7]
    assert most_frequent(counts, 5) == [0, 1, 5, 6, 7]  # of equally rare ones the first


def test_the_command_counts_once_and_a_resumed_run_takes_what_is_stored(recipe, train, tmp_path, caplog):
    recipe["draft_vocab_size"] = 12
    assert train(recipe, "--max_steps", "2") == 0
    assert "the draft vocabulary: 12 of 64 tokens, 100.00% of what the training text says" in caplog.text
    stored = DominoDraftModel.from_pretrained(tmp_path / "run").d2t
    rows = load_rows(recipe["train_file"], AutoTokenizer.from_pretrained(recipe["target"]))
    assert torch.equal(stored, d2t_of(most_frequent(count_tokens(rows, 64), 12), 64))
    lines = [json.dumps({"prompt": "t4 t5 t6", "completion": "many other letters: zyxwvu"})] * 8
    Path(recipe["train_file"]).write_text("\n".join(lines) + "\n")
    caplog.clear()
    assert train(recipe) == 0
    assert "the draft vocabulary" not in caplog.text
    again = DominoDraftModel.from_pretrained(tmp_path / "run")
    assert torch.equal(again.d2t, stored)
    assert "| draft_vocab_size | 12 |" in (tmp_path / "run" / "README.md").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"draft_vocab_size": 65}, "draft_vocab_size must be in [1, 64] (vocab_size=64), got 65"),
        ({"draft_vocab_size": 8, "drafter": "saved"}, "draft_vocab_size must not be set with drafter="),
    ],
)
def test_what_the_command_refuses(recipe, train, saved_pair, capsys, change, message):
    if "drafter" in change:
        for field in ("num_hidden_layers", "block_size", "shift_label"):
            recipe.pop(field)
        change = change | {"drafter": str(saved_pair[1])}
    assert train(recipe | change) == 2
    assert message in capsys.readouterr().err


def test_a_run_of_another_size_does_not_go_on(recipe, train, capsys):
    assert train(recipe | {"draft_vocab_size": 12}, "--max_steps", "2") == 0
    assert train(recipe | {"draft_vocab_size": 13}) == 2
    assert "draft_vocab_size must be 12, with which" in capsys.readouterr().err


def test_a_plan_counts_what_is_smaller(tmp_path):
    target_config = Qwen3Config(hidden_size=64, num_hidden_layers=4, vocab_size=1000)
    args = DominoTrainingArguments(str(tmp_path), use_cpu=True, report_to="none", distillation_weight=0.5)
    whole, small = (
        plan_training(target_config, DominoConfig.for_target(target_config, draft_vocab_size=size, emb_dim=16), args)
        for size in (None, 100)
    )
    assert whole.memory["drafter (fp32)"] - small.memory["drafter (fp32)"] == 4 * 16 * 900
    assert small.memory["logits of a chunk"] * 10 == whole.memory["logits of a chunk"]
    assert small.flops_per_step["lm_head"] * 10 == whole.flops_per_step["lm_head"]
    assert small.memory["lm_head of the draft vocabulary"] == 4 * 64 * 100
    assert "lm_head of the draft vocabulary" not in whole.memory
    assert small.checkpoint_bytes < whole.checkpoint_bytes


def test_runs_of_hits_end_at_what_is_not_drafted():
    hits, drafted = torch.tensor([[True, True, True, True]]), torch.tensor([[True, True, False, True]])
    assert accepted_runs(hits & drafted, 0).tolist() == [2]


def test_the_first_tokens_are_taken_with_a_word(target, make_drafter, make_trainer, greedy_rows, caplog):
    drafter = make_drafter(target, draft_vocab_size=20)
    make_trainer(drafter, greedy_rows)
    assert "The drafter proposes the first 20 tokens" in caplog.text
    caplog.clear()
    make_trainer(make_drafter(target).restricted(IDS), greedy_rows)
    assert "proposes the first" not in caplog.text
