"""Sampling through `generate` follows the target's law, whatever the drafter proposes (chi-square, tiny vocabulary)."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from transformers import LlamaConfig, LlamaForCausalLM

import hf_domino

VOCAB, SAMPLES = 12, 1500
BATCHED_SAMPLES = {20: 2000, 500: 100_000}
PROMPT = torch.tensor([[5, 9, 3]])
# One test in a thousand of a correct sampler falls below; the seed is fixed, so it does not flicker.
P_VALUE = 1e-3
RULES = {
    "coupled": {},
    "residual": {"acceptance_rule": "residual"},
    "residual, greedy drafts": {"acceptance_rule": "residual", "draft_law": "greedy"},
}


@pytest.fixture(scope="module")
def target():
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}
    torch.manual_seed(4)
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **tokens, initializer_range=0.4)).eval()


def truncated(logits, top_k, temperature):
    logits = logits / temperature
    kept = logits.topk(top_k).indices
    return torch.full_like(logits, -torch.inf).scatter(-1, kept, logits.gather(-1, kept)).softmax(dim=-1)


@torch.no_grad()
def exact_law(target, top_k, temperature):
    """P(second and third new token), `[V * V]`: the first comes from the prompt alone, later ones from rounds."""
    tokens = torch.arange(VOCAB)
    first = truncated(target(PROMPT).logits[:, -1], top_k, temperature)[0]  # [V]
    one = torch.cat((PROMPT.expand(VOCAB, -1), tokens[:, None]), dim=1)
    second = truncated(target(one).logits[:, -1], top_k, temperature)  # [V, V]
    two = torch.cat((one.repeat_interleave(VOCAB, 0), tokens.repeat(VOCAB)[:, None]), dim=1)
    third = truncated(target(two).logits[:, -1], top_k, temperature).view(VOCAB, VOCAB, VOCAB)
    return torch.einsum("a,ab,abc->bc", first, second, third).flatten()


def p_value(counts, law):
    """Chi-square p-value; cells expected fewer than five times are pooled, impossible ones must be empty."""
    assert counts[law == 0].sum() == 0
    expected = law * counts.sum()
    rare = expected < 5
    observed = [*counts[~rare].tolist(), counts[rare].sum().item()]
    wanted = [*expected[~rare].tolist(), expected[rare].sum().item()]
    if wanted[-1] < 5:
        observed[-2:], wanted[-2:] = [sum(observed[-2:])], [sum(wanted[-2:])]
    return stats.chisquare(observed, [value * sum(observed) / sum(wanted) for value in wanted]).pvalue


@pytest.mark.parametrize(
    ("entry", "top_k", "temperature"), [("install", 5, 0.7), ("install", VOCAB, 1.0), ("attach", 5, 0.7)]
)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.slow  # in CI in batches
def test_samples_follow_the_targets_law(target, make_drafter, entry, top_k, temperature, rule):
    if entry == "attach":
        hf_domino.uninstall()
        hf_domino.attach(target)
    drafter = make_drafter(target, block_size=4, num_hidden_layers=1, **RULES[rule])
    options = {"do_sample": True, "top_k": top_k, "temperature": temperature, "max_new_tokens": 4}
    counts, rates = torch.zeros(VOCAB * VOCAB), []
    torch.manual_seed(7)
    try:
        for _ in range(SAMPLES):
            text = target.generate(PROMPT, assistant_model=drafter, **options)[0, PROMPT.shape[1] :]
            counts[text[1] * VOCAB + text[2]] += 1
            rates.append(drafter.stats.acceptance_lengths[0])
    finally:
        hf_domino.detach(target)
        hf_domino.install()
    least = 1.02 if "greedy" in rule else 1.1  # the likeliest draft is hardly ever the target's choice here
    assert least < sum(rates) / len(rates) < 2.5  # both accepted and rejected drafts were there
    assert p_value(counts, exact_law(target, top_k, temperature).double()) > P_VALUE


IN_CI = [(20, rule) for rule in RULES]
BY_HAND = [(500, rule) for rule in RULES]


@pytest.mark.parametrize(
    ("batch_size", "rule"), [*IN_CI, *(pytest.param(*case, marks=pytest.mark.slow) for case in BY_HAND)]
)
def test_batches_follow_the_targets_law(target, make_drafter, batch_size, rule):
    """Rows of a batch are independent draws; drafts are drawn from their candidate pool, or the most likely ones."""
    sizes = {"block_size": 4, "num_hidden_layers": 1, "draft_pool_size": VOCAB // 2}
    drafter = make_drafter(target, **sizes, **RULES[rule])
    options = {"do_sample": True, "top_k": 5, "temperature": 0.7, "max_new_tokens": 4}
    counts, lengths = torch.zeros(VOCAB * VOCAB), set()
    torch.manual_seed(7)
    for _ in range(BATCHED_SAMPLES[batch_size] // batch_size):
        rows = target.generate(PROMPT, assistant_model=drafter, num_return_sequences=batch_size, **options)
        text = rows[:, PROMPT.shape[1] :]
        counts += torch.bincount(text[:, 1] * VOCAB + text[:, 2], minlength=VOCAB * VOCAB)
        lengths |= {rounds[0] for rounds in drafter.stats.rows}
    assert len(lengths) > 1  # accepted and rejected drafts were there
    assert p_value(counts, exact_law(target, 5, 0.7).double()) > P_VALUE


def test_attached_texts_end_as_often_as_the_target_ends_them(target, make_drafter):
    """A drafted end of text is judged like every other draft: cut off before that, texts end too seldom."""
    ends, calls = [0, 2, 4, 6, 8, 10], 700
    drafter = make_drafter(target, block_size=4, num_hidden_layers=1, acceptance_rule="residual")
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 3, "eos_token_id": ends, "pad_token_id": 1}
    hf_domino.uninstall()
    hf_domino.attach(target)
    torch.manual_seed(7)
    try:
        texts = [target.generate(PROMPT, assistant_model=drafter, **options)[0, 3:].tolist() for _ in range(calls)]
    finally:
        hf_domino.detach(target)
        hf_domino.install()
    longer = [text for text in texts if text[0] not in ends]
    ended = sum(len(text) > 1 and text[1] in ends for text in longer)
    assert stats.binomtest(ended, len(longer), ends_second(target, ends)).pvalue > P_VALUE


@torch.no_grad()
def ends_second(target, ends):
    """P(the second new token ends the text | the first does not)."""
    first = target(PROMPT).logits[0, -1].softmax(dim=-1)  # [V]
    going_on = torch.ones(VOCAB, dtype=torch.bool)
    going_on[ends] = False
    one = torch.cat((PROMPT.expand(VOCAB, -1), torch.arange(VOCAB)[:, None]), dim=1)
    second = target(one).logits[:, -1].softmax(dim=-1)[:, ends].sum(dim=-1)  # [V]
    return ((first * second)[going_on].sum() / first[going_on].sum()).item()
