"""The entry of a drafter's repository: `generate` with its drafter, called as Transformers calls it."""

from __future__ import annotations

import pytest
import torch

from hf_domino.integration.custom_generate import generate

pytestmark = pytest.mark.transformers

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


def test_copies_from_the_text(target, saved_pair):
    prompt, options = PROMPT.repeat(1, 4), {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True}
    output = generate(target, prompt, drafter=str(saved_pair[1]), prompt_lookup_num_tokens=4, **options)
    assert torch.equal(output.sequences, target.generate(prompt, **options).sequences)
    assert output.stats.num_lookups


def test_where_no_drafter_is_named(target, saved_pair):
    with pytest.raises(ValueError, match="the name of a drafter must be that of a folder"):
        generate(target, PROMPT, drafter=str(saved_pair[0]))
    with pytest.raises(ValueError, match="drafter must be the repository of the drafter"):
        generate(target, PROMPT)
