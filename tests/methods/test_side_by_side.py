"""What blocks side by side see: the mask against plain loops, and flex attention against the mask."""

from __future__ import annotations

import pytest
import torch

from hf_domino import DominoConfig
from hf_domino.methods.backbone import AttentionInputs, windowed
from hf_domino.methods.side_by_side import BlockView, attend_side_by_side, block_mask, flex_attention

K, C = 4, 40
ANCHORS = {
    "increasing": [[1, 5, 6, 17, 18, 25, 39], [0, 2, 9, 10, 11, 12, 13]],
    "ragged": [[3, 8, 21, 30, 38, -1, -1], [-1] * 7],
    "in any order": [[38, 2, 30, 7, -1, 19, 8], [5, -1, 5, 40, 1, 22, 9]],
}
WINDOWS = {
    "full": None,
    "window": {"sliding_window": 6},
    "bidirectional window": {"sliding_window": 6, "sliding_window_non_causal": True},
}
BF16 = {"atol": 3e-2, "rtol": 3e-2}  # inputs of eight bits, around 1
FP32 = {"atol": 1e-5, "rtol": 1e-5}  # sums in another order, of numbers around 1


def view_of(anchors, window=None, num_context=C):
    view = BlockView.at(torch.tensor(anchors), K, num_context)
    if window is None:
        return view
    config = DominoConfig(block_size=K, num_hidden_layers=1, layer_types=["sliding_attention"], **window)
    inputs = AttentionInputs(None, (torch.empty(0), torch.empty(0)), None, None, view=view)
    return windowed(config, inputs, torch.empty(0), 0).view


VIEWS = {
    f"{anchors}, {window}": (ANCHORS[anchors], WINDOWS[window]) for anchors in ANCHORS for window in WINDOWS
}  # fmt: skip
CASES = [*(view_of(*case) for case in VIEWS.values()), view_of(ANCHORS["ragged"], num_context=0)]
EACH_VIEW = pytest.mark.parametrize("view", CASES, ids=[*VIEWS, "no context"])


def states(view, dtype, heads=(4, 2)):
    """Queries, keys and values `[B, heads, T, D]`, and a gradient of what is attended."""
    generator = torch.Generator().manual_seed(1)
    sizes = (heads[0], view.num_queries), (heads[1], view.num_keys), (heads[1], view.num_keys)
    made = [torch.randn(2, *size, 8, generator=generator, dtype=dtype) for size in sizes]
    return [state.requires_grad_() for state in made], torch.randn(made[0].shape, generator=generator, dtype=dtype)


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
def test_the_mask_against_loops(window):
    anchors = ANCHORS["increasing"]
    mask = view_of(anchors, window).mask
    assert mask.shape == (2, 1, 7 * K, C + 7 * K)
    for row, query, key in torch.cartesian_prod(*map(torch.arange, (2, 7 * K, C + 7 * K))).tolist():
        anchor, place = anchors[row][query // K], anchors[row][query // K] + query % K
        if key < C:
            behind = place - key
            expected = key < anchor
        else:
            behind = query % K - (key - C) % K
            expected = query // K == (key - C) // K
        if window is not None:
            expected = expected and behind < window["sliding_window"]
            expected = expected and (behind >= 0 or window.get("sliding_window_non_causal", False))
        assert mask[row, 0, query, key] == expected


def test_unused_blocks_see_themselves_alone():
    mask = view_of(ANCHORS["ragged"]).mask[1, 0]
    assert not mask[:, :C].any()
    assert mask.sum() == 7 * K * K


def test_the_mask_takes_what_autocast_gives():
    view = view_of(ANCHORS["increasing"])
    (queries, keys, values), _ = states(view, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):  # norms give fp32, projections bf16
        attended = attend_side_by_side(queries, keys, values.bfloat16(), view)
    assert attended.dtype == torch.bfloat16
    expected = attend_side_by_side(queries, keys, values, view)
    torch.testing.assert_close(attended.float(), expected, **BF16)


@EACH_VIEW
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_equals_the_mask(view):
    inputs = [state.detach() for state in states(view, torch.float32)[0]]  # on a CPU it has no backward pass
    found, expected = flex_attention(*inputs, view), attend_side_by_side(*inputs, view)
    torch.testing.assert_close(found, expected, **FP32)


def test_flex_attention_makes_its_mask_once():
    view = CASES[0]
    assert block_mask(view) is block_mask(view)


@pytest.mark.gpu
@EACH_VIEW
def test_flex_attention_on_a_gpu(view):
    found = []
    for attend in (flex_attention, attend_side_by_side):
        inputs, gradient = states(view, torch.float32)
        device = torch.device("cuda" if attend is flex_attention else "cpu")
        wide = [torch.nn.functional.pad(state.detach(), (0, 8)).to(device).requires_grad_() for state in inputs]
        attended = attend(*wide, view.to(device))
        attended.backward(torch.nn.functional.pad(gradient, (0, 8)).to(device))
        found.append([tensor.cpu() for tensor in (attended, *(state.grad for state in wide))])
    torch.testing.assert_close(*found, atol=1e-3, rtol=1e-3)  # the kernel takes fp32 products in tf32
