"""Which calls can verify trees: the target must follow a mask for each position, and positions that go by depth.

Transformers takes a four-dimensional mask as it is, but not every target follows it, and some count positions by
columns. So what is known is asked first, and then each target is tried once.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from hf_domino._common.cache_name import CACHE
from hf_domino.decoding.caches import PER_POSITION, unalignable
from hf_domino.decoding.candidates import pool_size
from hf_domino.decoding.drafting import DraftSession
from hf_domino.decoding.runner import TargetRunner
from hf_domino.decoding.tree import Tree, tree_inputs
from hf_domino.target.view import input_device, rounded_to

# Attention whose window or temperature goes by columns, which are positions in a chain only.
COUNTS_COLUMNS = ("gpt_neo", "llama4_text")
# Tensors that a target may read: masks are rearranged, token types stay the same behind the prompt, and positions, of
# several axes too, go up by one with each token.
FOLLOW_TREES = (*PER_POSITION, "inputs_embeds", "logits_to_keep")
# How far the logits of a right tree may be from a chain's: their root mean square difference, in standard deviations.
# Another order of sums makes less than that, and a wrong position or mask makes more.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.03}
NUM_TRIED = 7  # tokens of the text that a target is tried with

_tried: weakref.WeakKeyDictionary[PreTrainedModel, dict[Any, str | None]] = weakref.WeakKeyDictionary()


def why_chain(runner: TargetRunner, session: DraftSession) -> str | None:
    """Why a call's rounds cannot propose trees; None where nothing stands against these.

    Args:
        runner ([`TargetRunner`]): Runs the target.
        session ([`DraftSession`]): Drafts.
    """
    text = runner.target.text_config
    if pool_size(session.drafter, session.distribution, is_tree=True) is None:
        return "logits processors that look at all tokens"
    if runner.kwargs.get("position_ids") is None:
        return "the target is not told positions"
    tensors = [name for name, value in runner.kwargs.items() if isinstance(value, torch.Tensor)]
    if unknown := [name for name in tensors if name not in FOLLOW_TREES]:
        return f"the target reads {unknown[0]}"
    # An empty cache of the caller's has no layers yet, and layers of fixed shape say less.
    if kind := unalignable(DynamicCache(config=text)) or (not session.executor.is_fixed and unalignable(runner.cache)):
        return f"a cache with {kind}"
    attention = getattr(text, "_attn_implementation", "eager")
    if attention not in ("eager", "sdpa"):
        return f"{attention} attention"
    if text.model_type in COUNTS_COLUMNS:
        return f"attention of {text.model_type} goes by columns"
    known = _tried.setdefault(runner.target.model, {})
    target = runner.target.model
    key = (attention, rounded_to(target), target.training)  # dropout makes logits differ
    if key not in known:
        known[key] = _try(target)
    return known[key]


def _try(target: PreTrainedModel) -> str | None:
    """Verify a text as a chain and as a branch of a tree; why not, where the logits are others."""
    device = input_device(target)
    positions = torch.arange(NUM_TRIED, device=device)[None]
    # From all over the vocabulary: the first ones are often special tokens, of which 16 bits make any distribution.
    chain = (positions + 1) * (target.config.get_text_config().vocab_size // (NUM_TRIED + 2))
    # Behind the first token a wrong one follows the next three; the text goes on beside them.
    order = [1, 6, 2, 6, 3, 6, 4, 5]
    parents = [0, 0, 2, 2, 4, 4, 6]
    tree = Tree(chain[:, order[1:]], torch.tensor([parents], device=device))
    try:
        expected = target(input_ids=chain, position_ids=positions, use_cache=False).logits[:, 1:6]
        cache = DynamicCache(config=target.config)
        target(input_ids=chain[:, :1], position_ids=positions[:, :1], **{CACHE: cache}, use_cache=True)
        inputs = {"input_ids": chain[:, order], "position_ids": positions[:, 1:], CACHE: cache}
        logits = target(**tree_inputs(tree.depths, tree.sees, inputs, target), use_cache=True).logits
    except Exception as error:  # whatever a target makes of such inputs
        return f"the target does not take trees: {type(error).__name__}: {error}"
    right = [place for place, index in enumerate(order) if index != 6]
    difference = distance(logits[0, right][1:], expected[0, 1:])
    if not difference <= TOLERANCE.get(rounded_to(target), 0.0):
        return f"the target's logits in a tree differ by {difference:.2g} standard deviations"
    return None


def distance(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """How far logits `[N, V]` are from others: their root mean square difference in standard deviations, the median."""
    expected = expected.double()
    return float(((logits.double() - expected).square().mean(dim=1).sqrt() / expected.std(dim=1)).median())
