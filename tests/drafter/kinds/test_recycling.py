"""Token recycling (arXiv 2408.08696): the table and the trees, written out beside the package."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from rounds import PROMPTS, TEMPERATURE, calls, generate, noise_of

import hf_domino
from hf_domino.decoding.recycling import RecyclingSession
from hf_domino.training.arguments import DominoTrainingArguments
from hf_domino.training.trainer import DominoTrainer

SUCCESSORS = 8
SAMPLED = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0}
KINDS = {"trees": {"draft_tree_size": 24}, "chains": {"draft_tree_size": None}}


@pytest.fixture
def drafter(wide):
    return hf_domino.recycling(wide, draft_length="full").double()


@contextlib.contextmanager
def seen_by(target):
    """Scores of each token's successors, from what goes through the target behind its first forward."""
    table, forwards = {}, []

    def watch(module, args, kwargs, outputs):
        forwards.append(kwargs["input_ids"])
        if len(forwards) > 1:  # the first is the prompt's
            read(table, kwargs["input_ids"], outputs.logits)

    handle = target.register_forward_hook(watch, with_kwargs=True)
    yield table
    handle.remove()


def read(table, input_ids, logits):
    found = {}
    for token, row in zip(input_ids.flatten().tolist(), logits.flatten(0, 1).tolist(), strict=True):
        order = sorted(range(len(row)), key=lambda each: -row[each])
        found.setdefault(token, {each: row[each] for each in order[:SUCCESSORS]})
    table.update(found)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_plain_and_the_table_holds_what_the_target_gave_last(wide, drafter, kind, batch_size, do_sample):
    drafter, (ids, options) = drafter.view(**KINDS[kind]), calls(batch_size)
    options |= SAMPLED if do_sample else {}
    plain = generate(wide, None, ids, **options)
    with seen_by(wide) as table:
        assert torch.equal(generate(wide, drafter, ids, **options), plain)
    assert max(length for row in drafter.stats.rows for length in row) > 1
    assert len(table) > 10
    for token in range(wide.config.vocab_size):
        successors, scores = drafter.successors[token].tolist(), drafter.scores[token]
        assert scores.isneginf().all() if token not in table else successors == list(table[token])
        if token in table:
            torch.testing.assert_close(scores, torch.tensor(list(table[token].values())).double())
    first = sum(len(row) for row in drafter.stats.rows)
    assert torch.equal(generate(wide, drafter, ids, **options), plain)
    if not do_sample and batch_size == 1:  # what one call has seen serves the next
        assert sum(len(row) for row in drafter.stats.rows) < first


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_tree_is_the_likeliest_paths_of_the_table(wide, drafter, monkeypatch, rounds, do_sample):
    tables, lanes = [], RecyclingSession._lanes

    def keep(self, *args, **kwargs):
        tables.append((drafter.successors.clone(), drafter.scores.clone()))
        return lanes(self, *args, **kwargs)

    monkeypatch.setattr(RecyclingSession, "_lanes", keep)
    trees, (ids, options) = drafter.view(draft_tree_size=5, block_size=3), calls(1)
    generate(wide, trees, ids, **options, **(SAMPLED if do_sample else {}))
    assert trees.stats.chain is None
    noise, num_compared = noise_of(1, wide.config.vocab_size), 0
    for (_, text, paths, alpha), (successors, scores) in zip(rounds, tables, strict=True):
        step = len(text) - len(PROMPTS[0])
        divisor, found = TEMPERATURE if do_sample else 1.0, {}
        for path, chance in paths.items():
            expected = 1.0
            for depth, (before, token) in enumerate(zip((text[-1], *path), path, strict=False)):
                raced = alpha * scores[before] / divisor
                if do_sample:
                    raced = raced - noise[step + depth, 0, successors[before]].log()
                place = successors[before].tolist().index(token)
                expected *= float(raced.softmax(dim=-1).nan_to_num(0.0)[place])
            found[path] = expected
            assert chance == pytest.approx(expected, rel=1e-5)
            num_compared += expected > 0
        # None of the first depth that was left out is likelier than the least of the tree.
        raced = alpha * scores[text[-1]] / divisor
        raced = raced - noise[step, 0, successors[text[-1]]].log() if do_sample else raced
        left_out = [
            chance
            for token, chance in zip(successors[text[-1]].tolist(), raced.softmax(dim=-1).tolist(), strict=True)
            if (token,) not in paths
        ]
        if len(paths) == 5:
            assert max(left_out) <= min(found.values()) + 1e-9
    assert num_compared > 20


def test_a_second_turn_and_a_rewound_cache_write_plain_text(wide, drafter):
    first = generate(wide, drafter, PROMPTS[0][None], return_dict_in_generate=True)
    kept = copy.deepcopy(first.past_key_values)
    kept.crop(-9)
    for cache, length in ((first.past_key_values, 100), (kept, kept.get_seq_length())):
        for options in ({}, SAMPLED):
            ids = torch.cat((first.sequences[:, :length], PROMPTS[1][None]), dim=1)
            past = copy.deepcopy(cache)
            found = generate(wide, drafter, ids, past_key_values=past, **options)
            assert torch.equal(found, generate(wide, None, ids, **options))


def test_it_copies_from_the_text_too(wide, drafter):
    ids = torch.arange(5, 15).repeat(3)[None]
    with hf_domino.shadow(share=1.0) as report:
        generate(wide, drafter.view(draft_length="adaptive"), ids, prompt_lookup_num_tokens=5)
    assert (report.num_calls, report.mismatches) == (1, [])


def test_it_serves_a_pacer_and_processors(wide, drafter):
    ids, options = calls(3)
    for more in ({"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, SAMPLED | {"top_p": 0.8}):
        found = generate(wide, drafter.view(draft_length="adaptive"), ids, **options, **more)
        assert torch.equal(found, generate(wide, None, ids, **options, **more))


@pytest.mark.parametrize(
    ("use", "feature"),
    [
        (lambda drafter, target, folder: drafter.save_pretrained(folder), "save_pretrained"),
        (lambda drafter, target, folder: drafter.push_to_hub("someone/it"), "save_pretrained"),
        (lambda drafter, target, folder: drafter.export(folder), "export"),
        (lambda drafter, target, folder: hf_domino.check_fit(drafter, target), "check_fit"),
        (lambda drafter, target, folder: hf_domino.explain_round(drafter, target, PROMPTS[0][None]), "explain_round"),
        (
            lambda drafter, target, folder: generate(target, drafter, PROMPTS[0][None], cache_implementation="static"),
            "cache_implementation='static'",
        ),
        (
            lambda drafter, target, folder: DominoTrainer(
                drafter, target, DominoTrainingArguments(str(folder), report_to="none", use_cpu=True)
            ),
            "training",
        ),
    ],
)
def test_what_it_lacks_is_refused_by_name(wide, drafter, tmp_path, use, feature):
    with pytest.raises(ValueError, match=f"the drafter's kind with {feature} must be .*got 'token recycling'"):
        use(drafter, wide, tmp_path / "out")


def test_an_attached_target_refuses_it(wide, drafter):
    target = copy.deepcopy(wide)
    hf_domino.uninstall()
    try:
        hf_domino.attach(target)
        with pytest.raises(ValueError, match="the drafter's kind with attach must be"):
            generate(target, drafter, PROMPTS[0][None])
    finally:
        hf_domino.install()


def test_the_command_does_not_train_it(recipe, train, capsys):
    fields = {name: value for name, value in recipe.items() if name not in ("num_hidden_layers", "shift_label")}
    assert train(fields | {"projector_type": "recycling"}) == 2
    assert "the drafter's kind with training must be" in capsys.readouterr().err


def test_the_other_rule_is_refused(drafter):
    with pytest.raises(ValueError, match="acceptance_rule of a token recycling drafter must be coupled"):
        drafter.view(acceptance_rule="residual")
