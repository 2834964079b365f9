"""Training of the bundled target: the optimizer, packed rows, and the penalty of repetition."""

import copy

import numpy as np
import pytest
import torch

from hf_domino.recipes.pretrain import PackedRows, TargetRecipe
from hf_domino.recipes.unloop import RealAndOwn, UnloopRecipe, repeats, repetition_penalty
from hf_domino.training.muon import MuonWithAdamW


def test_packed_rows_are_the_stream_short_rows_first():
    recipe = TargetRecipe(steps=4, micro_batches_per_step=2, micro_batch_tokens=8, short_length=2, max_length=4)
    stream = np.arange(64, dtype=np.uint16)
    rows = PackedRows(stream, recipe)
    assert [rows[index].shape[1] for index in range(len(rows))] == [2] * 6 + [4] * 2
    assert torch.cat([rows[index].flatten() for index in range(len(rows))]).tolist() == list(range(64))
    with pytest.raises(ValueError, match="at least 64 tokens for steps=4, got 63"):
        PackedRows(stream[:63], recipe)


def test_the_optimizer_divides_parameters_and_follows_a_schedule(tiny_qwen3):
    optimizer = MuonWithAdamW(tiny_qwen3, muon_lr=0.01, adamw_lr=0.001, weight_decay=0.0)
    names = {parameter: name for name, parameter in tiny_qwen3.named_parameters()}
    muon, adamw = ([names[parameter] for parameter in group["params"]] for group in optimizer.param_groups)
    assert all("proj" in name for name in muon)
    assert "model.embed_tokens.weight" in adamw
    optimizer.param_groups[0]["lr"] = 0.5
    assert optimizer.optimizers[0].param_groups[0]["lr"] == 0.5


def test_the_optimizer_resumes_where_it_was():
    def steps(model, optimizer, count):
        for _ in range(count):
            model(torch.ones(1, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = MuonWithAdamW(model, 0.01, 0.01, 0.0)
    steps(model, optimizer, 2)
    other = torch.nn.Linear(4, 4)
    other.load_state_dict(model.state_dict())
    restored = MuonWithAdamW(other, 0.3, 0.3, 0.0)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    steps(model, optimizer, 2)
    steps(other, restored, 2)
    assert torch.equal(model.weight, other.weight)
    assert torch.equal(model.bias, other.bias)


def test_repeats_marks_what_stands_earlier():
    tokens = np.array([7, 1, 2, 3, 9, 1, 2, 3, 4, 1, 2])
    assert np.flatnonzero(repeats(tokens, 3)).tolist() == [7]
    assert np.flatnonzero(repeats(tokens, 2)).tolist() == [6, 7, 10]


def test_the_penalty_is_the_log_of_the_rest():
    logits, tokens = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 6))
    marked = torch.rand(2, 6) < 0.5
    probs = logits.softmax(-1)
    wanted = [-torch.log(1 - probs[b, t - 1, tokens[b, t]]) for b in range(2) for t in range(1, 6) if marked[b, t]]
    torch.testing.assert_close(repetition_penalty(logits, tokens, marked), torch.stack(wanted).mean())


def test_the_penalty_has_a_gradient_where_the_model_is_certain():
    logits = torch.full((1, 1, 5), -40.0)
    logits[0, 0, 3] = 40.0
    logits.requires_grad_()
    repetition_penalty(logits, torch.tensor([[0, 3]]), torch.tensor([[False, True]])).backward()
    assert logits.grad[0, 0, 3].item() == pytest.approx(1.0)


def test_prompts_are_never_marked():
    recipe = UnloopRecipe(length=12, prompt_length=6, ngram=2)
    own = np.tile(np.array([1, 2, 3]), (3, 4))
    data = RealAndOwn(np.arange(100, dtype=np.uint16), own, recipe, steps=1, seed=0)
    assert data[1]["marked"].tolist() == [False] * 6 + [True] * 6
    assert data[1]["real"].shape == (12,)
