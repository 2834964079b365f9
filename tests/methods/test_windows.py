"""Sliding windows against attention written out, and the same in every way a drafter is run."""

from __future__ import annotations

import copy

import pytest
import torch
from builders import build_drafter, left_padded
from oracle import faults
from torch.nn.functional import normalize, silu

from hf_domino import DominoConfig
from hf_domino.decoding.static.fixed_context import FixedContext
from hf_domino.methods import modeling
from hf_domino.methods.context import SPARE, ContextCache
from hf_domino.targets.view import TargetModel

HIDDEN, BLOCK, WINDOW, LENGTH = 32, 6, 8, 30
MIXED = ["sliding_attention", "full_attention"]
KINDS = pytest.mark.parametrize(
    "windows",
    [
        {"layer_types": MIXED, "sliding_window": WINDOW},
        {"layer_types": MIXED, "sliding_window": WINDOW, "sliding_window_non_causal": True},
        {"layer_types": MIXED[:1] * 2, "sliding_window": BLOCK},
        {"draft_window_size": WINDOW + 1},
        {"layer_types": MIXED, "sliding_window": WINDOW, "draft_window_size": WINDOW - 3},
        {"layer_types": MIXED, "sliding_window": WINDOW, "sliding_window_non_causal": True, "draft_window_size": 11},
    ],
    ids=["mixed", "non-causal", "all", "context", "context is narrower", "context is wider"],
)
FP64_TOL = {"atol": 1e-10, "rtol": 1e-10}  # the same products, summed in another order


@pytest.fixture
def target(tiny_qwen3):
    """A copy of the tiny target in fp64."""
    return copy.deepcopy(tiny_qwen3).double()


@pytest.fixture
def make(target):
    """Makes a drafter with windows for it, in fp64 too."""
    return lambda windows: build_drafter(target, **windows).double()


def inputs(length=LENGTH, batch_size=1, seed=3):
    generator = torch.Generator().manual_seed(seed)
    context, noise = (
        torch.randn(batch_size, count, HIDDEN, dtype=torch.float64, generator=generator) for count in (length, BLOCK)
    )
    return context, noise, torch.arange(length + BLOCK).expand(batch_size, -1)


@torch.no_grad()
def at_once(drafter, context, noise, positions):
    split = context.shape[1]
    return drafter(noise, positions[:, split:], context, positions[:, :split])


def written_out(drafter, context, noise, windows):
    """The layers of z-lab's and SpecForge's classes for one row, query by query and head by head."""
    weights, config, num_context = drafter.state_dict(), drafter.config, len(context)
    frequencies = config.rope_parameters["rope_theta"] ** -(torch.arange(0, 8, 2).float() / 8).double()

    def norm(states, name):
        root = (states.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt()
        return states * root * weights[f"{name}.weight"]

    def heads(states, name, position=None):
        split = (weights[f"{name}.weight"] @ states).view(-1, 8)
        if position is None:
            return split
        split = norm(split, name.replace("_proj", "_norm"))
        turned = torch.view_as_complex(torch.stack(split.chunk(2, dim=-1), dim=-1).contiguous())
        turned = turned * torch.exp(1j * position * frequencies)
        return torch.cat((turned.real, turned.imag), dim=-1)

    def sees(layer, query, key):
        if key < num_context - (config.draft_window_size or num_context):
            return False
        if not config.is_sliding(layer):
            return True
        behind = query - key
        return behind < windows["sliding_window"] and (behind >= 0 or windows.get("sliding_window_non_causal", False))

    block = noise
    for layer in range(config.num_hidden_layers):
        at = f"layers.{layer}"
        normed = norm(block, f"{at}.input_layernorm")
        both = torch.cat((context, normed))
        keys = [heads(states, f"{at}.self_attn.k_proj", place) for place, states in enumerate(both)]
        values = [heads(states, f"{at}.self_attn.v_proj") for states in both]
        attended = []
        for index, states in enumerate(normed):
            place = num_context + index
            seen = [key for key in range(len(both)) if sees(layer, place, key)]
            of_heads = []
            for head, query in enumerate(heads(states, f"{at}.self_attn.q_proj", place)):
                scores = torch.stack([query @ keys[key][head // 2] for key in seen]) / 8**0.5
                of_heads.append(scores.softmax(0) @ torch.stack([values[key][head // 2] for key in seen]))
            attended.append(weights[f"{at}.self_attn.o_proj.weight"] @ torch.cat(of_heads))
        block = block + torch.stack(attended)
        normed = norm(block, f"{at}.post_attention_layernorm")
        gate, up, down = (weights[f"{at}.mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
        block = block + (silu(normed @ gate) * (normed @ up)) @ down
    return norm(block, "norm")


@KINDS
def test_attention_written_out(make, windows):
    drafter, (context, noise, positions) = make(windows), inputs()
    found = at_once(drafter, context, noise, positions)
    # Cosines are taken in fp32, which here are of a few radians.
    torch.testing.assert_close(found[0], written_out(drafter, context[0], noise[0], windows), atol=1e-5, rtol=1e-5)
    everything = at_once(make({}), context, noise, positions)
    assert (normalize(found, dim=-1) - normalize(everything, dim=-1)).abs().max() > 1e-2


@KINDS
@torch.no_grad()
def test_growing_and_fixed_contexts(make, windows):
    drafter, (context, noise, positions) = make(windows), inputs()
    fixed = FixedContext(drafter, 40)
    growing = drafter.new_context()
    for start, end in ((0, 3), (3, 4), (4, 11), (11, 11), (11, 17), (17, 24), (24, LENGTH)):
        pieces = (noise, positions[:, end : end + BLOCK], context[:, start:end], positions[:, start:end])
        fixed.announce([start], [end], positions.device)
        expected = at_once(drafter, context[:, :end], noise, positions[:, : end + BLOCK])
        for cache in (growing, fixed):
            torch.testing.assert_close(drafter(*pieces, cache=cache), expected, **FP64_TOL)


@KINDS
@torch.no_grad()
def test_rows_of_different_lengths(make, windows):
    drafter, (context, noise, positions) = make(windows), inputs(batch_size=3)
    cache, lengths = drafter.new_context(), [0, 0, 0]
    for counts in ([9, 2, 0], [1, 6, 5], [7, 10, 1]):
        starts = lengths
        lengths = [start + count for start, count in zip(starts, counts, strict=True)]
        new = torch.stack([context[row, start : start + 10] for row, start in enumerate(starts)])
        new_positions = torch.stack([positions[row, start : start + 10] for row, start in enumerate(starts)])
        places = torch.tensor(lengths)[:, None] + torch.arange(BLOCK)
        found = drafter(noise, places, new, new_positions, cache=cache, context_counts=counts)
        for row, length in enumerate(lengths):
            alone = at_once(
                drafter, context[row, None, :length], noise[row, None], positions[row, None, : length + BLOCK]
            )
            torch.testing.assert_close(found[row, None], alone, **FP64_TOL)


@KINDS
@torch.no_grad()
def test_blocks_side_by_side(make, target, windows):
    drafter, ids = make(windows), torch.randint(4, 64, (2, LENGTH))
    view, anchors = TargetModel(target), torch.tensor([[1, 9, 24], [5, 17, -1]])
    context, _, positions = inputs(batch_size=2)
    found = drafter.draft_blocks(view, ids, context, anchors)
    for row, index in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1)):
        anchor = int(anchors[row, index])
        block = torch.tensor([[int(ids[row, anchor])] + [drafter.config.mask_token_id] * (BLOCK - 1)])
        alone = at_once(drafter, context[row, None, :anchor], view.embed(block), positions[:1, : anchor + BLOCK])
        torch.testing.assert_close(found[row, index], alone[0], **FP64_TOL)


@KINDS
def test_texts_longer_than_the_window(make, target, windows, monkeypatch):
    drafter, hidden, run = make(windows), [], modeling.DominoDraftModel.forward

    def watched(self, noise_embeds, *args, **kwargs):
        found = run(self, noise_embeds, *args, **kwargs)
        hidden.extend([found[0]] if noise_embeds.shape[1] else [])
        return found

    monkeypatch.setattr(modeling.DominoDraftModel, "forward", watched)
    options = {"max_new_tokens": 24, "do_sample": False}
    ids, mask = left_padded([torch.randint(4, 64, (12,)), torch.randint(4, 64, (7,))])
    plain = target.generate(ids, attention_mask=mask, **options)

    def drafted(rows, **more):
        hidden.clear()
        with faults(plain.tolist()[:rows], 64):
            text = target.generate(ids[:rows], attention_mask=mask[:rows], assistant_model=drafter, **options, **more)
        assert text.tolist() == plain.tolist()[:rows]
        return torch.stack(hidden[:5])

    growing = drafted(1)
    assert max(drafter.stats.acceptance_lengths) > 3
    torch.testing.assert_close(drafted(1, cache_implementation="static"), growing, **FP64_TOL)
    torch.testing.assert_close(drafted(2), growing, **FP64_TOL)


def test_old_context_is_not_looked_at(make, monkeypatch):
    drafter, (context, noise, positions) = make({"layer_types": MIXED, "sliding_window": WINDOW}), inputs()
    seen, attend = [], torch.nn.functional.scaled_dot_product_attention

    def watched(queries, keys, *args, **kwargs):
        seen.append(keys.shape[2])
        return attend(queries, keys, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    drafter(noise, positions[:, LENGTH:], context, positions[:, :LENGTH], cache=ContextCache(2))
    assert seen == [WINDOW - 1 + BLOCK, LENGTH + BLOCK]
    seen.clear()
    narrow = drafter.view(draft_window_size=WINDOW - 3)
    narrow(noise, positions[:, LENGTH:], context, positions[:, :LENGTH], cache=narrow.new_context())
    assert seen == [WINDOW - 3 + BLOCK] * 2


def test_a_view_without_windows_sees_everything(make):
    drafter, case = make({"layer_types": MIXED, "sliding_window": WINDOW}), inputs()
    everything = drafter.view(layer_types=None, sliding_window=None)
    torch.testing.assert_close(at_once(everything, *case), at_once(make({}), *case), **FP64_TOL)
    assert (at_once(drafter, *case) - at_once(everything, *case)).abs().max() > 1e-2


@torch.no_grad()
def test_what_a_window_leaves_behind_is_not_stored(make):
    """Over a text of any length as much is stored as two windows and what one draft adds."""
    drafter = make({"draft_window_size": WINDOW})
    context, noise, positions = inputs(length=20 * LENGTH)
    cache = drafter.new_context()
    for start in range(0, 20 * LENGTH, 5):
        end = start + 5
        found = drafter(
            noise, positions[:, end : end + BLOCK], context[:, start:end], positions[:, start:end], cache=cache
        )
        stored = [tensor.shape[2] for buffers in (cache._keys, cache._values) for tensor in buffers]
        assert max(stored) <= 3 * WINDOW + 5
    torch.testing.assert_close(found, at_once(drafter, context, noise, positions), **FP64_TOL)


@torch.no_grad()
def test_a_prompt_reserves_what_it_needs(make):
    drafter = make({})
    context, noise, positions = inputs(length=900)
    cache = drafter.new_context()
    drafter(noise, positions[:, 900:], context, positions[:, :900], cache=cache)
    assert cache._keys[0].shape[2] == 900 + SPARE


def test_a_prompt_is_cut_before_it_is_fused(make, target, monkeypatch):
    drafter = make({"draft_window_size": WINDOW})
    fused, fuse = [], type(drafter).fuse_context

    def watched(self, hidden_states):
        fused.append(hidden_states[0].shape[1])
        return fuse(self, hidden_states)

    monkeypatch.setattr(type(drafter), "fuse_context", watched)
    ids, mask = left_padded([torch.randint(4, 64, (40,)), torch.randint(4, 64, (25,))])
    options = {"max_new_tokens": 12, "do_sample": False}
    for rows in (1, 2):
        for more in ({}, {"cache_implementation": "static"}):
            fused.clear()
            plain = target.generate(ids[:rows], attention_mask=mask[:rows], **options)
            kwargs = {"attention_mask": mask[:rows], "assistant_model": drafter}
            text = target.generate(ids[:rows], **kwargs, **options, **more)
            assert text.tolist() == plain.tolist()
            assert fused[0] == WINDOW


def test_a_method_without_a_window_refuses_it():
    with pytest.raises(ValueError, match="draft_window_size of a token recycling drafter must be None, got 8"):
        DominoConfig(projector_type="recycling", num_hidden_layers=1, draft_window_size=8)
    with pytest.raises(ValueError, match=r"draft_window_size must be in \[1, 2147483647\] \(or None\), got 0"):
        DominoConfig(draft_window_size=0)
