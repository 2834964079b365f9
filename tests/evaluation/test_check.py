"""The self-test: good drafters fit, and each way of not fitting is named."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import random
import re

import pytest
import torch
from builders import build_drafter
from recorded_graphs import recorded_graphs

import hf_domino
from hf_domino import DominoDraftModel
from hf_domino.cli import main as cli
from hf_domino.cli.exits import FAILED_CHECK
from hf_domino.decoding import support
from hf_domino.evaluation import check
from hf_domino.evaluation.check import check_fit, measure, positions, prompts, verdict
from hf_domino.evaluation.check.estimate import estimate_mean
from hf_domino.evaluation.check.measure import AS_CONFIGURED, Measurement
from hf_domino.pair import domino_folder, read_prompts
from hf_domino.targets.identity import TargetIdentity
from hf_domino.training.evidence import acceptance

NUM_PROMPTS, NEW_TOKENS = 8, 16  # the first four are mostly enough
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}a:{% if enable_thinking %} think{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def held_out(pair):
    """A few of its prompts."""
    return [row["text"] for row in read_prompts(pair.folder / "prompts.jsonl")[:NUM_PROMPTS]]


def checked(pair, drafter, held_out):
    return check_fit(drafter, pair.target, pair.tokenizer, held_out, NEW_TOKENS)


# --- the bundled pair -------------------------------------------------------------------------------------------


def test_bundled_drafter_fits(pair, held_out, forward_clock):
    result = checked(pair, pair.drafter, held_out)
    assert result.fits
    assert result.causes == []
    assert result.first_rate > verdict.MIN_FIRST_RATE
    shown = str(result)
    assert "The drafter fits" in shown
    assert all(variant.name in shown for variant in result.variants)
    assert len(result.speed_ups) == 4  # prompts, of those that were asked
    assert result.speed_up > 1.5
    assert len(result.positions) == pair.drafter.config.num_draft_tokens
    first, *_, last = result.positions
    assert first.position == 1
    assert first.top_1 > last.top_1
    assert 0 < first.kl < last.kl
    assert 0 < first.total_variation < last.total_variation < 1
    assert f"{1:>8}{first.top_1:>18.2f}{first.kl:>23.2f}" in shown
    assert f"Faster than plain: {result.speed_up:.2f} x with this drafter, slower than plain in 0 of 4 prompts" in shown


@pytest.mark.slow
def test_rounds_are_told_apart_by_the_tokens_before_them(pair, held_out, forward_clock):
    ids = pair.tokenizer(held_out[:4])["input_ids"]
    long = [token for each in ids for token in each]
    long = long * (300 // len(long) + 1)
    result = check_fit(pair.drafter, pair.target, prompts=[*ids[:2], long[:300], long[:250]], max_new_tokens=24)
    assert [context.name for context in result.contexts] == ["up to 256 tokens", "up to 512 tokens"]
    assert sum(context.num_rounds for context in result.contexts) == result.measured.num_rounds
    assert [len(context.texts) for context in result.contexts] == [3, 2]  # one text has rounds of both
    assert "by the tokens before them\n  up to 256 tokens" in str(result)
    assert result.to_dict()["contexts"][1]["num_texts"] == 2
    few = check_fit(pair.drafter, pair.target, prompts=ids[:1], max_new_tokens=12)
    assert few.contexts == []


@pytest.mark.slow
def test_the_baseline_fits(pair, baseline, held_out):
    result = checked(pair, baseline, held_out)
    assert result.fits
    assert measure.WITHOUT_HEAD not in [variant.name for variant in result.variants]


@pytest.mark.slow
def test_layers_in_the_wrong_order(pair, held_out):
    wrong = pair.drafter.view(target_layer_ids=pair.drafter.config.target_layer_ids[::-1])
    result = checked(pair, wrong, held_out)
    assert not result.fits
    assert result.causes[0].name == verdict.WRONG_LAYERS
    assert str(pair.drafter.config.target_layer_ids) in result.causes[0].evidence
    assert "does not fit" in str(result)


@pytest.mark.parametrize("name", ["drafter", pytest.param("baseline", marks=pytest.mark.slow)])
def test_one_position_off(pair, held_out, name, request):
    right = pair.drafter if name == "drafter" else request.getfixturevalue(name)
    result = checked(pair, right.view(shift_label=not right.config.shift_label), held_out)
    assert [cause.name for cause in result.causes] == [verdict.WRONG_SHIFT_LABEL]  # nothing else is to be put right
    assert "read one position off" in str(result)
    assert f"with shift_label={right.config.shift_label}" in result.causes[0].evidence


@pytest.mark.slow
def test_a_file_that_does_not_tell_the_order_of_its_block(pair, baseline, held_out, tmp_path):
    """The baseline in DeepSpec's layout, whose order is the other: loaded as it is, and as the self-test says."""
    baseline.export(tmp_path, dtype=torch.float32)
    path = tmp_path / "config.json"
    stored = json.loads(path.read_text()) | {"architectures": ["Qwen3DSparkModel"], "markov_rank": 0}
    path.write_text(json.dumps(stored))
    result = checked(pair, DominoDraftModel.from_pretrained(tmp_path), held_out)
    assert result.acceptance_length < 1.1
    assert [cause.name for cause in result.causes] == [verdict.WRONG_SHIFT_LABEL]
    assert "with shift_label=False" in result.causes[0].evidence
    assert "give that shift_label to from_pretrained, or write it into its config.json" in str(result)
    right = DominoDraftModel.from_pretrained(tmp_path, shift_label=False)
    path.write_text(json.dumps(stored | {"shift_label": False}))
    assert DominoDraftModel.from_pretrained(tmp_path).config.shift_label == right.config.shift_label
    assert checked(pair, right, held_out).fits


@pytest.mark.slow
def test_head_of_another_drafter(pair, held_out):
    wrong = copy.deepcopy(pair.drafter)
    weight = wrong.embed_proj[2].weight
    torch.nn.init.normal_(weight, std=weight.std().item())
    result = checked(pair, wrong, held_out)
    assert result.causes[0].name == verdict.HARMFUL_HEAD


@pytest.mark.slow
def test_features_of_another_target(pair, held_out):
    wrong = copy.deepcopy(pair.drafter)
    torch.nn.init.normal_(wrong.fc.weight, std=wrong.fc.weight.std().item())
    TargetIdentity().record_in(wrong.config)  # as of a drafter that says nothing of its target
    result = checked(pair, wrong, held_out)
    assert result.causes[0].name == verdict.WRONG_TARGET
    known = verdict.decide(result.modes, result.variants, is_its_target=True)
    assert verdict.WRONG_TARGET not in [cause.name for cause in known.causes]


def test_untrained(pair, held_out):
    result = checked(pair, DominoDraftModel(pair.drafter.config).eval(), held_out[:1])
    assert [cause.name for cause in result.causes][:1] == [verdict.UNTRAINED]
    assert result.acceptance_length < 1.5
    assert "does not fit" in str(result)
    assert "one position off" not in str(result)


def test_speed_is_measured_in_the_storage_that_generate_uses(pair, held_out, monkeypatch):
    """On a GPU, that is slots of fixed shape; all texts share what is captured there."""
    monkeypatch.setattr(support, "uses_static_by_default", lambda input_ids: True)
    with recorded_graphs() as made:
        check_fit(pair.drafter, pair.target, pair.tokenizer, held_out[:1] * 4, NEW_TOKENS)
    assert len(made) == 2  # one for the texts, one for the speed
    assert all(graphs.num_captured for graphs in made)


def test_variants_draft_what_real_rounds_draft(pair, held_out, monkeypatch):
    """The walk from round to round over one text, with the processors of the target's generation configuration."""
    target = copy.copy(pair.target)
    target.generation_config = copy.deepcopy(target.generation_config)
    target.generation_config.repetition_penalty = 1.2
    prompt = prompts.prepare_prompts(target, pair.tokenizer, held_out[:1])[0]
    view = pair.drafter.view(draft_length="full")
    text = measure.write_text(view, target, prompt, max_new_tokens=32)
    variants, _ = measure.measure_variants(pair.drafter, target, text)
    everywhere = variants[AS_CONFIGURED]
    assert sum(variants[measure.WITHOUT_CONTEXT]) < 0.8 * sum(everywhere)
    most = pair.drafter.config.block_size  # variants leave out the last proposal, which only some of them have
    position, walked, rounds = 0, [], []
    for length in text.acceptance_lengths:
        if position < len(everywhere):
            walked.append(everywhere[position])
            rounds.append(min(length, most))
        position += length
    assert walked == rounds
    assert len(walked) > 5
    monkeypatch.setattr(acceptance, "ANCHORS_PER_FORWARD", 1)
    assert measure.measure_variants(pair.drafter, target, text)[0][AS_CONFIGURED] == everywhere


def test_distances_by_position_are_those_of_the_distributions(pair, held_out):
    """Of a draft vocabulary, against sums over all tokens; and none between equal distributions."""
    drafter = pair.drafter.restricted(range(0, pair.target.config.vocab_size, 2))
    own = 3 * torch.randn(5, pair.target.config.vocab_size)
    drafted = own[:, ::2] + torch.randn(5, own.shape[1] // 2)
    found = positions.distances(own, drafted, drafter.vocabulary)
    q = torch.zeros_like(own)
    q[:, ::2] = drafted.softmax(dim=-1)
    variation = (own.softmax(dim=-1) - q).abs().sum(dim=-1) / 2
    assert torch.allclose(found[:, 2], variation, atol=1e-5)
    within = own[:, ::2].softmax(dim=-1)
    kl = torch.nn.functional.kl_div(q[:, ::2].log(), within, reduction="none").sum(dim=-1)
    assert torch.allclose(found[:, 1], kl, atol=1e-4)
    same = positions.distances(own, own, pair.drafter.vocabulary)
    assert torch.allclose(same, torch.tensor([1.0, 0.0, 0.0]), atol=1e-5)


def test_nothing_is_changed_and_no_patch_is_needed(pair, held_out):
    before = (
        pair.drafter.config.to_dict(),
        pair.target.config.to_dict(),
        pair.target.generation_config.to_dict(),
    )
    weights = [weight.clone() for weight in pair.drafter.parameters()]
    fresh, state = copy.deepcopy(pair.drafter), torch.get_rng_state()
    hf_domino.uninstall()
    try:
        assert checked(pair, fresh, held_out[:1]).acceptance_length > 2
    finally:
        hf_domino.install()
    assert torch.equal(torch.get_rng_state(), state)
    assert (
        fresh.config.to_dict(),
        pair.target.config.to_dict(),
        pair.target.generation_config.to_dict(),
    ) == before
    assert all(torch.equal(*weights) for weights in zip(weights, fresh.parameters(), strict=True))
    with pytest.raises(RuntimeError, match=r"call model\.generate"):
        fresh.stats  # noqa: B018


@pytest.mark.parametrize(("layer_ids", "others"), [([2, 0], [[3, 1], [0, 2]]), ([2], [[3], [1]]), ([0], [[1], [2]])])
def test_variants_try_layers_beside_in_order_and_by_the_releases_rule(make_drafter, tiny_qwen3, layer_ids, others):
    variants = measure.variants_of(make_drafter(tiny_qwen3, target_layer_ids=layer_ids), 4)
    tried = [name for name, _ in variants if name.startswith(measure.LAYERS)]
    assert tried == [f"{measure.LAYERS}{other}" for other in others]


@pytest.mark.parametrize(
    ("fields", "is_tried"),
    [
        ({"projector_type": "dspark"}, True),
        ({"projector_type": "dspark", "markov_head_type": "rnn"}, False),
        ({"projector_type": "dflash2", "selector_rank": 8, "conv_group_size": 8}, True),
        ({"projector_type": "eagle3"}, False),
        ({"pure_draft_prefix_len": 5}, False),
    ],
)
def test_the_other_order_is_tried_where_there_is_one(tiny_qwen3, fields, is_tried):
    drafter = build_drafter(tiny_qwen3, **fields)
    result = check_fit(drafter, tiny_qwen3, prompts=[[5, 6]], max_new_tokens=12)
    assert (f"{measure.SHIFT_LABEL}False" in [variant.name for variant in result.variants]) == is_tried
    assert len({variant.num_rounds for variant in result.variants}) == 1


def test_wrong_sizes_are_the_compatibility_checks(make_drafter, tiny_qwen3):
    drafter = make_drafter(tiny_qwen3)
    drafter.config.vocab_size = 65
    with pytest.raises(ValueError, match="the drafter's vocab_size must be"):
        check_fit(drafter, tiny_qwen3, prompts=[[5, 6]])


# --- prompts ----------------------------------------------------------------------------------------------------


def test_a_template_that_can_think_is_asked_both_ways(tiny_qwen3, tiny_tokenizer):
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = TEMPLATE
    thinking, plain = prompts.prepare_prompts(tiny_qwen3, tokenizer, ["hi"])
    assert (thinking.mode, plain.mode) == (prompts.THINKING, prompts.NOT_THINKING)
    assert tokenizer.decode(thinking.input_ids[0]) == "user: hi a: think"
    assert tokenizer.decode(plain.input_ids[0]) == "user: hi a:"
    tokenizer.chat_template = TEMPLATE.replace("enable_thinking", "thinking is defined and false")
    ready = prompts.prepare_prompts(tiny_qwen3, tokenizer, ["hi", [{"role": "user", "content": "ho"}]])
    assert [prompt.mode for prompt in ready] == [prompts.CHAT] * 2


def test_tokenizer_saved_with_the_target(saved_pair):
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(saved_pair[0])
    assert len(prompts.prepare_prompts(target)) == prompts.NUM_BUNDLED


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "tokenizer must be given for a target that was not loaded"),
        ("one text", "prompts must be a list"),
        ([], "at least one prompt"),
        ([[]], "at least one token"),
    ],
)
def test_unusable_prompts(tiny_qwen3, tiny_drafter, given, message):
    with pytest.raises(ValueError, match=message):
        check_fit(tiny_drafter, tiny_qwen3, prompts=given)


def test_messages_without_a_template(tiny_qwen3, tiny_drafter, tiny_tokenizer):
    with pytest.raises(ValueError, match="chat template"):
        check_fit(tiny_drafter, tiny_qwen3, tiny_tokenizer, [[{"role": "user", "content": "hi"}]])


# --- the verdict ------------------------------------------------------------------------------------------------

GOOD, BAD = [4, 1, 5, 3] * 8, ([1] * 7 + [2]) * 4


def rounds(name, lengths, num_texts=4):
    """A measurement with the same rounds in every text."""
    return Measurement(name, [list(lengths)] * num_texts)


def variants(**lengths):
    names = {"configured": AS_CONFIGURED, "context": measure.WITHOUT_CONTEXT, "head": measure.WITHOUT_HEAD}
    return [rounds(names.get(name, name), values) for name, values in lengths.items()]


@pytest.mark.parametrize(
    ("speed_ups", "first", "last"),
    [
        (
            [2.0, 0.98],
            "The drafter fits: first",
            "Faster than plain: 1.40 x with this drafter, slower than plain in 1 of",
        ),
        ([0.5, 1.0], "fits, but does not make its target faster here: first", "Slower than plain: 0.71 x with this"),
        ([1.0, 1.02], "fits, but does not make its target faster here: first", "About as fast as plain: 1.01 x with"),
    ],
)
def test_a_drafter_that_fits_is_not_praised_where_it_slows_its_target(speed_ups, first, last):
    result = verdict.decide([rounds("text", GOOD)], variants(configured=GOOD, context=BAD))
    shown = str(dataclasses.replace(result, speed_ups=speed_ups)).splitlines()
    assert first in shown[0]
    assert shown[-1].startswith(last)
    assert ("generate without it" in shown[-1]) == ("but" in shown[0])


def test_a_busy_machine_is_not_the_drafters_fault():
    result = verdict.decide([rounds("text", GOOD)], variants(configured=GOOD, context=BAD))
    shown = str(dataclasses.replace(result, speed_ups=[0.5, 0.6], load=3.0)).splitlines()
    assert shown[0].startswith("The drafter fits: first")
    assert shown[-1].startswith(
        "Slower than plain: 0.55 x with this drafter, slower than plain in 2 of 2 prompts; other "
    )
    assert shown[-1].endswith("busy (load 3.0 per core), so measure again when it is idle.")


def test_wrong_chat_mode():
    modes = [rounds(prompts.THINKING, BAD), rounds(prompts.NOT_THINKING, GOOD)]
    result = verdict.decide(modes, variants(configured=GOOD, context=BAD))
    assert [cause.name for cause in result.causes] == [verdict.WRONG_MODE]
    assert re.search(r"0.12 ± 0.\d\d in 'chat, thinking'", result.causes[0].evidence)


def test_causes_come_in_order():
    better = {
        f"{measure.LAYERS}[2]": [3] * 32,
        f"{measure.SHIFT_LABEL}True": [4] * 32,
        f"{measure.LAYERS}[0]": [2] * 32,
    }
    result = verdict.decide([rounds(prompts.TEXT, BAD)], variants(configured=BAD, context=BAD, **better))
    names = [cause.name for cause in result.causes]
    assert names[:2] == [verdict.WRONG_SHIFT_LABEL, verdict.WRONG_LAYERS]
    assert "[2]" in result.causes[1].evidence


def test_undertrained_drafter_that_reads_its_context():
    result = verdict.decide([rounds("text", BAD)], variants(configured=BAD, context=[1] * 32, head=BAD))
    assert [cause.name for cause in result.causes] == [verdict.UNTRAINED]


def test_fresh_drafter_does_not_fit_even_where_it_is_accepted():
    result = verdict.decide([rounds("text", GOOD)], variants(configured=GOOD, context=GOOD), is_fresh=True)
    assert [cause.name for cause in result.causes] == [verdict.UNTRAINED]


@pytest.mark.parametrize(("lengths", "num_texts"), [([2, 2, 2], 1), ([1] * 40, 1), ([4, 1, 1] * 4, 3)])
def test_too_few_rounds_or_texts(lengths, num_texts):
    result = verdict.decide([rounds("text", lengths, num_texts)], variants(configured=GOOD, context=BAD))
    assert (result.verdict, result.fits) == (verdict.TOO_FEW, False)
    said = (
        f"Inconclusive: {len(lengths) * num_texts} rounds of {num_texts} texts are too few to say whether the drafter"
    )
    assert str(result).splitlines()[0] == f"{said} fits; give more or longer prompts."


def test_a_variant_that_is_better_by_chance_is_no_cause():
    """One text of three in which the drafter does better with another layer makes a tenth, but no certainty."""
    configured, other = [GOOD, GOOD, BAD], [GOOD, GOOD, GOOD]
    better = [Measurement(AS_CONFIGURED, configured), Measurement(f"{measure.LAYERS}[1]", other)]
    result = verdict.decide([rounds("text", GOOD)], better)
    assert (result.verdict, result.causes) == (verdict.TOO_FEW, [])
    assert "a gain of 0.71 ± 3.05" in result.doubts[0]
    certain = [Measurement(variant.name, variant.texts * 5) for variant in better]
    assert verdict.decide([rounds("text", GOOD)], certain).causes[0].name == verdict.WRONG_LAYERS


def test_errors_cover_the_truth_where_texts_differ():
    """Rounds of one text are alike: an error that took them for independent would be a fourth of this one."""
    generator = random.Random(0)
    covered = 0
    for _ in range(300):
        texts = [[generator.gauss(text, 0.5) for _ in range(40)] for text in (generator.gauss(2, 1) for _ in range(6))]
        found = estimate_mean(texts)
        covered += found.low <= 2 <= found.high
    assert 0.92 < covered / 300 < 0.98


def test_more_prompts_are_asked_until_the_verdict_is_certain(tiny_qwen3, tiny_drafter, monkeypatch):
    asked = [[5 + index, 6] for index in range(11)]
    for doubts, expected in (([], 4), (["?"], 11)):
        found = functools.partial(verdict.CheckResult, causes=[], doubts=doubts)
        monkeypatch.setattr(check, "decide", lambda modes, variants, *_, found=found: found(modes, variants))
        result = check_fit(tiny_drafter, tiny_qwen3, prompts=asked, max_new_tokens=8)
        assert {len(row.texts) for row in (*result.modes, *result.variants)} == {expected}


# --- the command ------------------------------------------------------------------------------------------------


def test_command_does_not_fit(tiny_pair_folder, tmp_path, capsys):
    rows = tmp_path / "prompts.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("import torch", "def f(x):", "class A:")))
    arguments = ["--target", str(tiny_pair_folder), "--drafter", str(domino_folder(tiny_pair_folder))]
    assert cli.main(["check", *arguments, "--prompts", str(rows)]) == FAILED_CHECK
    shown = capsys.readouterr()
    assert "does not fit" in shown.out
    assert "self-test" in shown.err  # which takes a while
