"""Training of the bundled target: the optimizer, packed rows, and the penalty of repetition."""

import copy

import numpy as np
import pytest
import torch

from hf_domino.training.muon import MuonWithAdamW
from recipes.posttrain import OwnAndReal, PosttrainRecipe, best_rows, loop_onset, unlikelihood
from recipes.pretrain import PackedRows, Stage, TargetRecipe, grow


def test_packed_rows_are_the_stream_stage_after_stage_short_rows_first():
    first, second = Stage(1, 1, 4, 0.1, 0.1, 0.5), Stage(2, 4, 2, 0.1, 0.1, 0.5)
    recipe = TargetRecipe(stages=(first, second), micro_batch_tokens=8, short_length=2, max_length=4)
    stream = np.arange(96, dtype=np.uint16)
    rows = PackedRows(stream, recipe, stage=1)
    assert [rows[index].shape[1] for index in range(len(rows))] == [2] * 6 + [4] * 2
    assert torch.cat([rows[index].flatten() for index in range(len(rows))]).tolist() == list(range(32, 96))
    assert PackedRows(stream, recipe, stage=0)[0].flatten().tolist() == list(range(8))
    with pytest.raises(ValueError, match="at least 96 tokens for stage 1, got 95"):
        PackedRows(stream[:95], recipe, stage=1)


@pytest.mark.parametrize("depth", [4, 5, 7, 8])
def test_a_grown_model_computes_the_same(tiny_qwen3, depth):
    tokens = torch.randint(0, tiny_qwen3.config.vocab_size, (2, 9))
    deeper = grow(tiny_qwen3, depth)
    assert len(deeper.model.layers) == depth
    torch.testing.assert_close(deeper(tokens).logits, tiny_qwen3(tokens).logits, rtol=0, atol=0)
    with pytest.raises(ValueError, match="num_hidden_layers must be from 4 to 8, got 9"):
        grow(tiny_qwen3, 9)


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


def test_the_onset_of_a_loop_is_marked():
    tokens = np.array([7, 1, 2, 3, 9, 1, 2, 3, 4, 1, 2])
    assert np.flatnonzero(loop_onset(tokens, n=3, most=9)).tolist() == [7]
    assert np.flatnonzero(loop_onset(tokens, n=2, most=9)).tolist() == [6, 7, 10]
    assert np.flatnonzero(loop_onset(tokens, n=2, most=2)).tolist() == [6, 7]


def test_unlikelihood_is_the_log_of_the_rest():
    logits, tokens = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 6))
    marked = torch.rand(2, 6) < 0.5
    probs = logits.softmax(-1)
    wanted = [-torch.log(1 - probs[b, t - 1, tokens[b, t]]) for b in range(2) for t in range(1, 6) if marked[b, t]]
    torch.testing.assert_close(unlikelihood(logits, tokens, marked), torch.stack(wanted).mean())


def test_unlikelihood_has_a_gradient_where_the_model_is_certain():
    logits = torch.full((1, 1, 5), -40.0)
    logits[0, 0, 3] = 40.0
    logits.requires_grad_()
    unlikelihood(logits, torch.tensor([[0, 3]]), torch.tensor([[False, True]])).backward()
    assert logits.grad[0, 0, 3].item() == pytest.approx(1.0)


def test_the_best_rows_are_likely_and_do_not_loop():
    recipe = PosttrainRecipe(prompt_length=2, new_tokens=8, min_distinct=0.9)
    rows = np.arange(50).reshape(5, 10)
    rows[1, 2:] = 3  # loops, and is the likeliest
    best = best_rows(rows, np.array([-3.0, -0.1, -1.0, -2.0, -4.0]), recipe, share=0.5)
    assert best.tolist() == rows[[2, 3]].tolist()
    with pytest.raises(ValueError, match="all 1 continuations repeat themselves"):
        best_rows(rows[1:2], np.zeros(1), recipe, share=0.5)


def test_prompts_are_never_marked():
    recipe = PosttrainRecipe(prompt_length=6, new_tokens=6, loop_ngram=2)
    own = np.tile(np.array([1, 2, 3]), (3, 4))
    data = OwnAndReal(np.arange(100, dtype=np.uint16), own, own, recipe, steps=1, seed=0)
    assert data[1]["onset"].tolist() == [False] * 6 + [True] * 6
    assert data[1]["real"].shape == (12,)
