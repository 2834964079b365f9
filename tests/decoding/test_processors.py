"""Processors by the tokens they touch: bit for bit the originals, asked position by position, in any company."""

from __future__ import annotations

import random
from functools import cache, partial

import pytest
import torch
from builders import SEED, VOCAB_SIZE, build_drafter
from drafts import chain_of
from oracle import faults, tree_faults
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from hf_domino.decoding.candidates import pool_columns
from hf_domino.decoding.constraints import allows
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.sampling import TokenDistribution
from hf_domino.decoding.scores import CandidateScores
from hf_domino.targets.view import TargetModel

pytestmark = pytest.mark.transformers

V, CASES = 12, 24  # CASES: random lists, texts and logits for each kind
EOS = ([3], [1, 5], [-1], [3, V + 4])
POOL_TOLERANCE = {"rtol": 0, "atol": 1e-6}  # the same arithmetic on fewer columns


def sequences(draw):
    return {tuple(draw.choices(range(V), k=draw.choice([1, 1, 2, 2, 3, 4]))) for _ in range(draw.randint(1, 30))}


def bad_words(draw, prompts):
    return hf.NoBadWordsLogitsProcessor([list(tokens) for tokens in sequences(draw)], draw.choice([None, [3]]))


def sequence_bias(draw, prompts):
    biases = [[list(tokens), draw.choice([-torch.inf, draw.gauss(0, 3)])] for tokens in sequences(draw)]
    return hf.SequenceBiasLogitsProcessor(biases)


def less_padding(draw, prompts):
    try:
        return hf.RepetitionPenaltyLogitsProcessor(1.3, torch.tensor(draw.choices(range(9), k=len(prompts))))
    except ValueError:  # one number for all rows, in older versions
        return hf.RepetitionPenaltyLogitsProcessor(1.3, draw.randint(0, 9))


@cache
def watermark(context_width):
    return hf.WatermarkLogitsProcessor(V, "cpu", context_width=context_width)  # it draws a million numbers


KINDS = {
    "min length": lambda draw, prompts: hf.MinLengthLogitsProcessor(draw.randint(0, 14), draw.choice(EOS)),
    "min new tokens": lambda draw, prompts: hf.MinNewTokensLengthLogitsProcessor(
        draw.randint(1, 8), draw.randint(0, 6), draw.choice(EOS)
    ),
    "suppress": lambda draw, prompts: hf.SuppressTokensLogitsProcessor(draw.choices(range(V), k=draw.randint(1, 6))),
    "suppress at begin": lambda draw, prompts: hf.SuppressTokensAtBeginLogitsProcessor(
        draw.choices(range(V + 3), k=5), draw.randint(1, 12)
    ),
    "forced bos": lambda draw, prompts: hf.ForcedBOSTokenLogitsProcessor(draw.randrange(V)),
    "forced eos": lambda draw, prompts: hf.ForcedEOSTokenLogitsProcessor(
        draw.randint(1, 14), draw.choices(range(V), k=2)
    ),
    "decay": lambda draw, prompts: hf.ExponentialDecayLengthPenalty(
        (draw.randint(0, 3), draw.choice([0.7, 1.3])), [1, 3], draw.randint(1, 8)
    ),
    "penalty": lambda draw, prompts: hf.RepetitionPenaltyLogitsProcessor(draw.choice([0.7, 1.3])),
    "penalty less a start": lambda draw, prompts: hf.RepetitionPenaltyLogitsProcessor(1.3, draw.randint(0, 12)),
    "penalty less padding": less_padding,
    "prompt penalty": lambda draw, prompts: hf.EncoderRepetitionPenaltyLogitsProcessor(
        draw.choice([0.7, 1.3]), prompts
    ),
    "n-grams": lambda draw, prompts: hf.NoRepeatNGramLogitsProcessor(draw.randint(1, 4)),
    "prompt n-grams": lambda draw, prompts: hf.EncoderNoRepeatNGramLogitsProcessor(draw.randint(1, 4), prompts),
    "bad words": bad_words,
    "sequence bias": sequence_bias,
    "watermark": lambda draw, prompts: watermark(draw.choice([1, 3, 6])),
    "top k": lambda draw, prompts: hf.TopKLogitsWarper(6),
    "no infinities": lambda draw, prompts: hf.InfNanRemoveLogitsProcessor(),
    "allowed": lambda draw, prompts: hf.PrefixConstrainedLogitsProcessor(
        lambda row, ids: [(int(ids[-1]) + row) % V, 3 * len(ids) % V], 1
    ),
}
KNOWN = [kind for kind in KINDS if kind not in ("decay", "top k", "no infinities", "allowed")]


def numbers(scores):
    return torch.nan_to_num(scores, nan=77.0, posinf=88.0, neginf=-99.0)  # what torch.equal can compare


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_is_bit_for_bit_position_after_position(kind):
    draw = random.Random(kind)
    for case in range(CASES):
        torch.manual_seed(case)
        batch, num_positions = draw.randint(1, 3), draw.randint(1, 5)
        num_rows = batch + draw.randint(0, 2)  # some have ended, of which the first may be
        rows = sorted(draw.sample(range(num_rows), batch))
        lengths = [draw.randint(1, 8) for _ in range(batch)] if case % 2 else [draw.randint(1, 8)] * batch
        prompts = torch.randint(V, (num_rows, 6))
        others = [draw.choice(list(KINDS)) for _ in range(draw.randint(0, 3))]
        kinds = draw.sample([kind, *others], len(others) + 1)
        processors = LogitsProcessorList(KINDS[name](draw, prompts) for name in kinds)
        foreign = 2 * (case % 5 == 0)  # tokens of the prompt without a score
        ids = torch.randint(V + foreign, (batch, max(lengths) + draw.randint(0, 3)))
        continuation = torch.randint(V, (batch, num_positions - 1 + draw.randint(0, 2)))
        logits = (3 * torch.randn(batch, num_positions, V)).to(draw.choice([torch.float32, torch.bfloat16]))
        logits[torch.rand(logits.shape) < 0.1 * (case % 3 == 0)] = -torch.inf
        untouched = logits.clone()
        distribution = TokenDistribution(processors)
        prefixes = Prefixes(ids, lengths, rows)
        scores = distribution.scores(prefixes, logits, partial(prefixes.along, continuation, num_positions))
        assert torch.equal(logits, untouched)
        for row, index in ((row, index) for row in range(batch) for index in range(num_positions)):
            seen = continuation[row, : continuation.shape[1] - num_positions + 1 + index]
            text = torch.cat((ids[row, : lengths[row]], seen))
            constraints = [one for one in processors if isinstance(one, hf.PrefixConstrainedLogitsProcessor)]
            if not all(allows(one, rows[row], text, lengths[row]) for one in constraints):
                continue  # nobody is asked behind a token that was forbidden
            text = text.repeat(num_rows, 1)
            alone = logits[row, index].float().repeat(num_rows, 1)
            expected = processors(text, alone)[rows[row]]  # all rows as long, as in plain generation
            assert torch.equal(numbers(scores[row, index]), numbers(expected)), (kinds, case)


@pytest.mark.parametrize("kind", KNOWN)
def test_candidates_fare_as_in_the_whole_vocabulary(kind):
    draw = random.Random(kind)
    for case in range(8):
        torch.manual_seed(case)
        distribution = TokenDistribution(LogitsProcessorList([KINDS[kind](draw, torch.randint(V, (3, 6)))]))
        prefixes, base_logits = Prefixes(torch.randint(V, (2, 7)), [4, 7], [0, 1 + case % 2]), torch.randn(2, 4, V)
        columns, proposals = pool_columns(base_logits, 7, distribution, prefixes), prefixes.ids[:, :0]
        for index in range(4):
            candidates, corrected = columns[:, index], base_logits[:, index] + 0.1 * torch.randn(2, V)
            seen = partial(prefixes.along, proposals, 1)
            expected = distribution.scores(prefixes, corrected[:, None], seen)[:, 0].gather(1, candidates)
            changeable = partial(CandidateScores, vocab_size=V, token_ids=candidates)
            scores = distribution.process(corrected.gather(1, candidates), seen(), changeable)
            torch.testing.assert_close(numbers(scores), numbers(expected), **POOL_TOLERANCE)
            proposals = torch.cat((proposals, candidates[:, :1]), dim=1)  # likely tokens come up again


def test_noise_that_does_not_favour_a_likely_token_leaves_it_a_candidate():
    """Warpers go by the likely tokens, so noise only ever adds candidates."""
    base_logits = torch.tensor([[[10.0, 9.0, 0.0, -5.0]]])
    noise = torch.tensor([[[6.0, 1.0, 1.0, 1.0]]])
    distribution = TokenDistribution(LogitsProcessorList())
    prefixes = Prefixes.of(torch.zeros(1, 3, dtype=torch.long))
    assert pool_columns(base_logits, 1, distribution, prefixes, noise).tolist() == [[[0]]]


@pytest.mark.parametrize("kind", KNOWN)
def test_no_call_asks_a_known_processor(monkeypatch, tiny_qwen3, tiny_drafter, kind):
    """Neither for drafts nor for verification: that would be position by position, each from the whole vocabulary."""
    ids, asked = torch.randint(4, V, (1, 9)), []
    processor = KINDS[kind](random.Random(1), ids)
    call = type(processor).__call__
    noting = lambda self, ids, scores: asked.append(len(scores)) or call(self, ids, scores)  # noqa: E731
    monkeypatch.setattr(type(processor), "__call__", noting)
    options = {"logits_processor": LogitsProcessorList([processor]), "max_new_tokens": 12, "eos_token_id": -1}
    tiny_qwen3.generate(ids, assistant_model=tiny_drafter, do_sample=True, **options)
    assert asked in ([], [1])  # to find out what it does


class Remembering(hf.LogitsProcessor):
    """Keeps state: what it forbids depends on the texts that it was shown before."""

    def __init__(self):
        self.shown = []

    def __call__(self, input_ids, scores):
        self.shown.append(input_ids[0].tolist())
        return scores.index_fill(1, torch.tensor([len(self.shown) % 7, input_ids[0, -1]]), -torch.inf)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {}),
        ({}, {"cache_implementation": "static"}),
        ({}, {"prompt_lookup_num_tokens": 9}),
        ({"draft_tree_size": 11}, {}),
    ],
    ids=["growing", "static", "copies", "trees"],
)
def test_a_processor_with_state_sees_each_committed_position_once(tiny_qwen3, make_drafter, fields, options, do_sample):
    ids, shown, texts = torch.arange(7, 19).repeat(2)[None], [], []
    drafter = make_drafter(tiny_qwen3, **fields)
    for assisted in ({}, {"assistant_model": drafter, **options}):
        truth = texts[0].tolist() if texts else [[]]
        processor = Remembering()
        with faults(truth, VOCAB_SIZE), tree_faults(truth, VOCAB_SIZE, 11):
            torch.manual_seed(SEED)
            call = {"do_sample": do_sample, "max_new_tokens": 40, "eos_token_id": -1, "logits_processor": [processor]}
            texts.append(tiny_qwen3.generate(ids, **call, **assisted))
        shown.append(processor.shown)
    assert torch.equal(*texts)
    assert shown[0] == shown[1]
    assert max(drafter.stats.acceptance_lengths) > 3


@torch.no_grad()
def test_what_is_forced_or_lifted_is_drafted_and_what_is_banned_is_not(tiny_qwen3):
    drafter = build_drafter(tiny_qwen3, draft_pool_size=8)
    prefixes, target = Prefixes.of(torch.randint(4, 60, (2, 9))), TargetModel(tiny_qwen3)
    hidden = torch.randn(2, 6, 32)
    unlikely = int(target.logits(hidden).amax(dim=(0, 1)).argmin())
    likely = target.logits(hidden).amax(dim=(0, 1)).topk(30).indices.tolist()

    def drafted(processor):
        distribution = TokenDistribution(LogitsProcessorList([processor]))
        return chain_of(drafter, target, hidden, prefixes, distribution)

    assert drafted(hf.ForcedEOSTokenLogitsProcessor(12, [unlikely]))[:, 2].tolist() == [unlikely, unlikely]
    assert (drafted(hf.SequenceBiasLogitsProcessor([[[unlikely], 90.0]])) == unlikely).all()
    pair = [[[token, unlikely], 90.0] for token in prefixes.last()[:, 0].tolist()]
    assert drafted(hf.SequenceBiasLogitsProcessor(pair))[:, 0].tolist() == [unlikely, unlikely]
    assert not torch.isin(drafted(hf.SuppressTokensLogitsProcessor(likely)), torch.tensor(likely)).any()


@pytest.mark.parametrize("options", [{"bad_words_ids": [[5, 6]]}, {"sequence_bias": [[[5, 6], 2.0]]}], ids=str)
def test_a_prompt_of_embeddings_has_no_tokens_to_look_at(tiny_qwen3, tiny_drafter, options):
    embeds = tiny_qwen3.get_input_embeddings()(torch.randint(4, 60, (1, 9)))
    options |= {"inputs_embeds": embeds, "max_new_tokens": 9, "do_sample": False}
    plain = tiny_qwen3.generate(**options)
    assert torch.equal(tiny_qwen3.generate(assistant_model=tiny_drafter, **options), plain)


@pytest.mark.parametrize("warper", [{"eta_cutoff": 0.02}, {"top_p": 0.9}], ids=str)
def test_a_pool_whose_candidates_are_all_forbidden(tiny_qwen3, make_drafter, warper):
    ids = torch.randperm(60)[:40][None] + 4
    drafter = make_drafter(tiny_qwen3, draft_pool_size=8)
    options = {"do_sample": True, "no_repeat_ngram_size": 1, "max_new_tokens": 12, "eos_token_id": -1} | warper
    for seed in range(3):
        torch.manual_seed(seed)
        text = tiny_qwen3.generate(ids, assistant_model=drafter, **options)[0].tolist()
        assert len(set(text)) == len(text) == 52
