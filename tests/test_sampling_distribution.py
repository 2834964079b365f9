"""Sampling through `generate` follows the target's distribution, whatever the drafter proposes: chi-square."""

from __future__ import annotations

import pytest
import torch
from chance import chi_square
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 12
BATCHED_SAMPLES = {100: 2000, 500: 100_000}
PROMPT = torch.tensor([[5, 9, 3]])
# One test in a thousand of a correct sampler falls below; the seed is fixed, so it does not flicker.
P_VALUE = 1e-3


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


def p_value(counts, distribution):
    """Chi-square p-value; cells expected fewer than five times are pooled, impossible ones must be empty."""
    assert counts[distribution == 0].sum() == 0
    expected = distribution * counts.sum()
    rare = expected < 5
    observed = [*counts[~rare].tolist(), counts[rare].sum().item()]
    wanted = [*expected[~rare].tolist(), expected[rare].sum().item()]
    if wanted[-1] < 5:
        observed[-2:], wanted[-2:] = [sum(observed[-2:])], [sum(wanted[-2:])]
    wanted = [value * sum(observed) / sum(wanted) for value in wanted]
    return chi_square(torch.tensor(observed), torch.tensor(wanted))


@pytest.mark.parametrize("batch_size", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_batches_follow_the_targets_law(target, make_drafter, batch_size):
    """Rows of a batch are independent draws; drafts are drawn from their candidate pool."""
    drafter = make_drafter(target, block_size=4, num_hidden_layers=1, draft_pool_size=VOCAB // 2)
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
