"""Drafters as users have them: compiled, on parallel devices, adapted; and of a vocabulary with another padding."""

from __future__ import annotations

import pytest
import torch
from builders import TINY, VOCAB_SIZE, build_drafter
from peft import LoraConfig, get_peft_model
from test_integration import NEW_TOKENS, PROMPT
from torch.nn import DataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import hf_domino

OPTIONS = {"do_sample": False, "max_new_tokens": NEW_TOKENS}
WRAPPERS = {
    "compiled": torch.compile,
    "parallel": DataParallel,
    "compiled in parallel": lambda drafter: DataParallel(torch.compile(drafter)),
    "parallel, compiled": lambda drafter: torch.compile(DataParallel(drafter)),
    "adapted, compiled": lambda drafter: torch.compile(get_peft_model(drafter, LoraConfig(target_modules=["fc"]))),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_wrapped_drafter_drafts_as_the_one_inside(tiny_llama, wrap):
    drafter, plain = build_drafter(tiny_llama), tiny_llama.generate(PROMPT, **OPTIONS)
    assert torch.equal(tiny_llama.generate(PROMPT, assistant_model=drafter, **OPTIONS), plain)
    rounds = drafter.stats.num_rounds
    assert torch.equal(tiny_llama.generate(PROMPT, assistant_model=wrap(drafter), **OPTIONS), plain)
    assert drafter.stats.num_rounds == rounds


def test_a_wrapped_drafter_is_checked_and_refused_as_a_target_as_the_one_inside(tiny_llama):
    wrapped = DataParallel(build_drafter(tiny_llama))
    report = hf_domino.check_fit(wrapped, tiny_llama, prompts=[[4, 5, 6], [7, 8]], max_new_tokens=4)
    assert report.verdict
    assert hf_domino.explain_round(wrapped, tiny_llama, PROMPT).committed
    with pytest.raises(ValueError, match=r"device must be one that holds its weights, got 'meta"):
        tiny_llama.generate(PROMPT, assistant_model=torch.compile(build_drafter(tiny_llama).to("meta")), **OPTIONS)


# Of a drafter: fields, the tokens that it proposes, and whether a row of its weights is of each token.
DRAFTERS = {
    "DFlash": ({"projector_type": "dflash"}, None, False),
    "DFlash of some tokens": ({"projector_type": "dflash"}, 40, False),
    "Domino": ({}, None, True),
    "Domino of some tokens": ({}, 40, False),
    "EAGLE-3 of some tokens": ({"projector_type": "eagle3", "own_lm_head": True}, 40, False),
    "EAGLE-3 with embeddings of its own": ({"projector_type": "eagle3", "own_embeddings": True}, 40, True),
}


@pytest.fixture(scope="module")
def wide_llama():
    """A target of eight layers, with more tokens than the drafters' vocabulary has."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**TINY | {"vocab_size": VOCAB_SIZE + 16, "num_hidden_layers": 8})).eval()


@pytest.mark.parametrize("own", [VOCAB_SIZE, VOCAB_SIZE + 32], ids=["fewer", "more"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_vocabulary_that_differs_by_padding(wide_llama, name, own):
    fields, some, is_counted = DRAFTERS[name]
    drafter = build_drafter(wide_llama, vocab_size=own, **fields)
    drafter = drafter if some is None else drafter.restricted(range(3, some))
    plain = wide_llama.generate(PROMPT, **OPTIONS)
    if is_counted:
        with pytest.raises(ValueError, match=rf"vocab_size must be 80 .* got {own}\. Load the .* use ") as error:
            wide_llama.generate(PROMPT, assistant_model=drafter, **OPTIONS)
        assert drafter.config.vocab_size == own
        if name == "Domino":
            small = drafter.restricted(range(min(own - 1, 80)))
            assert f"drafter.restricted(range({min(own - 1, 80)}))" in str(error.value)
            assert torch.equal(wide_llama.generate(PROMPT, assistant_model=small, **OPTIONS), plain)
        return
    for options in ({}, {"draft_tree_size": 12}, {"draft_tree_size": None}):
        view = drafter.view(**options)
        assert torch.equal(wide_llama.generate(PROMPT, assistant_model=view, **OPTIONS), plain)
    torch.manual_seed(1)
    sampled = wide_llama.generate(PROMPT, do_sample=True, max_new_tokens=8)
    torch.manual_seed(1)
    assert torch.equal(wide_llama.generate(PROMPT, do_sample=True, max_new_tokens=8, assistant_model=drafter), sampled)
    copied = wide_llama.generate(PROMPT, assistant_model=drafter, prompt_lookup_num_tokens=4, **OPTIONS)
    assert torch.equal(copied, plain)


def test_tokens_that_a_smaller_target_does_not_have(wide_llama):
    fields = {"projector_type": "dflash", "vocab_size": VOCAB_SIZE + 32}
    drafter = build_drafter(wide_llama, **fields).restricted([3, 90])
    with pytest.raises(ValueError, match=r"the drafter's d2t must be of ids in \[0, 79\] .* got 'ids from 3 to 90'"):
        wide_llama.generate(PROMPT, assistant_model=drafter, **OPTIONS)
    masked = build_drafter(wide_llama, mask_token_id=85, **fields)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"mask_token_id must be in \[0, 79\] \(vocab_size=80\), got 85"):
            wide_llama.generate(PROMPT, assistant_model=masked, **OPTIONS)
