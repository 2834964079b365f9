"""What EAGLE-3 proposes is what its formulas say, in every way a call can go."""

from __future__ import annotations

import copy

import pytest
import torch
from calls_of_methods import NEW_TOKENS, PROMPTS, SAMPLED, calls, generate, noise_of
from formulas import OPTIONS, PATHS_TOL, Formula, build, steps_of
from oracle import faults

from hf_domino import DominoDraftModel


@pytest.fixture(params=OPTIONS)
def drafter(wide, request):
    return build(wide, request.param)


def drawing(do_sample, target, batch_size):
    """Options of a call, and what plain generation draws with."""
    return (SAMPLED, noise_of(batch_size, target.config.vocab_size)) if do_sample else ({}, None)


@pytest.mark.parametrize(("batch_size", "do_sample"), [(1, False), (3, True)])
def test_a_chain(wide, drafter, rounds, batch_size, do_sample):
    ids, options = calls(batch_size)
    more, noise = drawing(do_sample, wide, batch_size)
    plain = generate(wide, None, ids, **options, **more)
    with faults(plain.tolist(), wide.config.vocab_size):
        assert torch.equal(generate(wide, drafter.view(draft_tree_size=None), ids, **options, **more), plain)
    reference = Formula(drafter, wide)
    for row, text, proposals, _ in rounds[:: 1 + batch_size]:
        count = len(proposals)
        assert proposals == reference.chain(text, steps_of(noise, row, text), count)
    assert len(rounds) > 8


@pytest.mark.parametrize(("batch_size", "do_sample"), [(1, False), (3, True)])
def test_a_tree_is_the_likeliest_paths(wide, drafter, rounds, batch_size, do_sample):
    ids, options = calls(batch_size)
    more, noise = drawing(do_sample, wide, batch_size)
    trees = drafter.view(draft_tree_size=7)
    assert torch.equal(generate(wide, trees, ids, **options, **more), generate(wide, None, ids, **options, **more))
    assert trees.stats.chain is None
    reference, num_whole = Formula(drafter, wide), 0
    for row, text, paths, alpha in rounds[:: 2 + batch_size]:
        if len(paths) < 7 or max(map(len, paths)) > 4 or len(text) + 4 > len(PROMPTS[row]) + NEW_TOKENS:
            continue  # near its end a row has fewer nodes, as has one whose branches would not pay
        expected = reference.likeliest(*reference.begin(text), alpha, steps_of(noise, row, text), 7)
        assert paths.keys() == expected.keys()
        assert paths == {path: pytest.approx(chance, rel=PATHS_TOL) for path, chance in expected.items()}
        num_whole += 1
    assert num_whole > 3


def test_the_context_is_right_in_a_second_turn_and_behind_a_rewind(wide, drafter, rounds):
    chains = drafter.view(draft_tree_size=None)
    first = generate(wide, chains, PROMPTS[0][None], return_dict_in_generate=True)
    kept = copy.deepcopy(first.past_key_values)
    kept.crop(-9)
    reference = Formula(drafter, wide)
    for cache, length in ((first.past_key_values, 100), (kept, kept.get_seq_length())):
        ids = torch.cat((first.sequences[:, :length], PROMPTS[1][None]), dim=1)
        rounds.clear()
        assert torch.equal(generate(wide, chains, ids, past_key_values=cache), generate(wide, None, ids))
        for _, text, proposals, _ in rounds[::6]:
            assert proposals == reference.chain(text, None, len(proposals))


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"draft_length": "adaptive"}, {}),
        ({"draft_length": "adaptive", "draft_tree_size": None}, {"repetition_penalty": 1.3}),
        ({"draft_tree_size": 7}, {"no_repeat_ngram_size": 2, "min_new_tokens": 9, "eos_token_id": 5}),
        ({}, {"prefill_chunk_size": 2}),
        ({}, {"prompt_lookup_num_tokens": 3}),
    ],
)
def test_other_ways_to_draft_write_plain_text(wide, fields, options):
    ids, more = calls(1 if "prefill_chunk_size" in options else 3)
    alone = {key: value for key, value in options.items() if key != "prompt_lookup_num_tokens"} | more
    found = generate(wide, build(wide, "whole").view(**fields), ids, **options, **more)
    assert torch.equal(found, generate(wide, None, ids, **alone))


def test_a_draft_vocabulary(wide, rounds, tmp_path):
    for name in ("plain", "whole"):
        small = build(wide, name).restricted(range(3, 40)).view(draft_tree_size=None)
        rounds.clear()
        assert torch.equal(generate(wide, small, PROMPTS[0][None]), generate(wide, None, PROMPTS[0][None]))
        for _, text, proposals, _ in rounds[::4]:
            assert proposals == Formula(small, wide).chain(text, None, len(proposals))
        small.save_pretrained(tmp_path / name, custom_generate=True)
        loaded = DominoDraftModel.from_pretrained(tmp_path / name)
        assert {key: value.tolist() for key, value in loaded.state_dict().items()} == {
            key: value.tolist() for key, value in small.state_dict().items()
        }
        options = {"custom_generate": str(tmp_path / name), "trust_remote_code": True}
        ids = PROMPTS[0][None]
        assert torch.equal(generate(wide, None, ids, **options), generate(wide, None, ids))
