"""The step of a GPU: on the meta device, which has nothing to read, and on a CPU beside the step of a CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim import optimizer
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode

from hf_domino.training import muon
from hf_domino.training.arguments import DominoTrainingArguments
from hf_domino.training.evidence.meter import Meter
from hf_domino.training.hidden_states.folder import STATES

META = torch.device("meta")
LOSS_TOL = {"rel": 1e-6}  # fp32 sums in another order
WEIGHTS_TOL = {"rtol": 1e-5, "atol": 1e-6}  # the same, through steps of SGD
MUON_TOL = 0.02  # of a move: bf16 products in another order
RICH = {"position_weights": "dpace", "distillation_weight": 1.0}


def to_meta(model: nn.Module) -> None:
    """Leave a model without values; `model.to` would read what a drafter keeps beside its weights."""
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                module._parameters[name] = nn.Parameter(weight.detach().to(META), weight.requires_grad)
        for name, buffer in module._buffers.items():
            module._buffers[name] = buffer.to(META)


@pytest.fixture
def static(monkeypatch):
    """Arguments say that shapes are the same in all steps, as on a GPU, though tensors are on a CPU."""
    monkeypatch.setattr(DominoTrainingArguments, "is_static", True)


def test_a_step_reads_nothing(make_drafter, target, make_trainer, greedy_rows, static, monkeypatch):
    for name in ("_get_fused_kernels_supported_devices", "_get_foreach_kernels_supported_devices"):
        devices = [*getattr(_foreach_utils, name)(), "meta"]
        for module in (_foreach_utils, optimizer):
            monkeypatch.setattr(module, name, lambda devices=devices: devices)
    trainer, copies = make_trainer(make_drafter(target), greedy_rows, muon_learning_rate=1e-2, **RICH), []
    batch = next(iter(trainer.get_train_dataloader()))
    batch[STATES] = torch.zeros(*batch["input_ids"].shape, 1 + len(trainer.target.layer_ids), 32)
    batch = {name: values.to(META) for name, values in batch.items()}
    to_meta(trainer.drafter)
    to_meta(trainer.target.model)
    trainer.create_optimizer()
    trainer.meter, trainer._new_tokens = Meter(trainer.drafter.config, META), trainer._new_tokens.to(META)
    trainer.state.max_steps = 10
    monkeypatch.setattr(trainer, "_prepare_inputs", lambda inputs: inputs)

    class Dispatched(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if {value.device.type for value in (*args, result) if isinstance(value, torch.Tensor)} == {"cpu", "meta"}:
                copies.append(str(func))  # a value of a CPU that is brought to the device
            return result

    def step():
        (inputs,), total = trainer.get_batch_samples(iter([dict(batch)]), 1, META)
        trainer.training_step(trainer.drafter_training, inputs, total)
        nn.utils.clip_grad_norm_(trainer.drafter.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.callback_handler.on_step_end(trainer.args, trainer.state, trainer.control)
        trainer.optimizer.zero_grad()

    step()  # reading a value of the meta device is an error
    with Dispatched():
        step()
    assert copies == []


@pytest.mark.parametrize(
    ("kind", "fields"), [({}, {}), ({"shift_label": False}, RICH | {"gradient_accumulation_steps": 2})]
)
def test_both_steps_train_alike(kind, fields, target, make_drafter, make_trainer, greedy_rows, monkeypatch):
    results = []
    for is_static in (False, True):
        monkeypatch.setattr(DominoTrainingArguments, "is_static", is_static)
        trainer = make_trainer(
            make_drafter(target, **kind), greedy_rows, num_anchors=50, optim="sgd", learning_rate=0.05, logging_steps=1,
            max_steps=4, max_length=80, per_device_train_batch_size=2, **fields,
        )  # fmt: skip
        trainer.train()
        tokens = trainer.state.num_input_tokens_seen
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        results.append((losses, tokens, trainer.drafter.state_dict()))
    assert next(iter(trainer.get_train_dataloader()))["anchors"].shape == (2, 50)
    assert next(iter(trainer.get_train_dataloader()))["input_ids"].shape[1] % 10 == 0
    assert results[1][0] == pytest.approx(results[0][0], **LOSS_TOL)
    assert results[1][1] == results[0][1]
    torch.testing.assert_close(results[1][2], results[0][2], **WEIGHTS_TOL)


def test_a_loss_that_is_not_finite_is_named_with_the_next_line_of_the_log(
    static, target, make_drafter, make_trainer, greedy_rows
):
    trainer = make_trainer(make_drafter(target), greedy_rows, logging_steps=4, learning_rate=1e30, warmup_steps=0)
    with pytest.raises(ValueError, match=r"the loss of step 2 must be finite, got (nan|inf). Training stops"):
        trainer.train()
    assert trainer.state.global_step == 4


def test_muon_with_torchs_polynomial_is_torchs_own(monkeypatch):
    monkeypatch.setattr(muon, "POLYNOMIALS", [(3.4445, -4.775, 2.0315)] * 5)  # torch's
    monkeypatch.setattr(muon, "MARGIN", 1)
    shapes = [(8, 24), (24, 8), (8, 24), (16, 16), (8, 24)]
    models = [nn.ParameterList(torch.randn(shape) for shape in shapes)]
    models.append(copy.deepcopy(models[0]))
    first = [weight.detach().clone() for weight in models[0]]
    theirs = torch.optim.Muon(models[0], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    ours = muon.MuonWithAdamW(models[1], 0.02, 1e-3, 0.1)
    for _ in range(3):
        for one, other in zip(*models, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        theirs.step()
        ours.step()
        again = muon.MuonWithAdamW(models[1], 0.5, 1e-3, 0.0)
        again.load_state_dict(ours.state_dict())
        ours = again
    for one, other, start in zip(*models, first, strict=True):
        assert (other - one).norm() < MUON_TOL * (one - start).norm()


def test_rows_become_orthonormal():
    spread = torch.logspace(0, -2, 16)  # singular values
    left, right = (torch.linalg.qr(torch.randn(size, 16))[0] for size in (16, 40))
    for size in (1e-6, 1.0, 1e6):  # of one direction alone: rounding brings it beyond 1, where five steps would diverge
        alone = muon.orthogonalise(size * torch.outer(left[0], right[0]))
        assert float(torch.linalg.svdvals(alone.float())[0]) == pytest.approx(1, abs=0.2)
    matrix = left @ spread.diag() @ right.T
    for found in (muon.orthogonalise(matrix), *muon.orthogonalise(matrix.expand(3, -1, -1))):
        assert torch.linalg.svdvals(found.float()).sub(1).abs().max() < 0.2
        torch.testing.assert_close(found.float(), left @ right.T, atol=0.1, rtol=0)
