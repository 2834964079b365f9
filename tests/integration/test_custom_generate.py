"""The entry of a drafter's repository: `generate` with its drafter, called as Transformers calls it."""

from __future__ import annotations

import functools
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from hf_domino import DominoDraftModel, check_fit
from hf_domino.integration.custom_generate import generate

PROMPT = torch.tensor([[5, 9, 33, 20, 7, 41]])


@pytest.mark.parametrize("field", ["eos_token_id", "stop_strings", "prompt_lookup_num_tokens"])
def test_none_overrides_a_default(target, saved_pair, tiny_tokenizer, field):
    options = {"max_new_tokens": 16, "do_sample": False, "tokenizer": tiny_tokenizer}
    plain = target.generate(PROMPT, **options)
    defaults = {
        "eos_token_id": int(plain[0, 9]),
        "stop_strings": tiny_tokenizer.decode(plain[0, 9:10]),
        "prompt_lookup_num_tokens": 0,  # refused, were it not overridden
    }
    setattr(target.generation_config, field, defaults[field])
    assert torch.equal(generate(target, PROMPT, drafter=str(saved_pair[1]), **options, **{field: None}), plain)


@pytest.fixture
def own(saved_pair, tmp_path):
    """A target whose repository has this code, and the drafter in a folder, as Transformers loads it."""
    folder = shutil.copytree(saved_pair[0], tmp_path / "target")
    shutil.copytree(saved_pair[1], folder / "drafter")
    target = AutoModelForCausalLM.from_pretrained(folder)
    target.generate = functools.partial(generate, model=target)
    return target


def test_the_targets_own_repository(own, target, saved_pair):
    options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": -1, "return_dict_in_generate": True}
    plain = target.generate(PROMPT, **options).sequences
    for args, kwargs in (
        ((), {"inputs": PROMPT, **options}),
        ((), {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT), **options}),
        ((PROMPT,), options),
        ((PROMPT, GenerationConfig(**options)), {}),
        ((PROMPT, GenerationConfig(**options, stop_strings="nowhere")), {"tokenizer": None, "stop_strings": None}),
        ((PROMPT,), {**options, "drafter": str(saved_pair[1])}),
    ):
        output = own.generate(*args, **kwargs)
        assert torch.equal(output.sequences, plain)
        assert 0 < output.stats.num_rounds < 16


def test_another_loop_than_the_targets_own(own):
    """Asked for by the caller, and by what measures drafters."""
    found = own.generate(PROMPT, custom_generate=lambda model, input_ids, **kwargs: input_ids + 1)
    assert torch.equal(found, PROMPT + 1)
    drafter = DominoDraftModel.from_pretrained(own.name_or_path, subfolder="drafter")
    assert check_fit(drafter, own, prompts=[[5, 6], [7, 8]], max_new_tokens=12).measured.num_rounds


def test_a_repository_without_a_drafter(own, saved_pair):
    with pytest.raises(ValueError, match=r"the name of a drafter must be .*, or in its folder 'drafter'"):
        own.generate(PROMPT, drafter=str(saved_pair[0]))
    own.name_or_path = ""
    with pytest.raises(ValueError, match="drafter must be the repository of the drafter"):
        own.generate(PROMPT)
