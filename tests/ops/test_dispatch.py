"""Which implementation runs, and what both refuse."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import subprocess
import sys
import threading

import pytest
import torch

import domino_kernels
from domino_kernels import advance_branches, correct_and_choose, correct_branches, dispatch, gru_step

FITS = {
    correct_and_choose: {"base_logits": (2, 7), "low_rank": (2, 3), "up_weight": (7, 3)},
    gru_step: {"inputs": (2, 3), "state": (2, 4), "weight_ih": (12, 3), "weight_hh": (12, 4)},
    advance_branches: {"products": (2, 5, 12), "state": (2, 3, 4), "owners": (2, 5), "weight_hh": (12, 4)},
    correct_branches: {
        "base_logits": (2, 6),
        "block_part": (2, 3),
        "state_part": (2, 5, 3),
        "up_weight": (9, 3),
        "candidate_ids": (2, 6),
    },
}
IDS = ("owners", "candidate_ids")
NOISE = torch.ones(2, 7)


def made(name, shape):
    return torch.zeros(shape, dtype=torch.int64 if name in IDS else torch.float32)


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


@pytest.mark.parametrize("has_triton", [True, False])
def test_automatic_choice(has_triton, fresh_process):
    fresh_process.setattr(dispatch, "has_triton", lambda: has_triton)
    most = domino_kernels.MAX_AUTO_ROWS
    found = [domino_kernels.runs_triton(on_gpu(num_rows)) for num_rows in (1, most, most + 1)]
    assert found == [has_triton, has_triton, False]
    assert not domino_kernels.runs_triton(torch.zeros(1, 4))
    assert not domino_kernels.runs_triton(on_gpu(1, torch.float64))
    if not has_triton:
        with pytest.raises(ValueError, match="Triton is not installed"), domino_kernels.use_backend("triton"):
            pass


def test_decision_is_logged_once(fresh_process, caplog):
    with caplog.at_level(logging.INFO, logger="domino_kernels"):
        for _ in range(3):
            domino_kernels.runs_triton(torch.zeros(1, 4))
    (record,) = caplog.records
    assert dispatch.ENVIRONMENT_VARIABLE in record.message


def test_environment_and_override_of_one_thread(fresh_process):
    fresh_process.setenv(dispatch.ENVIRONMENT_VARIABLE, "reference")
    seen = []

    def decide():
        seen.append(domino_kernels.runs_triton(on_gpu(100)))

    decide()
    with contextlib.suppress(KeyError), domino_kernels.use_backend("triton"):
        decide()
        with domino_kernels.use_backend("reference"):
            decide()
        thread = threading.Thread(target=decide)
        thread.start(), thread.join()
        decide()
        raise KeyError
    decide()
    assert seen == [False, True, False, False, True, False]


def test_a_generator_that_another_thread_ends(fresh_process):
    fresh_process.setenv(dispatch.ENVIRONMENT_VARIABLE, "reference")

    def held_open():
        with domino_kernels.use_backend("triton"):
            yield

    generator = held_open()
    with contextlib.suppress(StopIteration):
        next(generator)
        assert domino_kernels.runs_triton(on_gpu(1))
        contextvars.Context().run(next, generator)
    assert not domino_kernels.runs_triton(on_gpu(1))


def test_wrong_backend_names_field_value_and_allowed(fresh_process):
    with pytest.raises(ValueError, match='backend must be one of auto, reference, triton, got "cuda"'):
        domino_kernels.use_backend("cuda").__enter__()
    fresh_process.setenv(dispatch.ENVIRONMENT_VARIABLE, "fast")
    with pytest.raises(ValueError, match=r'DOMINO_KERNELS_BACKEND must be one of .* got "fast"'):
        domino_kernels.runs_triton(torch.zeros(1, 4))


def test_triton_on_a_cpu_needs_the_interpreter(fresh_process):
    fresh_process.setattr(dispatch, "_is_interpreted", lambda: False)
    fresh_process.setattr(dispatch, "has_triton", lambda: True)
    message = r"needs tensors on a CUDA device, got cpu.*TRITON_INTERPRET=1"
    with domino_kernels.use_backend("triton"), pytest.raises(ValueError, match=message):
        domino_kernels.runs_triton(torch.zeros(1, 4))


@pytest.mark.parametrize(
    "operation", [gru_step, advance_branches, correct_branches], ids=lambda operation: operation.__name__
)
def test_gradients_flow_through_pytorch(operation, device):
    inputs = {name: made(name, shape).to(device) for name, shape in FITS[operation].items()}
    inputs = {name: tensor if name in IDS else (tensor + 0.5).requires_grad_() for name, tensor in inputs.items()}
    with domino_kernels.use_backend("auto"):
        operation(**inputs).sum().backward()
    assert all(tensor.grad.abs().sum() > 0 for name, tensor in inputs.items() if name not in IDS)


def test_other_kinds_of_tensors_go_to_pytorch(fresh_process, monkeypatch):
    # Stands for weights whose memory is not what their dtype says.
    quantized = torch.zeros(12, 3).as_subclass(type("Quantized", (torch.Tensor,), {}))
    monkeypatch.setattr(domino_kernels.ops, "runs_triton", lambda rows: pytest.fail("asked for a kernel"))
    assert gru_step(torch.ones(1, 3), torch.zeros(1, 4), quantized, torch.zeros(12, 4)).shape == (1, 4)


def test_import_does_not_import_triton():
    script = (
        "import sys, domino_kernels, torch; domino_kernels.runs_triton(torch.zeros(1)); print('triton' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


WRONG_SHAPES = {
    correct_and_choose: ("base_logits 2 8", "base_logits 7", "base_logits 0 7", "low_rank 3 3", "candidate_ids 1 7"),
    gru_step: ("inputs 2 4", "state 2", "weight_ih 9 3", "weight_hh 12 5"),
    advance_branches: ("state 2 4", "owners 1 5", "products 2 4 12", "weight_hh 12 3"),
    correct_branches: ("base_logits 2 3 4", "block_part 2 4", "state_part 2 3", "candidate_ids 2 4"),
}


def assert_refused(operation, field, **changes):
    inputs = {name: made(name, shape) for name, shape in FITS[operation].items()}
    with pytest.raises(ValueError, match=f"^{field} must "):
        operation(**inputs | changes)


@pytest.mark.parametrize("operation", FITS, ids=lambda operation: operation.__name__)
def test_other_shapes_are_refused(operation):
    for field, *shape in map(str.split, WRONG_SHAPES[operation]):
        assert_refused(operation, field, **{field: made(field, [*map(int, shape)])})


@pytest.mark.parametrize("operation", FITS, ids=lambda operation: operation.__name__)
def test_other_dtypes_devices_and_layouts_are_refused(operation):
    for field, shape in FITS[operation].items():
        tensor = made(field, shape)
        wrong = [tensor.int() if field in IDS else tensor.to(torch.int64)]
        if field != ("up_weight" if "up_weight" in FITS[operation] else "state"):  # which the others must be like
            wrong.append(tensor.to("meta"))
        if field in ("base_logits", "up_weight"):
            wrong.append(torch.zeros(shape[::-1]).T)
        for one in wrong:
            assert_refused(operation, field, **{field: one})


@pytest.mark.parametrize(
    "noise", [NOISE[:1], NOISE[:, :4], NOISE.double(), torch.ones(7, 2).T, NOISE.to("meta")], ids=range(5)
)
def test_noise_that_does_not_fit_is_refused(noise):
    assert_refused(correct_and_choose, "noise", noise=noise)


def test_other_numbers_and_ids_are_refused():
    assert_refused(correct_and_choose, "temperature", temperature=0.5)
    assert_refused(correct_and_choose, "temperature", temperature=0.0, noise=NOISE)
    assert_refused(correct_and_choose, "base_logits", candidate_ids=torch.zeros(2, 4).long())
    for inputs in (torch.zeros(2, 3), torch.zeros(2)):
        assert_refused(gru_step, "inputs", inputs=inputs, embedding=torch.zeros(9, 3))
    assert_refused(gru_step, "embedding", inputs=torch.zeros(2).long(), embedding=torch.zeros(9, 4))
