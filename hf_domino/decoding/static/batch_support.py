"""Which targets can verify a batch with fixed shapes: each target is tried once.

A target's attention must follow a mask `[B, 1, W, S]` that differs between sequences, and the target must use the
positions that it is given. Transformers does not say whether a model does.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from hf_domino._common.cache_name import CACHE
from hf_domino.decoding.static.batch_masks import batch_masks
from hf_domino.decoding.static.fixed_caches import FixedCache, set_first
from hf_domino.decoding.tree_support import TOLERANCE, distance
from hf_domino.targets.view import input_device, rounded_to

LENGTHS = (3, 5)  # positions before the block in the two sequences that a target is tried with
WIDTH = 2  # positions of the block

_tried: weakref.WeakKeyDictionary[PreTrainedModel, dict[Any, str | None]] = weakref.WeakKeyDictionary()


def why_no_batches(target: PreTrainedModel, like: Cache) -> str | None:
    """Say why a target cannot verify batches with fixed shapes; None if it can.

    Args:
        target (`PreTrainedModel`): The target.
        like (`Cache`): The static cache that `generate` has prepared.
    """
    known = _tried.setdefault(target, {})
    attention = getattr(target.config.get_text_config(decoder=True), "_attn_implementation", None)
    key = (attention, rounded_to(target), target.training)  # dropout makes logits differ
    if key not in known:
        try:
            known[key] = _try(target, like)
        except Exception as error:  # a target may raise anything on such inputs
            # This is not kept, because the next call may have what was lacking, such as memory.
            return f"the target does not take such a batch: {type(error).__name__}: {error}"
    return known[key]


@torch.no_grad()
def _try(target: PreTrainedModel, like: Cache) -> str | None:
    """Verify the ends of two texts in a batch; say how the logits differ from those of each text alone, if they do."""
    device = input_device(target)
    longest = max(LENGTHS)
    text = torch.arange(1, longest + WIDTH + 1, device=device)
    # Take tokens from all over the vocabulary: the first ones are often special tokens.
    text = text * (target.config.get_text_config().vocab_size // (len(text) + 1))
    texts = torch.stack((text, text.flip(0)))  # [2, T]
    starts = torch.tensor(LENGTHS, device=device)[:, None]
    cache = FixedCache(like, longest + WIDTH, device, len(texts))
    cache.is_batch = True
    positions = torch.arange(longest, device=device).expand(len(texts), -1)
    target(input_ids=texts[:, :longest], position_ids=positions, **{CACHE: cache}, use_cache=True)
    set_first(cache.lengths, LENGTHS)
    places = starts + torch.arange(WIDTH, device=device)
    masks = batch_masks(target, cache, starts, WIDTH)
    inputs = {"input_ids": texts.gather(1, places), "position_ids": places, CACHE: cache}
    logits = target(**inputs, attention_mask=masks, use_cache=True).logits
    for row, length in enumerate(LENGTHS):
        end = length + WIDTH
        expected = target(input_ids=texts[row : row + 1, :end], use_cache=False).logits[0, length:]
        difference = distance(logits[row], expected)
        if not difference <= TOLERANCE.get(rounded_to(target), 0.0):
            return f"the target's logits in a batch differ by {difference:.2g} standard deviations"
    return None
