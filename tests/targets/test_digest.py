"""Digests of weights: no change of bits leaves one as it was, however regular it is."""

from __future__ import annotations

from random import Random

import pytest
import torch

from hf_domino.targets.digest import BLOCK, digest_of


def bits_of(weight):
    return weight.view({4: torch.int32, 2: torch.int16}[weight.itemsize])


def with_one_element_changed(weight, random):
    found = weight.clone()
    bits_of(found).view(-1)[random.randrange(weight.numel())] ^= 1 << random.randrange(8 * weight.itemsize - 1)
    return found


def with_two_elements_swapped(weight, random):
    found = weight.clone().view(-1)
    first, second = random.sample(range(weight.numel()), 2)
    found[first], found[second] = weight.view(-1)[second], weight.view(-1)[first]
    return found.view_as(weight)


def with_pairs_of_bits_moved(weight, random):
    found = weight.clone()
    chosen = random.sample(range(weight.numel()), 2 * random.randint(1, 5))
    bits_of(found).view(-1)[chosen[::2]] += 1
    bits_of(found).view(-1)[chosen[1::2]] -= 1
    return found


def with_two_signs_flipped(weight, random):
    found = weight.clone()
    found.view(-1)[random.sample(range(weight.numel()), 2)] *= -1
    return found


def with_two_columns_swapped(weight, random):
    order = list(range(weight.shape[1]))
    first, second = random.sample(order, 2)
    order[first], order[second] = second, first
    return weight[:, order]


# Most leave sums of all elements, of their rows or of their columns as they were, or change only upper bits of these.
STRUCTURED = {
    "doubled": lambda weight, random: 2 * weight,
    "halved": lambda weight, random: weight / 2,
    "negated": lambda weight, random: -weight,
    "half_negated": lambda weight, random: weight * torch.tensor([1, -1]).repeat(weight.numel())[: weight.shape[1]],
    "rows_permuted": lambda weight, random: weight[random.sample(range(len(weight)), len(weight))],
    "columns_permuted": lambda weight, random: weight[:, random.sample(range(weight.shape[1]), weight.shape[1])],
    "rolled": lambda weight, random: weight.roll(random.randint(1, weight.shape[1] - 1), random.choice([0, 1])),
    "transposed": lambda weight, random: weight.T,
} | {
    change.__name__: change
    for change in (
        with_one_element_changed,
        with_two_elements_swapped,
        with_pairs_of_bits_moved,
        with_two_signs_flipped,
        with_two_columns_swapped,
    )
}


@pytest.mark.parametrize("width", [47, 48, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_structured_change_is_seen(dtype, width):
    random = Random(width)
    weight = torch.randn(width, width, generator=torch.Generator().manual_seed(1)).to(dtype)
    digest = digest_of(weight)
    assert torch.equal(digest_of(weight.clone()), digest)
    for name, change in STRUCTURED.items():
        for _ in range(10):
            changed = change(weight, random).contiguous()
            is_same = torch.equal(bits_of(changed), bits_of(weight))
            assert torch.equal(digest_of(changed), digest) == is_same, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_may_lie_anywhere_in_its_storage(dtype):
    """Elements of two bytes are read two at a time, where they may begin between two words."""
    weight = torch.randn(33, 47, dtype=dtype)
    shifted = torch.zeros(1 + weight.numel(), dtype=dtype)
    shifted[1:] = weight.flatten()
    spread = torch.zeros(33, 3 * 47, dtype=dtype)
    spread[:, ::3] = weight
    for same in (shifted[1:].view_as(weight), spread[:, ::3], weight.T.contiguous().T):
        assert torch.equal(digest_of(same), digest_of(weight))


def test_a_change_at_the_end_of_a_large_weight_is_seen():
    weight = torch.zeros(BLOCK // 64 + 1, 64)
    before = digest_of(weight)
    weight[-1, -1] = 1
    assert not torch.equal(digest_of(weight), before)
