"""Where a user's turn begins and ends, whatever the template."""

from __future__ import annotations

import pytest
from builders import EOS
from chats import GENERATION, TEMPLATE, TURNS, WITH_SYSTEM, chat_tokenizer

from hf_domino.data.self_written import find_user_turn

pytestmark = pytest.mark.transformers


@pytest.mark.parametrize(
    ("template", "system", "kwargs", "expected", "end"),
    [
        (TEMPLATE, None, {}, "<mask>user: ", "<eos>"),
        (WITH_SYSTEM, None, {}, "<mask>system: be brief<eos><mask>user: ", "<eos>"),
        (WITH_SYSTEM, "rhyme", {}, "<mask>system: rhyme<eos><mask>user: ", "<eos>"),
        (TEMPLATE.replace("<eos>", ""), None, {}, "<mask>user: ", "<mask>"),  # which opens the next turn
        ("{{ mood }}" + TEMPLATE, None, {"mood": "(calm)"}, "(calm)<mask>user: ", "<eos>"),
    ],
)
def test_the_opening_ends_where_the_users_words_would_begin(template, system, kwargs, expected, end, tiny_tokenizer):
    tokenizer = chat_tokenizer(tiny_tokenizer, template)
    opening, ends = find_user_turn(tokenizer, [EOS, 7], system, kwargs)
    assert tokenizer.decode(opening) == expected
    assert ends == tuple(dict.fromkeys((tokenizer.convert_tokens_to_ids(end), EOS, 7)))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "prompts must be given for a target without a chat template, which cannot write its own, got None"),
        (TURNS + TURNS + GENERATION, "shows a user's words once"),
        ("hello" + GENERATION, "shows a user's words once"),
        (TEMPLATE.replace("<eos>", " end."), "what ends a user's turn .* must be a special token, got ' end."),
        ("{{ raise_exception('no') }}", "the chat template rejects it: no"),
    ],
    ids=["none", "twice", "never", "plain text", "raises"],
)
def test_templates_without_an_open_turn_are_refused(template, message, tiny_tokenizer):
    with pytest.raises(ValueError, match=message):
        find_user_turn(chat_tokenizer(tiny_tokenizer, template), [EOS], None, {})
