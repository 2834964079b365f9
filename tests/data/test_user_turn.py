"""Where a user's turn begins and ends, whatever the template."""

from __future__ import annotations

import pytest
from builders import EOS
from chats import GENERATION, TEMPLATE, TURNS, WITH_SYSTEM, chat_tokenizer

from hf_domino.data.user_turn import find_user_turn


def opening(tokenizer, **options):
    return tokenizer.decode(find_user_turn(tokenizer, [EOS], **options).opening)


def test_the_opening_ends_where_the_users_words_would_begin(tiny_tokenizer):
    tokenizer = chat_tokenizer(tiny_tokenizer)
    turn = find_user_turn(tokenizer, [EOS, 7])
    assert tokenizer.decode(turn.opening) == "<mask>user: "
    assert turn.ends == (EOS, 7)


def test_the_default_system_turn_stands_in_front_unless_another_is_asked_for(tiny_tokenizer):
    tokenizer = chat_tokenizer(tiny_tokenizer, WITH_SYSTEM)
    assert opening(tokenizer) == "<mask>system: be brief<eos><mask>user: "
    assert opening(tokenizer, system="rhyme") == "<mask>system: rhyme<eos><mask>user: "


def test_what_ends_the_turn_may_be_what_opens_the_next(tiny_tokenizer):
    tokenizer = chat_tokenizer(tiny_tokenizer, TEMPLATE.replace("<eos>", ""))
    assert find_user_turn(tokenizer, [EOS]).ends == (tokenizer.mask_token_id, EOS)


def test_variables_reach_the_template(tiny_tokenizer):
    tokenizer = chat_tokenizer(tiny_tokenizer, "{{ mood }}" + TEMPLATE)
    assert opening(tokenizer, template_kwargs={"mood": "(calm)"}) == "(calm)<mask>user: "


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "chat template must be set, to write chats, got None. Use a chat model"),
        (TURNS + TURNS + GENERATION, "shows a user's words once"),
        ("hello" + GENERATION, "shows a user's words once"),
        (TEMPLATE.replace("<eos>", " end."), "what ends a user's turn .* must be a special token, got ' end."),
        ("{{ raise_exception('no') }}", "the chat template refuses it: no"),
    ],
    ids=["none", "twice", "never", "plain text", "raises"],
)
def test_templates_without_an_open_turn_are_refused(template, message, tiny_tokenizer):
    with pytest.raises(ValueError, match=message):
        find_user_turn(chat_tokenizer(tiny_tokenizer, template), [EOS])
