"""Medusa alone: fixed caches, what it is trained on, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from calls_of_kinds import PROMPTS, SAMPLED, generate, noise_of
from formulas import build, formula_of, steps_of
from oracle import faults

from hf_domino import DominoConfig, DominoDraftModel
from hf_domino.target.view import TargetModel
from hf_domino.training.arguments import DominoTrainingArguments
from hf_domino.training.objective.objective import Objective

TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}  # fp64 sums in another order


@pytest.fixture
def drafter(wide):
    return build(wide, "medusa")


@pytest.mark.parametrize("do_sample", [False, True])
def test_fixed_caches_draft_by_the_formula(wide, drafter, rounds, do_sample):
    ids, options = PROMPTS[0][None], SAMPLED if do_sample else {}
    plain = generate(wide, None, ids, **options)
    with faults(plain.tolist(), wide.config.vocab_size):
        assert torch.equal(generate(wide, drafter, ids, cache_implementation="static", **options), plain)
    assert {length for row in drafter.stats.rows for length in row} == {1, 2, 3, 4, 5}
    formula, noise = formula_of(drafter, wide), noise_of(1, wide.config.vocab_size) if do_sample else None
    for row, text, proposals, _ in rounds:
        assert proposals == formula.chain(text, steps_of(noise, row, text), len(proposals))


def test_a_new_drafter_proposes_what_stands_in_the_anchors_place(wide):
    drafter = DominoDraftModel(DominoConfig.for_target(wide.config, projector_type="medusa"))
    assert drafter.config.target_layer_ids == [3]
    assert (drafter.config.num_draft_tokens, drafter.has_correction_head) == (5, False)
    assert sum(weight.abs().sum() for weight in drafter.parameters()) == 0


def test_blocks_side_by_side_read_the_state_before_their_anchor(wide, drafter):
    ids = torch.randint(4, 64, (2, 20))
    anchors = torch.tensor([[3, 12, 17], [0, 19, -1]])
    states = torch.randn(2, 20, 32, dtype=torch.float64)
    view = TargetModel(wide, drafter.config)
    found = drafter.kind.draft_blocks(view, ids, drafter.fuse_context([states]), anchors)
    for row, index in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1)):
        anchor = int(anchors[row, index])
        x = torch.zeros(32).double() if anchor == 0 else states[row, anchor - 1]
        for k, head in enumerate(drafter.heads):
            gate = head.weight @ x
            torch.testing.assert_close(found[row, index, k], x + gate * torch.sigmoid(gate), **TOLERANCE)
    assert not drafter.kind.draft_blocks(view, ids, None, anchors).any()


def test_a_view_has_as_many_heads_or_fewer(wide, drafter):
    ids = PROMPTS[0][None]
    assert torch.equal(generate(wide, drafter.view(block_size=2), ids), generate(wide, None, ids))
    with pytest.raises(ValueError, match=r"block_size of a view must be of the drafter's own weights, got \{'block_s"):
        drafter.view(block_size=5)


def test_weights_of_the_loss_fall_by_a_fifth_with_each_head(wide, drafter, tmp_path):
    view, arguments = TargetModel(wide, drafter.config), DominoTrainingArguments(str(tmp_path), report_to="none")
    batch = {"input_ids": torch.arange(12)[None], "loss_mask": torch.ones(1, 12), "anchors": torch.tensor([[2]])}
    Objective(drafter, view, arguments, None).label(batch)
    torch.testing.assert_close(batch["weights"][0, 0], 0.8 ** torch.arange(4.0))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"shift_label": False}, "shift_label of a Medusa drafter must be True, got False"),
        ({"num_hidden_layers": 2}, "num_hidden_layers of a Medusa drafter must be 1, got 2"),
        ({"pure_draft_prefix_len": 1}, "pure_draft_prefix_len of a Medusa drafter must be 0, got 1"),
        ({"gru_hidden_dim": 8, "emb_dim": 8}, "gru_hidden_dim, emb_dim of a Medusa drafter must be left out"),
        (
            {"target_layer_ids": [2]},
            r"target_layer_ids must be unique and in \[3, 3\].*Medusa reads what lm_head reads",
        ),
        ({"projector_type": "dflash", "target_layer_ids": [4]}, r"in \[0, 3\].*after the final norm"),
        ({"num_target_layers": None, "target_layer_ids": [3]}, "target_layer_ids must be .*num_target_layers=None"),
    ],
)
def test_fields_that_say_nothing_of_it_are_refused(wide, fields, message):
    with pytest.raises(ValueError, match=message):
        DominoConfig.for_target(wide.config, **({"projector_type": "medusa"} | fields))
