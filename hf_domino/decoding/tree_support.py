"""Which calls can verify trees. The target must follow a mask for each position, and position ids that go by depth.

Transformers passes a four-dimensional mask on as it is, but not every target follows it, and some targets derive
positions from columns. So the known obstacles are checked first, and then each target is tested once with a small tree.
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
from hf_domino.targets.view import input_device, rounded_to

# Model types whose attention derives its window or temperature from columns, which equal positions only in a chain.
COUNTS_COLUMNS = ("gpt_neo", "llama4_text")
# Tensors that a target may receive when it verifies trees. Masks are rearranged, token types do not change after the
# prompt, and positions, also those with several axes, grow by one with each token.
FOLLOW_TREES = (*PER_POSITION, "inputs_embeds", "logits_to_keep")
# How much the logits in a tree may differ from those in a chain: the root mean square difference, in standard
# deviations. A different order of summation causes a smaller difference, and a wrong position or mask a larger one.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.03}
NUM_TRIED = 7  # length of the text that a target is tested with

_tested: weakref.WeakKeyDictionary[PreTrainedModel, dict[Any, str | None]] = weakref.WeakKeyDictionary()


def why_chain(runner: TargetRunner, session: DraftSession) -> str | None:
    """Explain why the rounds of a call cannot propose trees; None if they can.

    Args:
        runner ([`TargetRunner`]): The runner of the target.
        session ([`DraftSession`]): The session that drafts.
    """
    text = runner.target.text_config
    if pool_size(session.drafter, session.distribution, is_tree=True) is None:
        return "logits processors that look at all tokens"
    if runner.kwargs.get("position_ids") is None:
        return "the target is not told positions"
    tensors = [name for name, value in runner.kwargs.items() if isinstance(value, torch.Tensor)]
    if unknown := [name for name in tensors if name not in FOLLOW_TREES]:
        return f"the target reads {unknown[0]}"
    # A new cache is checked, too, because an empty cache of the caller has no layers yet, and because the layers of a
    # fixed cache, whose classes are all the same, say less about the target.
    if kind := unalignable(DynamicCache(config=text)) or (not session.executor.is_fixed and unalignable(runner.cache)):
        return f"a cache with {kind}"
    attention = getattr(text, "_attn_implementation", "eager")
    if attention not in ("eager", "sdpa"):
        return f"{attention} attention"
    if text.model_type in COUNTS_COLUMNS:
        return f"attention of {text.model_type} goes by columns"
    known = _tested.setdefault(runner.target.model, {})
    target = runner.target.model
    key = (attention, rounded_to(target), target.training)  # in training mode, dropout makes the logits differ
    if key not in known:
        try:
            known[key] = _test_tree(target)
        except Exception as error:  # a target can raise anything for such inputs
            # This is not kept, because the next call may have what was lacking, such as memory.
            return f"the target does not take trees: {type(error).__name__}: {error}"
    return known[key]


def _test_tree(target: PreTrainedModel) -> str | None:
    """Run the target on a text as a chain and as a path of a tree; explain the problem if the logits differ."""
    device = input_device(target)
    positions = torch.arange(NUM_TRIED, device=device)[None]
    # The tokens are spread over the vocabulary. The first ids are often special tokens, after which logits in 16 bits
    # are unreliable.
    chain = (positions + 1) * (target.config.get_text_config().vocab_size // (NUM_TRIED + 2))
    # Below the anchor, token 1, the path 2, 3, 4, 5 is the text. The wrong token 6 is a sibling of 2, of 3 and of 4.
    order = [1, 6, 2, 6, 3, 6, 4, 5]
    parents = [0, 0, 2, 2, 4, 4, 6]
    tree = Tree(chain[:, order[1:]], torch.tensor([parents], device=device))
    expected = target(input_ids=chain, position_ids=positions, use_cache=False).logits[:, 1:6]
    cache = DynamicCache(config=target.config)
    target(input_ids=chain[:, :1], position_ids=positions[:, :1], **{CACHE: cache}, use_cache=True)
    inputs = {"input_ids": chain[:, order], "position_ids": positions[:, 1:], CACHE: cache}
    logits = target(**tree_inputs(tree.depths, tree.sees, inputs, target), use_cache=True).logits
    right = [place for place, index in enumerate(order) if index != 6]
    difference = distance(logits[0, right][1:], expected[0, 1:])
    if not difference <= TOLERANCE.get(rounded_to(target), 0.0):
        return f"the target's logits in a tree differ by {difference:.2g} standard deviations"
    return None


def distance(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """The RMS difference of two sets of logits `[N, V]` in standard deviations, as the median over the positions."""
    expected = expected.double()
    return float(((logits.double() - expected).square().mean(dim=1).sqrt() / expected.std(dim=1)).median())
