"""Which implementation runs, and what both refuse."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import threading

import pytest
import torch

import domino_kernels
from domino_kernels import advance_lanes, correct_and_choose, correct_lanes, dispatch, gru_step


@pytest.fixture
def fresh_process(monkeypatch):
    """Forget what this process decided, before and after."""
    monkeypatch.delenv(dispatch.ENVIRONMENT_VARIABLE, raising=False)
    dispatch._process_backend.cache_clear()
    yield monkeypatch
    dispatch._process_backend.cache_clear()


def on_gpu(num_rows, dtype=torch.float32):
    """Stands for a tensor of a CUDA device; the decision looks at no more than this."""
    return type("Rows", (), {"is_cuda": True, "shape": (num_rows, 4), "dtype": dtype})()


def test_automatic_choice(fresh_process):
    assert not domino_kernels.runs_triton(torch.zeros(1, 4))
    for num_rows, expected in [
        (1, True),
        (domino_kernels.MAX_AUTO_ROWS, True),
        (domino_kernels.MAX_AUTO_ROWS + 1, False),
    ]:
        assert domino_kernels.runs_triton(on_gpu(num_rows)) is (expected and dispatch.has_triton())


def test_double_precision_is_not_for_the_kernels(fresh_process):
    assert not domino_kernels.runs_triton(on_gpu(1, torch.float64))


def test_without_triton_pytorch_runs(fresh_process):
    fresh_process.setattr(dispatch, "has_triton", lambda: False)
    assert not domino_kernels.runs_triton(on_gpu(1))
    with pytest.raises(ValueError, match="Triton is not installed"), domino_kernels.use_backend("triton"):
        pass


def test_decision_is_logged_once(fresh_process, caplog):
    with caplog.at_level(logging.INFO, logger="domino_kernels"):
        for _ in range(3):
            domino_kernels.runs_triton(torch.zeros(1, 4))
    assert len(caplog.records) == 1
    assert dispatch.ENVIRONMENT_VARIABLE in caplog.text


def test_environment_and_override(fresh_process):
    fresh_process.setenv(dispatch.ENVIRONMENT_VARIABLE, "reference")
    assert not domino_kernels.runs_triton(on_gpu(1))
    with domino_kernels.use_backend("triton"):
        assert domino_kernels.runs_triton(on_gpu(100))
        with domino_kernels.use_backend("reference"):
            assert not domino_kernels.runs_triton(on_gpu(1))
        assert domino_kernels.runs_triton(on_gpu(1))
    assert not domino_kernels.runs_triton(on_gpu(1))


def test_override_is_of_one_thread(fresh_process):
    seen = []
    with domino_kernels.use_backend("reference"):
        thread = threading.Thread(target=lambda: seen.append(dispatch._override.get()))
        thread.start(), thread.join()
    assert seen == [None]


def test_override_ends_with_an_error():
    with pytest.raises(KeyError), domino_kernels.use_backend("reference"):
        raise KeyError
    assert dispatch._override.get() is None


def test_wrong_backend_names_field_value_and_allowed(fresh_process):
    message = r'backend must be one of auto, reference, triton, got "cuda"'
    with pytest.raises(ValueError, match=message), domino_kernels.use_backend("cuda"):
        pass
    fresh_process.setenv(dispatch.ENVIRONMENT_VARIABLE, "fast")
    with pytest.raises(ValueError, match=r'DOMINO_KERNELS_BACKEND must be one of .* got "fast"'):
        domino_kernels.runs_triton(torch.zeros(1, 4))


def test_triton_on_a_cpu_needs_the_interpreter(fresh_process):
    fresh_process.setattr(dispatch, "_is_interpreted", lambda: False)
    fresh_process.setattr(dispatch, "has_triton", lambda: True)
    message = r"needs tensors on a CUDA device, got cpu.*TRITON_INTERPRET=1"
    with domino_kernels.use_backend("triton"), pytest.raises(ValueError, match=message):
        domino_kernels.runs_triton(torch.zeros(1, 4))


def test_gradients_flow_through_pytorch(device):
    state, weight_ih, weight_hh = (torch.rand(*shape, device=device) for shape in [(1, 4), (12, 3), (12, 4)])
    weight_ih.requires_grad_()
    with domino_kernels.use_backend("auto"):
        gru_step(torch.ones(1, 3, device=device), state, weight_ih, weight_hh).sum().backward()
    assert weight_ih.grad.abs().sum() > 0


class QuantizedTensor(torch.Tensor):
    """Stands for weights whose memory is not what their dtype says."""


def test_other_kinds_of_tensors_go_to_pytorch(fresh_process, monkeypatch):
    weights = torch.zeros(12, 3).as_subclass(QuantizedTensor), torch.zeros(12, 4)
    monkeypatch.setattr(domino_kernels.ops, "runs_triton", lambda rows: pytest.fail("asked for a kernel"))
    assert gru_step(torch.ones(1, 3), torch.zeros(1, 4), *weights).shape == (1, 4)


def test_import_does_not_import_triton():
    script = (
        "import sys, domino_kernels, torch; domino_kernels.runs_triton(torch.zeros(1)); print('triton' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def choice_inputs(**changes):
    inputs = {
        "base_logits": torch.zeros(2, 7),
        "low_rank": torch.zeros(2, 3),
        "up_weight": torch.zeros(7, 3),
        "candidate_ids": None,
    }
    return inputs | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_logits": torch.zeros(2, 8)}, "base_logits must have the shape [B, V = 7], got [2, 8]"),
        ({"base_logits": torch.zeros(7)}, "base_logits must have the shape [B, V = 7], got [7]"),
        ({"base_logits": torch.zeros(0, 7)}, "base_logits must have the shape [B, V = 7], got [0, 7]"),
        ({"base_logits": torch.zeros(2, 7).double()}, "base_logits must have one of the dtypes"),
        ({"base_logits": torch.zeros(7, 2).T}, "base_logits must be contiguous in its last dimension"),
        ({"low_rank": torch.zeros(3, 3)}, "low_rank must have the shape [B = 2, R = 3], got [3, 3]"),
        ({"low_rank": torch.zeros(2, 3).half()}, "low_rank must have the dtype of up_weight, torch.float32"),
        ({"low_rank": torch.zeros(2, 3, device="meta")}, "low_rank must be on the device of up_weight, cpu, got meta"),
        ({"base_logits": torch.zeros(2, 7, device="meta")}, "base_logits must be on the device of up_weight, cpu"),
        ({"candidate_ids": torch.zeros(2, 4).long()}, "base_logits must have the shape [B, M = 4], got [2, 7]"),
        ({"candidate_ids": torch.zeros(2, 7).int()}, "candidate_ids must be torch.int64, got torch.int32"),
        ({"candidate_ids": torch.zeros(1, 7).long()}, "candidate_ids must have the shape [B = 2, M = 7], got [1, 7]"),
        ({"temperature": 0.5}, "temperature must be None without noise, got 0.5"),
        ({"temperature": 0.0, "noise": torch.ones(2, 7)}, "temperature must be a finite number above 0, got 0.0"),
        ({"noise": torch.ones(1, 7)}, "noise must have the shape [B = 2, V = 7], got [1, 7]"),
        (
            {"noise": torch.ones(2, 4), "base_logits": torch.zeros(2, 4), "candidate_ids": torch.zeros(2, 4).long()},
            "noise must have the shape [B = 2, V = 7], got [2, 4]",
        ),
        ({"noise": torch.ones(2, 7).double()}, "noise must be torch.float32, got torch.float64"),
        ({"noise": torch.ones(7, 2).T}, "noise must be contiguous in its last dimension"),
        ({"noise": torch.ones(2, 7, device="meta")}, "noise must be on the device of up_weight, cpu, got meta"),
    ],
)
def test_choice_refuses(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        correct_and_choose(**choice_inputs(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": torch.zeros(2, 4)}, "inputs must have the shape [B = 2, H = 3], got [2, 4]"),
        ({"state": torch.zeros(2)}, "state must have the shape [B, G], got [2]"),
        ({"state": torch.zeros(2, 4).double()}, "state must have one of the dtypes"),
        ({"weight_hh": torch.zeros(12, 5)}, "weight_hh must have the shape [3G = 12, G = 4], got [12, 5]"),
        ({"weight_ih": torch.zeros(9, 3)}, "weight_ih must have the shape [3G = 12, H], got [9, 3]"),
        ({"weight_ih": torch.zeros(12, 3).half()}, "weight_ih must have the dtype of state, torch.float32"),
        ({"weight_ih": torch.zeros(12, 3, device="meta")}, "weight_ih must be on the device of state, cpu"),
        ({"embedding": torch.zeros(9, 3)}, "inputs must have the shape [B = 2], got [2, 3]"),
        ({"embedding": torch.zeros(9, 3), "inputs": torch.zeros(2)}, "inputs must be torch.int64, got torch.float32"),
        ({"embedding": torch.zeros(9, 4), "inputs": torch.zeros(2).long()}, "embedding must have the shape [V, H = 3]"),
    ],
)
def test_gru_refuses(changes, message):
    inputs = {
        "inputs": torch.zeros(2, 3),
        "state": torch.zeros(2, 4),
        "weight_ih": torch.zeros(12, 3),
        "weight_hh": torch.zeros(12, 4),
    }
    with pytest.raises(ValueError, match=re.escape(message)):
        gru_step(**(inputs | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state": torch.zeros(2, 4)}, "state must have the shape [B, S, G], got [2, 4]"),
        ({"state": torch.zeros(2, 3, 4).double()}, "state must have one of the dtypes"),
        ({"owners": torch.zeros(1, 5).long()}, "owners must have the shape [B = 2, L], got [1, 5]"),
        ({"owners": torch.zeros(2, 5).int()}, "owners must be torch.int64, got torch.int32"),
        ({"products": torch.zeros(2, 4, 12)}, "products must have the shape [B = 2, L = 5, 3G = 12], got [2, 4, 12]"),
        ({"products": torch.zeros(2, 5, 12).half()}, "products must have the dtype of state, torch.float32"),
        ({"weight_hh": torch.zeros(12, 3)}, "weight_hh must have the shape [3G = 12, G = 4], got [12, 3]"),
        ({"weight_hh": torch.zeros(12, 4, device="meta")}, "weight_hh must be on the device of state, cpu, got meta"),
        ({"owners": torch.zeros(2, 5, device="meta").long()}, "owners must be on the device of state, cpu, got meta"),
    ],
)
def test_advance_refuses(changes, message):
    inputs = {
        "products": torch.zeros(2, 5, 12),
        "state": torch.zeros(2, 3, 4),
        "owners": torch.zeros(2, 5).long(),
        "weight_hh": torch.zeros(12, 4),
    }
    with pytest.raises(ValueError, match=re.escape(message)):
        advance_lanes(**(inputs | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_logits": torch.zeros(2, 3, 4)}, "base_logits must have the shape [B, M], got [2, 3, 4]"),
        ({"base_logits": torch.zeros(2, 6).double()}, "base_logits must have one of the dtypes"),
        ({"block_part": torch.zeros(2, 4)}, "block_part must have the shape [B = 2, R = 3], got [2, 4]"),
        ({"state_part": torch.zeros(2, 3)}, "state_part must have the shape [B = 2, L, R = 3], got [2, 3]"),
        ({"state_part": torch.zeros(2, 5, 3).half()}, "state_part must have the dtype of up_weight, torch.float32"),
        ({"candidate_ids": torch.zeros(2, 4).long()}, "candidate_ids must have the shape [B = 2, M = 6], got [2, 4]"),
        ({"candidate_ids": torch.zeros(2, 6).int()}, "candidate_ids must be torch.int64, got torch.int32"),
        ({"up_weight": torch.zeros(3, 9).T}, "up_weight must be contiguous in its last dimension"),
        ({"base_logits": torch.zeros(2, 6, device="meta")}, "base_logits must be on the device of up_weight, cpu"),
    ],
)
def test_corrections_refuse(changes, message):
    inputs = {
        "base_logits": torch.zeros(2, 6),
        "block_part": torch.zeros(2, 3),
        "state_part": torch.zeros(2, 5, 3),
        "up_weight": torch.zeros(9, 3),
        "candidate_ids": torch.zeros(2, 6).long(),
    }
    with pytest.raises(ValueError, match=re.escape(message)):
        correct_lanes(**(inputs | changes))
