"""After every round a cache holds what plain generation keeps, rewound, realigned or both, and not a position more."""

from __future__ import annotations

import itertools

import pytest
import torch
from builders import left_padded
from oracle import faults
from test_families import PROMPT, WINDOW, build
from transformers import Cache, DynamicCache, QuantizedCache, cache_utils
from transformers.cache_utils import DynamicLayer, StaticLayer

import hf_domino
from hf_domino._common.cache_name import CACHE

pytestmark = pytest.mark.transformers

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}  # fp32 sums in another order
OPTIONS = {"do_sample": False, "max_new_tokens": 30}


def assert_as_plain(cache, known, lengths):
    """That a cache holds so many positions of each of its rows, whose keys and values are those of other caches."""
    longest = max(lengths)
    for index, layer in enumerate(cache.layers):
        kept = min(longest, WINDOW - 1) if layer.is_sliding else longest
        assert layer.keys.shape[2] == layer.values.shape[2] == kept
        assert layer.get_seq_length() == longest
        for row, length in enumerate(lengths):
            count, plain = min(length, kept), known[row].layers[index]
            for mine, all_there_are in ((layer.keys, plain.keys), (layer.values, plain.values)):
                expected = all_there_are[0, :, length - count : length]
                torch.testing.assert_close(mine[row, :, kept - count :], expected, **TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("family", ["Mistral", "Gemma3"])
@pytest.mark.parametrize("lengths", [[20], [4], [5, 20, 9]], ids=["long", "short", "batch"])
def test_every_round_leaves_what_plain_generation_keeps(make_drafter, family, lengths):
    """As each forward finds it: of every row the text up to the anchor, which is the first of the block."""
    target, found = build(family), []
    ids, mask = left_padded([PROMPT[0, :length] for length in lengths])
    options = OPTIONS | {"attention_mask": mask}
    plain, known = target.generate(ids, **options), []
    texts = [text[len(ids[0]) - length :].tolist() for text, length in zip(plain, lengths, strict=True)]
    for text in texts:
        known.append(DynamicCache())  # without a configuration it keeps all positions
        target(torch.tensor([text]), past_key_values=known[-1])

    def check(module, args, kwargs):
        cache, anchors = kwargs[CACHE], kwargs["input_ids"][:, 0].tolist()
        if cache.get_seq_length():
            lengths = kwargs["position_ids"][:, 0].tolist()
            ways = itertools.combinations(range(len(texts)), len(anchors))  # rows that may be there still
            rows = next(
                rows for rows in ways if anchors == [texts[row][at] for row, at in zip(rows, lengths, strict=True)]
            )
            found.append(rows)
            if len(found) > 1:  # windows are cut behind the first round
                assert_as_plain(cache, [known[row] for row in rows], lengths)

    handle = target.register_forward_pre_hook(check, with_kwargs=True)
    try:
        with faults(plain.tolist(), target.config.vocab_size):
            result = target.generate(ids, assistant_model=make_drafter(target), return_dict_in_generate=True, **options)
    finally:
        handle.remove()
    assert len(found) > 5
    if len(lengths) == 1:
        assert_as_plain(result[CACHE], known, [result.sequences.shape[1] - 1])
        assert not any(getattr(layer, "record_past", False) for layer in result[CACHE].layers)


class RecentLayer(DynamicLayer):
    """Keeps 24 positions. What it has dropped cannot come back, as it says of itself."""

    is_croppable = False

    def update(self, *args, **kwargs):
        found = super().update(*args, **kwargs)
        self.keys = self.keys[:, :, -24:]
        self.values = self.values[:, :, -24:]
        return found


CANNOT_REWIND = {
    "layers that say so": (lambda: Cache(layers=[RecentLayer() for _ in range(4)]), "RecentLayer"),
    "layers made later": (lambda: Cache(layer_class_to_replicate=RecentLayer), "RecentLayer"),
    "a few of them": (lambda: Cache(layers=[DynamicLayer(), RecentLayer(), DynamicLayer(), DynamicLayer()]), "RecentL"),
    "static layers": (lambda: Cache(layers=[StaticLayer(64) for _ in range(4)]), "Cache"),
}
if hasattr(cache_utils, "Fp8QuantizedLayer"):
    quantized = lambda: QuantizedCache("fp8", build("Qwen2").config)  # noqa: E731
    CANNOT_REWIND["quantized layers"] = quantized, "Fp8QuantizedLayer"


@pytest.mark.parametrize("kind", CANNOT_REWIND)
def test_a_cache_that_cannot_be_rewound_is_refused_by_name_and_runs_plain_by_default(kind, make_drafter):
    make, name = CANNOT_REWIND[kind]
    target = build("Qwen2")
    drafter = make_drafter(target)
    plain = target.generate(PROMPT, **OPTIONS, **{CACHE: make()})
    for prompt in (PROMPT, PROMPT.repeat(2, 1)):
        with pytest.raises(ValueError, match=f"{CACHE} must be .*, got '{name}.*cannot be rewound"):
            target.generate(prompt, assistant_model=drafter, **OPTIONS, **{CACHE: make()})
    hf_domino.attach(target, drafter)
    assert target.generate(PROMPT, **OPTIONS, **{CACHE: make()}).tolist() == plain.tolist()
    assert hf_domino.attached(target).num_drafted == 0
    assert list(hf_domino.attached(target).num_plain.values()) == [1]
