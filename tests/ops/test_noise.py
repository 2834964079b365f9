"""The noise: published test vectors, and the law of what is sampled with it."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from domino_kernels import correct_and_choose
from domino_kernels.noise import gumbel, philox

MIN_P_VALUE = 1e-3  # seeds are fixed: a failure is a change of the code, not bad luck
DRAWS = 100_000


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # from the authors' Random123 library
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([2**32 - 1] * 4, [2**32 - 1] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_published_words(counter, key, expected):
    words = philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert [word.item() for word in words] == expected


def test_noise_is_gumbel():
    noise = gumbel(torch.tensor([5, 0]), 100, 500).flatten()
    assert stats.kstest(noise.numpy(), stats.gumbel_r.cdf).pvalue > MIN_P_VALUE


def test_noise_differs_by_row_column_seed_and_offset():
    states = [torch.tensor(state) for state in ([1, 0], [2, 0], [1, 1], [1 + 2**32, 0], [1, 2**32])]
    noise = torch.stack([gumbel(state, 20, 50) for state in states])
    assert noise.unique().numel() > 0.999 * noise.numel()
    correlations = torch.corrcoef(noise.flatten(1)) - torch.eye(len(states))
    assert correlations.abs().max() < 0.15  # 4.7 standard deviations of 1000 independent pairs


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("with_pool", [False, True], ids=["vocabulary", "pool"])
def test_the_law_is_the_softmax(temperature, with_pool):
    base, low_rank, up_weight = torch.randn(1, 12), torch.randn(1, 4), torch.randn(12, 4)
    base[0, 3] = -torch.inf
    ids = torch.tensor([[7, 3, 0, 5, 11]]) if with_pool else None
    logits = base if ids is None else base.gather(1, ids)
    scores = base + torch.nn.functional.silu(low_rank) @ up_weight.T
    scores = scores if ids is None else torch.full_like(scores, -torch.inf).scatter(1, ids, scores.gather(1, ids))
    probs = (scores / temperature).softmax(dim=-1)[0].double()

    def rows(tensor):
        return tensor.expand(DRAWS, -1).contiguous()

    draws = correct_and_choose(
        rows(logits),
        rows(low_rank),
        up_weight,
        None if ids is None else rows(ids),
        temperature=temperature,
        random_state=torch.tensor([11, 3]),
    )
    counts = draws.bincount(minlength=12).double()
    possible = probs > 0
    assert counts[~possible].sum() == 0
    expected = probs[possible] / probs.sum() * DRAWS
    assert expected.min() > 5
    assert stats.chisquare(counts[possible].numpy(), expected.numpy()).pvalue > MIN_P_VALUE
