"""Packed rows: the losses of the same rows alone, and targets that cannot keep them apart are refused."""

from __future__ import annotations

import pytest
import torch
from accelerate import cpu_offload
from builders import build_drafter
from torch.nn.utils.rnn import pad_sequence
from transformers import MambaConfig, MambaForCausalLM

from hf_domino import DominoConfig
from hf_domino.data.packing import PackedRows, collate_rows
from hf_domino.data.rows import RowDataset
from hf_domino.kinds import side_by_side
from hf_domino.kinds.side_by_side import UNUSED
from hf_domino.target.view import TargetModel
from hf_domino.training.objective.anchors import sample_anchors
from hf_domino.training.scale.packing_probe import check_no_leaks

LENGTHS = (18, 30, 9, 25, 14, 22, 7, 11)
MAX_LENGTH = 48
SUM_TOL = {"rtol": 1e-4, "atol": 3e-5}  # fp32 sums in another order
WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}


@pytest.fixture
def rows():
    """Rows whose supervised tokens begin at once, so that rows that lie side by side could leak both ways."""
    generator = torch.Generator().manual_seed(2)
    ids = [torch.randint(4, 64, (length,), generator=generator).tolist() for length in LENGTHS]
    return RowDataset([{"input_ids": row, "loss_mask": [1] * len(row)} for row in ids])


def shifted(anchors, packed, rows):
    """Anchors of single rows `[R, N]`, where the rows lie in the packed ones."""
    found = []
    for one in packed.bins:
        starts = torch.tensor([0] + [len(rows[index]["input_ids"]) for index in one]).cumsum(0)
        moved = [anchors[index][anchors[index] != UNUSED] + start for index, start in zip(one, starts, strict=False)]
        found.append(torch.cat(moved))
    return pad_sequence(found, batch_first=True, padding_value=UNUSED)


@pytest.mark.parametrize("limit", [0, side_by_side.MAX_DENSE_SCORES])
@pytest.mark.parametrize("kind", [{"shift_label": False}, WINDOWED | {"conv_kernel_size": 3}])
def test_losses_and_gradients_of_the_same_rows_alone(kind, limit, target, make_trainer, rows, monkeypatch):
    monkeypatch.setattr(side_by_side, "MAX_DENSE_SCORES", limit)
    packed, results = PackedRows(rows, MAX_LENGTH), []
    anchors = sample_anchors(collate_rows(rows.rows), 6, 1)
    drafter = build_drafter(target, **kind).train()
    score = make_trainer(drafter, rows).objective.score
    for batch, places in (
        (collate_rows(rows.rows), anchors),
        (collate_rows([packed[index] for index in range(len(packed))]), shifted(anchors, packed, rows)),
    ):
        drafter.zero_grad()
        batch["anchors"] = places
        losses = score(batch, lambda_base=0.4)
        losses.loss.backward()
        sums = losses.base, losses.corrected, batch["weights"].sum(), losses.is_correct.sum()
        results.append([*sums, *(parameter.grad.clone() for parameter in drafter.parameters())])
    torch.testing.assert_close(*results, **SUM_TOL)


def test_no_anchor_is_drawn_whose_successor_is_of_another_row(rows):
    packed = PackedRows(rows, MAX_LENGTH)
    batch = collate_rows([packed[index] for index in range(len(packed))])
    anchors = sample_anchors(batch, 1000, 0)
    assert sum(int((row != UNUSED).sum()) for row in anchors) == sum(length - 1 for length in LENGTHS)
    for row, ends in zip(anchors, packed.bins, strict=True):
        lasts = torch.tensor([len(rows[index]["input_ids"]) for index in ends]).cumsum(0) - 1
        assert not torch.isin(row, lasts).any()


def probe(target, rows):
    config = DominoConfig(target_layer_ids=[1, 2], hidden_size=32, vocab_size=64, mask_token_id=3)
    check_no_leaks(TargetModel(target, config), PackedRows(rows, MAX_LENGTH))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_targets_that_keep_rows_apart_and_that_do_not(dtype, target, rows):
    probe(target.to(dtype), rows)
    cpu_offload(target, torch.device("cpu"))
    probe(target, rows)
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4}
    target = MambaForCausalLM(MambaConfig(state_size=8, **sizes)).eval().to(dtype)
    with pytest.raises(ValueError, match="packing for MambaForCausalLM must be without a change"):
        probe(target, rows)


def test_the_trainer_probes(target, make_drafter, make_trainer, rows, monkeypatch):
    whole = target.forward
    monkeypatch.setattr(target, "forward", lambda position_ids=None, **inputs: whole(**inputs))
    trainer = make_trainer(make_drafter(target), rows, packing=True, max_length=MAX_LENGTH)
    with pytest.raises(ValueError, match="packing for Qwen3ForCausalLM must be without a change"):
        trainer.train()
