"""What calls can do, with the reasons for what they cannot: rounds of fixed shape, trees, and batches of fixed shape.

[`choose_storage`] decides once a call where the keys and values of the target are kept: in layers that grow, or in
slots, with which all shapes are fixed. Nothing else decides that by the option of the call or by the device.

Trees and batches of fixed shape need masks that Transformers does not make: for each position of a tree, or for each
sequence of a batch, other columns. Transformers passes a four-dimensional mask on as it is, but it does not say whether
a target follows it, and some targets derive positions from columns. So the known obstacles are checked first, and then
each target is tried once with a few tokens.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

from hf_domino._common.cache_name import CACHE
from hf_domino._common.errors import invalid_argument, invalid_field
from hf_domino._common.notices import logger
from hf_domino.decoding.alignment import unalignable
from hf_domino.decoding.call import Call
from hf_domino.decoding.candidates import pool_size
from hf_domino.decoding.drafting import DraftSession
from hf_domino.decoding.runner import TargetRunner
from hf_domino.decoding.static.batch_masks import batch_masks
from hf_domino.decoding.static.fixed_cache import FixedCache, set_first, unfixable
from hf_domino.decoding.tree import Tree, tree_inputs
from hf_domino.targets.view import GROWING_ROPE_TYPES, PER_POSITION, input_device, ropes_of, rounded_to

# The attention of these targets derives its window, or its slice of a table of limited size, from the length of the
# cache's tensors. In a cache of fixed shape, that is not the length of the text.
READS_CACHE_LENGTH = ("gpt_neo", "mpt")
# Model types whose attention derives its window or temperature from columns, which equal positions only in a chain.
COUNTS_COLUMNS = ("gpt_neo", "llama4_text")
# Tensors that a target may receive when it verifies trees. Masks are rearranged, token types do not change after the
# prompt, and positions, also those with several axes, grow by one with each token.
FOLLOW_TREES = (*PER_POSITION, "inputs_embeds", "logits_to_keep")
# How much the logits with such a mask may differ from those of a text alone: the root mean square difference, in
# standard deviations. A different order of summation causes a smaller difference, and a wrong position or mask a larger
# one.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.03}
TREE_LENGTH = 7  # of the text that a target is tried with
BATCH_LENGTHS = (3, 5)  # positions before the block in the two sequences that a target is tried with
BATCH_WIDTH = 2  # positions of the block

# What trials of targets have found, by the question and by whatever else the answer depends on.
_tried: weakref.WeakKeyDictionary[PreTrainedModel, dict[Hashable, str | None]] = weakref.WeakKeyDictionary()


def uses_static_by_default(input_ids: torch.Tensor) -> bool:
    """Whether rounds run in fixed shape by default: on a GPU, where they would wait for kernel launches."""
    return input_ids.is_cuda


def choose_storage(call: Call) -> Call:
    """Decide whether the rounds of a call have fixed shapes, and return the call with its storage.

    They do if the call names a static cache. Otherwise they do where that is the default and the call can have it; if
    it cannot, the reason becomes `why_growing`.

    Args:
        call ([`Call`]): The call, as `generate` prepared it.

    Raises:
        ValueError: If the call names a static cache that it cannot have, or if its sequences cannot be aligned in the
            cache that it has.
    """
    config = call.config
    cache = call.model_kwargs[CACHE]
    if config.cache_implementation == "static":
        check_fixed(call)
        return replace(call, is_fixed=True)
    why_growing = None
    if config.cache_implementation is None and uses_static_by_default(call.input_ids):
        why_growing = "the call passed a cache of its own"
        if not getattr(cache, "_is_user_defined", False):
            fixed = _in_slots(call)
            try:
                check_fixed(fixed)
                return fixed
            except ValueError as error:
                if invalid_field(error) is None:
                    raise
                why_growing = str(error)
    if config.compile_config is not None and not config.disable_compile:
        logger.warning_once(
            "hf_domino compiles nothing without cache_implementation='static': compile_config is ignored."
        )
    if call.batch_size > 1 and (kind := unalignable(cache)):
        remedy = "Generate the prompts one at a time."
        raise invalid_argument("the target's cache", "made of dynamic attention layers, for a batch", kind, remedy)
    return replace(call, why_growing=why_growing)


def _in_slots(call: Call) -> Call:
    """The call in fixed shape, if it does not say which cache it wants."""
    config = call.config
    if config.compile_config is None:
        config = copy.copy(config)
        config.disable_compile = True  # compiling takes a minute, so only calls that name a static cache get it
    text_config = call.model.config.get_text_config(decoder=True)
    cache = StaticCache(config=text_config, max_cache_len=1)  # for the types of its layers
    return replace(call, config=config, model_kwargs=call.model_kwargs | {CACHE: cache}, is_fixed=True)


def in_growing_layers(call: Call, why: str) -> Call:
    """The call after its slots turned out to take more memory than there is."""
    cache = DynamicCache(config=call.model.config.get_text_config(decoder=True))
    cache._is_user_defined = False
    return replace(call, model_kwargs=call.model_kwargs | {CACHE: cache}, is_fixed=False, why_growing=why)


def check_fixed(call: Call) -> None:
    """Raise an error if rounds of fixed shape do not support the drafter, the target, the inputs or the outputs."""
    target = call.model
    config = call.config
    cache = call.model_kwargs[CACHE]
    call.drafter.config.check_supports("cache_implementation='static'")
    static = "with cache_implementation='static'"
    remedy = "Leave cache_implementation unset."
    text = target.config.get_text_config(decoder=True)
    kinds = {rope.get("rope_type") for rope in ropes_of(target)}
    if text.model_type in READS_CACHE_LENGTH:
        expected = f"none of {READS_CACHE_LENGTH}, whose attention goes by the length of the cache"
        raise invalid_argument(f"the target's model_type {static}", expected, text.model_type, remedy)
    if cache_part := unfixable(cache):
        raise invalid_argument(f"the target's layers {static}", "attention layers", cache_part, remedy)
    if growing := [kind for kind in GROWING_ROPE_TYPES if kind in kinds]:
        raise invalid_argument(f"the target's rope_type {static}", "one of fixed frequencies", growing[0], remedy)
    attention = getattr(text, "_attn_implementation", "eager")
    if attention not in ("eager", "sdpa"):
        raise invalid_argument(f"the target's attn_implementation {static}", "'sdpa' or 'eager'", attention, remedy)
    if len(devices := set(getattr(target, "hf_device_map", {}).values())) > 1:
        raise invalid_argument(f"the target's devices {static}", "one", sorted(map(str, devices)), remedy)
    if torch.is_autocast_enabled(device := input_device(target).type):
        # Buffers have one dtype for all calls, and graphs replay the products that they have captured.
        remedy = "Leave cache_implementation unset, or load both models in that dtype in place of torch.autocast."
        raise invalid_argument(f"torch.autocast {static}", "off", torch.get_autocast_dtype(device), remedy)
    for field in ("output_hidden_states", "output_attentions"):
        if config.return_dict_in_generate and getattr(config, field):
            raise invalid_argument(f"{field} {static}", False, True, remedy)
    if call.batch_size == 1:
        return
    if config.prefill_chunk_size is not None:
        remedy = "Prompts of a batch go through in one forward; leave one of the two unset."
        raise invalid_argument(f"prefill_chunk_size of a batch {static}", None, config.prefill_chunk_size, remedy)
    mask = call.model_kwargs.get("attention_mask")
    is_padded_left = mask is None or bool(
        (mask[:, -1] != 0).all() and ((mask[:, 1:] != 0) >= (mask[:, :-1] != 0)).all()
    )
    if not is_padded_left:
        raise invalid_argument(f"attention_mask of a batch {static}", "zeros on the left alone", "others", remedy)
    if (reason := why_no_batches(target, cache)) is not None:
        raise invalid_argument(f"the batch size {static}", 1, call.batch_size, f"As {reason}: {remedy.lower()}")


class Support:
    """Finds out whether the rounds of a call can propose trees, when that is first asked.

    Args:
        runner ([`TargetRunner`]): The runner of the target.
        session ([`DraftSession`]): The session that drafts.
    """

    def __init__(self, runner: TargetRunner, session: DraftSession):
        self._runner = runner
        self._session = session
        self.why_chain: str | None = None  # why rounds cannot propose trees, if that was asked

    @cached_property
    def takes_trees(self) -> bool:
        """Whether rounds can propose trees."""
        self.why_chain = why_chain(self._runner, self._session)
        return self.why_chain is None

    def may_plan_trees(self) -> bool:
        """Whether rounds can plan trees, which the drafter then grows."""
        # A drafter that learns while it drafts proposes nothing at first. Its first tree is due when a tree has grown
        # branches, and only then is the target tried with one, because that takes as long as a few plain decode steps.
        learns = self._session.drafter.config.learns_while_drafting
        return (learns and "takes_trees" not in vars(self)) or self.takes_trees


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
    # A new cache is checked, too, because an empty cache of the caller has no layers yet, and because slots, which are
    # the same for all layers, say nothing about the target.
    if kind := unalignable(DynamicCache(config=text)) or runner.storage.unalignable():
        return f"a cache with {kind}"
    attention = getattr(text, "_attn_implementation", "eager")
    if attention not in ("eager", "sdpa"):
        return f"{attention} attention"
    if text.model_type in COUNTS_COLUMNS:
        return f"attention of {text.model_type} goes by columns"
    return _tried_once(runner.target.model, "trees", _try_tree)


def why_no_batches(target: PreTrainedModel, like: Cache) -> str | None:
    """Say why a target cannot verify batches with fixed shapes; None if it can.

    Its attention must follow a mask `[B, 1, W, S]` that differs between sequences, and it must use the positions that
    it is given.

    Args:
        target (`PreTrainedModel`): The target.
        like (`Cache`): The static cache that `generate` has prepared.
    """
    return _tried_once(target, "such a batch", lambda target: _try_batch(target, like))


def _tried_once(target: PreTrainedModel, what: str, trial: Callable[[PreTrainedModel], str | None]) -> str | None:
    """Return what an earlier trial of a target has found; if there was none, try it now."""
    known = _tried.setdefault(target, {})
    attention = getattr(target.config.get_text_config(decoder=True), "_attn_implementation", None)
    key = (what, attention, rounded_to(target), target.training)  # in training mode, dropout makes the logits differ
    if key not in known:
        try:
            known[key] = trial(target)
        except Exception as error:  # a target can raise anything for such inputs
            # This is not kept, because the next call may have what was lacking, such as memory.
            return f"the target does not take {what}: {type(error).__name__}: {error}"
    return known[key]


def _try_tree(target: PreTrainedModel) -> str | None:
    """Run the target on a text as a chain and as a path of a tree; explain the problem if the logits differ."""
    positions = torch.arange(TREE_LENGTH, device=input_device(target))[None]
    chain = (positions + 1) * _spread(target, TREE_LENGTH + 1)
    # Below the anchor, token 1, the path 2, 3, 4, 5 is the text. The wrong token 6 is a sibling of 2, of 3 and of 4.
    order = [1, 6, 2, 6, 3, 6, 4, 5]
    parents = [0, 0, 2, 2, 4, 4, 6]
    tree = Tree(chain[:, order[1:]], torch.tensor([parents], device=chain.device))
    expected = target(input_ids=chain, position_ids=positions, use_cache=False).logits[:, 1:6]
    cache = DynamicCache(config=target.config)
    target(input_ids=chain[:, :1], position_ids=positions[:, :1], **{CACHE: cache}, use_cache=True)
    inputs = {"input_ids": chain[:, order], "position_ids": positions[:, 1:], CACHE: cache}
    logits = target(**tree_inputs(tree.depths, tree.sees, inputs, target), use_cache=True).logits
    right = [place for place, index in enumerate(order) if index != 6]
    return _difference(target, "in a tree", logits[0, right][1:], expected[0, 1:])


@torch.no_grad()
def _try_batch(target: PreTrainedModel, like: Cache) -> str | None:
    """Verify the ends of two texts in a batch; say how the logits differ from those of each text alone, if they do."""
    device = input_device(target)
    longest = max(BATCH_LENGTHS)
    num_tokens = longest + BATCH_WIDTH
    text = torch.arange(1, num_tokens + 1, device=device) * _spread(target, num_tokens)
    texts = torch.stack((text, text.flip(0)))  # [2, T]
    starts = torch.tensor(BATCH_LENGTHS, device=device)[:, None]
    cache = FixedCache(like, num_tokens, device, len(texts))
    cache.is_batch = True
    positions = torch.arange(longest, device=device).expand(len(texts), -1)
    target(input_ids=texts[:, :longest], position_ids=positions, **{CACHE: cache}, use_cache=True)
    set_first(cache.lengths, BATCH_LENGTHS)
    places = starts + torch.arange(BATCH_WIDTH, device=device)
    masks = batch_masks(target, cache, starts, BATCH_WIDTH)
    inputs: dict[str, Any] = {"input_ids": texts.gather(1, places), "position_ids": places, CACHE: cache}
    logits = target(**inputs, attention_mask=masks, use_cache=True).logits
    for row, length in enumerate(BATCH_LENGTHS):
        end = length + BATCH_WIDTH
        expected = target(input_ids=texts[row : row + 1, :end], use_cache=False).logits[0, length:]
        if (reason := _difference(target, "in a batch", logits[row], expected)) is not None:
            return reason
    return None


def _spread(target: PreTrainedModel, num_tokens: int) -> int:
    """The distance between token ids that are spread over the vocabulary. The first ids are often special tokens."""
    # After special tokens, logits in 16 bits are unreliable.
    return target.config.get_text_config().vocab_size // (num_tokens + 1)


def _difference(target: PreTrainedModel, where: str, logits: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Say how far logits `[N, V]` differ from the expected ones, as a median over positions; None if they do not."""
    expected = expected.double()
    distances = (logits.double() - expected).square().mean(dim=1).sqrt() / expected.std(dim=1)
    difference = float(distances.median())
    if not difference <= TOLERANCE.get(rounded_to(target), 0.0):
        return f"the target's logits {where} differ by {difference:.2g} standard deviations"
    return None
