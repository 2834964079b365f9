"""Pacing: blocks end where drafts stop paying, drafting stops where it loses, and the output stays the target's."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest
import torch
from oracle import oracle
from transformers import LogitsProcessorList

from hf_domino.decoding import loop
from hf_domino.decoding import rollout as rollout_module
from hf_domino.decoding.noise.steps import OwnNoise
from hf_domino.decoding.pacing import pacer as pacing
from hf_domino.decoding.pacing.blocks import ConfidentBlock
from hf_domino.decoding.pacing.estimates import Acceptance
from hf_domino.decoding.pacing.pacer import EXPLORE_EVERY, Pacer, pacer_for
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.prompt_lookup import PromptLookup
from hf_domino.decoding.sampling import TokenLaw, choose
from hf_domino.decoding.verification import CoupledRule
from hf_domino.target.view import TargetModel

STEP, SLOPE, DRAFT = 1.0, 0.05, 0.6  # seconds of a single step, of one proposal more, of drafting at all


def scores_of(confidence, vocab_size=50):
    """Scores `[1, V]` of a law whose likeliest token has this probability."""
    rest = math.log((1 - confidence) / (vocab_size - 1))
    return torch.tensor([[math.log(confidence)] + [rest] * (vocab_size - 1)])


def simulate(pacer, confidences, num_accepted, clock=lambda seconds: seconds):
    """One round on a machine of known costs; returns how many tokens it proposed and the seconds it took."""
    block = pacer.begin_round(1)
    length = block.choose_length(len(confidences))
    if length and block.goes_on is not None:
        going_on = (block.goes_on(index, scores_of(confidence)) for index, confidence in enumerate(confidences))
        length = next((index for index, goes_on in enumerate(going_on, 1) if not goes_on), len(confidences))
    seconds = STEP + (DRAFT + SLOPE * length if length else 0.0)
    pacer.observe(block, [min(num_accepted, length) + 1], clock(seconds))
    return length, seconds


@pytest.fixture(params=[None, 8], ids=["by confidence", "by position"])
def num_positions(request):
    return request.param


@pytest.fixture(params=[True, False], ids=["timed", "nominal"])
def pacer(request, num_positions):
    return Pacer(num_positions, is_timed=request.param)


@pytest.mark.parametrize("is_timed", [True, False])
def test_blocks_end_where_drafts_are_unsure(is_timed):
    pacer = Pacer(None, is_timed)
    for index in range(60):  # sure drafts are right, unsure ones are wrong
        sure = index % 2
        simulate(pacer, [0.99] * 8 if sure else [0.15] * 8, 8 if sure else 0)
    assert simulate(pacer, [0.99] * 8, 8)[0] == 8
    assert simulate(pacer, [0.15] * 8, 0)[0] < 3
    assert simulate(pacer, [0.99] * 3 + [0.15] * 5, 3)[0] < 7


@pytest.mark.parametrize("is_timed", [True, False])
def test_blocks_end_at_positions_that_are_hardly_reached(is_timed):
    pacer = Pacer(8, is_timed)
    lengths = [simulate(pacer, [0.5] * 8, 3)[0] for _ in range(200)]
    assert statistics.median(lengths[-EXPLORE_EVERY:]) == 4
    assert 8 in lengths[-EXPLORE_EVERY - 3 :]  # a whole one now and then
    lengths = [simulate(pacer, [0.5] * 8, 8)[0] for _ in range(400)]
    assert lengths[-20:].count(8) >= 19


def test_a_hopeless_drafter_costs_little(pacer):
    seconds = tokens = 0
    while tokens < 256:
        seconds, tokens = seconds + simulate(pacer, [0.3] * 8, 0)[1], tokens + 1
    assert seconds < 1.03 * 256 * STEP


def test_a_drafter_that_pays_is_hardly_interrupted(num_positions):
    interruptions = []
    for seed in range(8):
        pacer, generator = Pacer(num_positions, is_timed=True), random.Random(seed)
        for _ in range(256):
            accepted, hiccup = generator.choice([0, 0, 1, 1, 2, 3, 5, 8]), generator.choice([0.9] + [1.0] * 8 + [2.5])
            length, _ = simulate(pacer, [0.8] * 8, accepted, lambda seconds, hiccup=hiccup: hiccup * seconds)
            interruptions.append(length == 0)
    assert statistics.fmean(interruptions) < 0.04  # 6 of 256 are the steps that are made to compare with


def spiky(draws):
    return lambda seconds: seconds * (draws.choice([3, 5, 10]) if draws.random() < 0.15 else 1)


def drifting(draws):
    levels = [0.0]

    def clock(seconds):
        levels.append(min(max(levels[-1] + draws.gauss(0, 0.12), -0.2), 1.8))
        return seconds * math.exp(levels[-1])

    return clock


def of_two_speeds(draws):
    factors = [1, 3]

    def clock(seconds):
        if draws.random() < 0.08:
            factors.reverse()
        return seconds * factors[0]

    return clock


def heavy_tailed(draws):
    return lambda seconds: seconds * (math.exp(abs(draws.gauss(0, 0.5))) + 0.3 * (draws.paretovariate(1.2) - 1))


def preempted(draws):
    """Others take a slice now and then, the likelier the longer something runs."""

    def clock(seconds):
        left, total = seconds, seconds
        while (left := left - draws.expovariate(1.25)) > 0:
            total += draws.choice([0.3, 0.4, 0.8, 1.2])
        return total

    return clock


def run_text(num_positions, accuracy, make_clock, seed, num_tokens=256):
    """Speed over plain decoding and share of single steps, for a text with easy and hard passages."""
    pacer, draws = Pacer(num_positions, is_timed=True), random.Random(seed)
    clock, num_rounds, num_steps, tokens, total = make_clock(random.Random(seed)), 0, 0, 0, 0.0
    while tokens < num_tokens:
        ease = accuracy + 0.5 * (draws.random() - 0.5) if accuracy else 0.0
        confidences = [min(max(ease + draws.gauss(0, 0.1), 0.05), 0.95) for _ in range(8)]
        misses = (index for index, chance in enumerate(confidences) if draws.random() > (chance if accuracy else 0.0))
        accepted = next(misses, 8)
        length, seconds = simulate(pacer, confidences, accepted, clock)
        tokens, total = tokens + min(accepted, length) + 1, total + seconds
        num_rounds, num_steps = num_rounds + 1, num_steps + (length == 0)
    return tokens / total / STEP, num_steps / num_rounds


def test_a_first_pause_is_short_whatever_the_clock_says(num_positions):
    """Rounds that wait for a busy machine, as threads do for each other, may cost many single steps for a while."""
    pacer, busy, lengths = Pacer(num_positions, is_timed=True), [True], []
    for _ in range(80):
        length, _ = simulate(pacer, [0.9] * 8, 3, lambda seconds: seconds * (20 if busy[0] and seconds > STEP else 1))
        busy[0] = busy[0] and lengths.count(0) < 8
        lengths.append(length)
    assert 0 in lengths
    first = lengths.index(0, 6)
    assert sum(lengths[first : first + pacing.PAUSE + 8]) > 0
    assert min(lengths[-20:]) > 0  # and is over when the machine is free again


SEEDS = range(8)
CLOCKS = (spiky, drifting, of_two_speeds, heavy_tailed, preempted)


@pytest.mark.parametrize("make_clock", CLOCKS)
def test_a_good_drafter_is_not_paused_by_a_noisy_clock(num_positions, make_clock):
    quiet = [run_text(num_positions, 0.8, lambda draws: lambda seconds: seconds, seed)[0] for seed in SEEDS]
    noisy = [run_text(num_positions, 0.8, make_clock, seed) for seed in SEEDS]
    assert min(quiet) > 1.3
    assert all(speed > 0.75 * calm for (speed, _), calm in zip(noisy, quiet, strict=True))
    assert statistics.fmean(speed for speed, _ in noisy) > 0.88 * statistics.fmean(quiet)
    assert statistics.fmean(share for _, share in noisy) < 0.15  # 5 of about 80 rounds are there to compare with


@pytest.mark.parametrize("make_clock", CLOCKS)
def test_a_bad_drafter_costs_little_on_a_noisy_clock(num_positions, make_clock):
    untrained = [run_text(num_positions, 0.0, make_clock, seed) for seed in SEEDS]
    assert min(speed for speed, _ in untrained) > 0.92
    assert statistics.fmean(speed for speed, _ in untrained) > 0.955
    mediocre = [run_text(num_positions, 0.35, make_clock, seed)[0] for seed in SEEDS]
    assert statistics.fmean(mediocre) > 0.92


def test_drafting_comes_back_when_the_text_gets_easy(pacer):
    for _ in range(40):
        simulate(pacer, [0.3] * 8, 0)
    lengths = [simulate(pacer, [0.98] * 8, 8)[0] for _ in range(400)]
    assert lengths[-50:].count(8) >= 49


def test_knowledge_is_kept_between_calls_that_choose_alike(tiny_qwen3, tiny_drafter):
    tiny_drafter.config.draft_length = "adaptive"
    pacer = pacer_for(tiny_drafter, tiny_qwen3, 5, False, True)
    assert pacer_for(tiny_drafter, tiny_qwen3, 5, False, True) is pacer
    assert pacer_for(tiny_drafter, tiny_qwen3, 3, False, True) is not pacer  # shorter blocks cost less
    sampling = pacer_for(tiny_drafter, tiny_qwen3, 5, True, True)
    assert pacer_for(tiny_drafter, tiny_qwen3, 5, True, True) is sampling is not pacer


def test_the_residual_rule_learns_nothing_from_the_clock(tiny_qwen3, make_drafter, monkeypatch):
    """Nor from earlier calls: what it drafts changes the text, and a seed is to give the same one again."""
    drafter, texts = make_drafter(tiny_qwen3, draft_length="adaptive", acceptance_rule="residual"), []
    for step in (0.0, 1.0, -1.0):
        ticks = itertools.accumulate(itertools.repeat(1.0), lambda now, _, step=step: now + 2 + step * math.sin(now))
        monkeypatch.setattr(loop.time, "perf_counter", ticks.__next__)
        torch.manual_seed(5)
        options = {"do_sample": True, "max_new_tokens": 60, "eos_token_id": -1}
        texts.append(tiny_qwen3.generate(torch.arange(5, 25)[None], assistant_model=drafter, **options).tolist())
    assert texts[0] == texts[1] == texts[2]


@pytest.fixture
def clock(monkeypatch):
    """A clock on which drafting loses every now and then, so that all kinds of rounds occur."""
    ticks = iter(range(10**9))

    def now():
        tick = next(ticks)
        return tick + 3.0 * math.sin(tick / 7)

    monkeypatch.setattr(loop.time, "perf_counter", now)
    monkeypatch.setattr(pacing, "PAUSE", 3)


@pytest.fixture(params=[True, False], ids=["by confidence", "by position"])
def by_confidence(request, monkeypatch):
    if not request.param:  # as where the host cannot read confidences
        monkeypatch.setattr(loop, "pacer_for", lambda *arguments, **options: Pacer(6, is_timed=True))


@pytest.mark.usefixtures("by_confidence", "clock")
@pytest.mark.parametrize(
    ("projector_type", "batch_size", "accuracy"),
    [("domino", 1, 0.95), ("domino", 3, 0.0), ("dflash", 3, 0.6)],
)
def test_output_is_the_targets(tiny_qwen3, make_drafter, projector_type, batch_size, accuracy):
    drafter = make_drafter(tiny_qwen3, projector_type=projector_type, draft_length="adaptive")
    prompts = torch.randint(4, 64, (batch_size, 11))
    options = {"do_sample": False, "max_new_tokens": 60, "eos_token_id": -1}
    plain = tiny_qwen3.generate(prompts, **options)
    proposed = []
    with oracle(tiny_qwen3, prompts, accuracy, plain):
        for _ in range(2):
            assert torch.equal(tiny_qwen3.generate(prompts, assistant_model=drafter, **options), plain)
            stats = drafter.stats
            for counts, lengths in zip(stats.proposed, stats.rows, strict=True):
                assert all(length <= count + 1 for count, length in zip(counts, lengths, strict=True))
                proposed += counts
    assert {0, drafter.config.num_draft_tokens} <= set(proposed)
    assert stats.num_single_steps == sum(counts.count(0) for counts in stats.proposed)


def test_what_is_learnt_of_a_round_is_not_cut_where_the_text_ends(tiny_qwen3, make_drafter, monkeypatch):
    drafter, learnt = make_drafter(tiny_qwen3, draft_length="adaptive"), []
    for place in (Pacer, PromptLookup):
        monkeypatch.setattr(place, "observe", lambda self, block, counts, *_: learnt.append(counts))
    prompt, options = torch.randint(4, 64, (1, 11)), {"do_sample": False, "max_new_tokens": 2, "eos_token_id": -1}
    with oracle(tiny_qwen3, prompt, 1.0, **(options | {"max_new_tokens": 20})):
        tiny_qwen3.generate(prompt, assistant_model=drafter, **options)
    assert drafter.stats.rows == [[1]]
    assert learnt == [[drafter.stats.proposed[0][0] + 1]] * 2
    assert learnt[0][0] > 2


def test_a_text_is_judged_by_itself(num_positions):
    pacer = Pacer(num_positions, is_timed=True)
    for _ in range(100):
        simulate(pacer, [0.3] * 8, 0)
    pacer.begin_call()
    lengths = [simulate(pacer, [0.98] * 8, 8)[0] for _ in range(50)]
    assert lengths.count(0) <= 1


def test_a_machine_that_slows_down_is_not_the_drafters_fault(num_positions):
    pacer, generator = Pacer(num_positions, is_timed=True), random.Random(0)
    lengths = []
    for index in range(400):
        slower = 1.0 if index < 150 else 2.5
        accepted = generator.choice([1, 2, 2, 3])
        lengths.append(simulate(pacer, [0.8] * 8, accepted, lambda seconds, slower=slower: slower * seconds)[0])
    assert lengths.count(0) < 20


def test_a_clock_that_stands_still(num_positions):
    pacer = Pacer(num_positions, is_timed=True)
    for index in range(60):
        block = pacer.begin_round(1)
        pacer.observe(block, [1 + index % 2 if block.choose_length(8) else 1], 0.0)
        assert 0 < pacer.cost(1) < math.inf
        assert 0 <= pacer.price(1) < math.inf


@torch.no_grad()
@pytest.mark.parametrize("draft_pool_size", [None, 3])
@pytest.mark.parametrize("noise", [None, OwnNoise(), "shared"], ids=["greedy", "own", "shared"])
def test_a_block_knows_the_proposals_that_were_made(monkeypatch, tiny_qwen3, make_drafter, draft_pool_size, noise):
    """A guess that missed is taken back."""
    drafter = make_drafter(tiny_qwen3, draft_pool_size=draft_pool_size, block_size=9)
    torch.nn.init.normal_(drafter.embed_proj[2].weight, std=2.0)
    monkeypatch.setattr(rollout_module, "EXACT_POOL_SIZE", 3)
    target, lengths, law = TargetModel(tiny_qwen3, drafter.config), set(), TokenLaw(LogitsProcessorList())
    for _ in range(20):
        hidden, prefixes = torch.randn(2, 9, 32), Prefixes.of(torch.randint(4, 64, (2, 5)))
        block = ConfidentBlock(Acceptance.by_confidence(), price=0.2, num_rows=2)
        drawn_with = torch.empty(2, 9, 64).exponential_() if noise == "shared" else noise
        proposals = rollout_module.rollout(drafter, target, hidden, prefixes, law, drawn_with, goes_on=block.goes_on)
        assert block.length == proposals.shape[1]
        assert [len(kinds) for kinds in block.kinds()] == [block.length] * 2
        lengths.add(block.length)
    assert len(lengths) > 2


def test_blocks_end_by_the_noise_of_their_draws_too():
    """What the noise decides, no draft can lose."""
    told, prefixes, scores = [], Prefixes.of(torch.zeros(2, 3).long()), torch.randn(2, 64)
    rule = CoupledRule(TokenLaw(LogitsProcessorList()), do_sample=True)
    rule.begin(prefixes, 64)
    rule.begin_round(prefixes, 3)
    rule.listener(lambda index, scores, candidates: told.append(scores) or True)(1, scores, None)
    assert torch.equal(told[0].argmax(dim=-1), choose(scores, rule.draft_noise[:, 1]))
    rule.end(0)
