"""What blocks side by side see: the mask against plain loops, and the tiles and flex attention against the mask."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_domino import DominoConfig
from hf_domino.kinds import side_by_side
from hf_domino.kinds.backbone import AttentionInputs, windowed
from hf_domino.kinds.side_by_side import attend_side_by_side, block_mask, flex_attention, tiled_attention, tiles_of
from hf_domino.kinds.view import BlockView

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
# Sums in another order, of numbers around 1.
TOLERANCES = {torch.float64: {"atol": 1e-10, "rtol": 1e-10}, torch.float32: {"atol": 1e-5, "rtol": 1e-5}}


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


@EACH_VIEW
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("heads", [(4, 2), (2, 2)], ids=["grouped", "alike"])
@pytest.mark.parametrize("queries_per_tile", [1, 2 * K, 100])
def test_tiles_equal_the_mask(view, dtype, heads, queries_per_tile):
    found = []
    for attend in (partial(tiled_attention, queries_per_tile=queries_per_tile), attend_side_by_side):
        inputs, gradient = states(view, dtype, heads)
        attended = attend(*inputs, view)
        attended.backward(gradient)
        found.append([attended, *(state.grad for state in inputs)])
    torch.testing.assert_close(*found, **TOLERANCES[dtype])


@pytest.mark.parametrize("limit", [0, 2**30])
def test_tiles_and_mask_take_what_autocast_gives(limit, monkeypatch):
    monkeypatch.setattr(side_by_side, "MAX_DENSE_SCORES", limit)
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
    torch.testing.assert_close(found, expected, **TOLERANCES[torch.float32])


def test_flex_attention_makes_its_mask_once():
    view = CASES[0]
    assert block_mask(view) is block_mask(view)


@pytest.mark.gpu
@EACH_VIEW
def test_flex_attention_on_a_gpu(view):
    found = []
    for attend in (flex_attention, tiled_attention):
        inputs, gradient = states(view, torch.float32)
        device = torch.device("cuda" if attend is flex_attention else "cpu")
        wide = [torch.nn.functional.pad(state.detach(), (0, 8)).to(device).requires_grad_() for state in inputs]
        attended = attend(*wide, view.to(device))
        attended.backward(torch.nn.functional.pad(gradient, (0, 8)).to(device))
        found.append([tensor.cpu() for tensor in (attended, *(state.grad for state in wide))])
    torch.testing.assert_close(*found, atol=1e-3, rtol=1e-3)  # the kernel takes fp32 products in tf32


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, (tuple, list)) else [results]:
            self.numel = max(self.numel, result.numel() if isinstance(result, torch.Tensor) else 0)
        return results


def test_nothing_of_all_queries_and_keys_is_made():
    view = BlockView.at(torch.arange(0, 1024, 4)[None].repeat(2, 1), K, 1024)
    inputs, gradient = states(view, torch.float32)
    with Largest() as largest:
        tiled_attention(*inputs, view).backward(gradient)
    assert largest.numel < view.num_queries * view.num_keys / 4  # of one row and head


def test_tiles_look_at_what_is_seen_alone():
    view = view_of(ANCHORS["increasing"], WINDOWS["window"])
    found = [
        (tile.row, tile.blocks.start // K, tile.context.start, tile.context.stop) for tile in tiles_of(view, 3 * K)
    ]
    assert found == [(0, 0, 0, 6), (0, 3, 12, 25), (0, 6, 34, 39), (1, 0, 0, 9), (1, 3, 5, 12), (1, 6, 8, 13)]
