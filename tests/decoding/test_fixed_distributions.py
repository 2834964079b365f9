"""Laws as part of a stage: one recording plays texts and numbers it was not made with, bit for bit as the originals."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from recorded_graphs import Recording
from test_processors import KINDS, V, numbers
from transformers import LogitsProcessorList

from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.sampling import TokenDistribution
from hf_domino.decoding.tree import Tree

CAPACITY, CASES = 24, 12
READS_BACK = ("decay", "prompt penalty", "prompt n-grams", "bad words", "sequence bias", "watermark", "allowed")
FIXED = [kind for kind in KINDS if kind not in READS_BACK]
# Anchor to nodes 1 and 2; 1 to 3 and 4; 3 to 5; 2 to 6.
PARENTS, PATHS = (0, 0, 1, 1, 3, 2), ((), (0,), (1,), (0, 2), (0, 3), (0, 2, 4), (1, 5))


class Space:
    """Of a workspace, what a distribution asks for."""

    capacity, device = CAPACITY, torch.device("cpu")

    def __init__(self):
        self.held = {}

    def hold(self, name, values):
        assert self.held.setdefault(name, values.clone()).shape == values.shape
        return self.held[name].copy_(values)


def texts_of(ids, tokens, is_chain):
    paths = [range(count) for count in range(len(PARENTS) + 1)] if is_chain else PATHS
    return [torch.cat((ids, tokens[:, list(path)]), dim=1) for path in paths]


def held_distribution(processors, space):
    distribution = TokenDistribution(processors)
    distribution.hold(space.hold)
    return distribution


def packed(distribution, prefixes):
    """What a workspace makes of prefixes."""
    return prefixes.packed(CAPACITY) if distribution.needs_prefix else prefixes.last()


def unpacked(distribution, text):
    return Prefixes.unpacked(text) if distribution.needs_prefix else Prefixes.of(text)


def needs(processors):
    """What a recording is made for: the key, and shapes of what is held."""
    space = Space()
    key = held_distribution(LogitsProcessorList(processors), space).key
    return key, {name: tensor.shape for name, tensor in space.held.items()}


def two_of(kinds, draw):
    """Lists of processors of these kinds that share a recording, with other numbers where these are held."""
    pairs = []
    for kind in kinds:
        made = ([KINDS[kind](draw, torch.zeros(1, 6).long()) for _ in range(2)] for _ in range(400))
        pairs.append(next(pair for pair in made if needs(pair[:1]) == needs(pair[1:])))
    return [LogitsProcessorList(processors) for processors in zip(*pairs, strict=True)]


@pytest.mark.parametrize("is_chain", [True, False], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", FIXED)
def test_a_recording_plays_other_texts_and_numbers(kind, is_chain):
    draw = random.Random(kind)
    for case in range(CASES):
        torch.manual_seed(case)
        kinds = draw.sample(FIXED, draw.randint(0, 2)) + [kind]
        space, recording, outputs = Space(), None, torch.empty(0)
        parents = None if is_chain else torch.tensor([PARENTS])
        for processors in two_of(kinds, draw):
            ids, tokens = torch.randint(V, (1, draw.randint(1, 12))), torch.randint(V, (1, len(PARENTS)))
            logits = (3 * torch.randn(1, len(PARENTS) + 1, V)).to(draw.choice([torch.float32, torch.bfloat16])).float()
            fixed = held_distribution(processors, space)
            inputs = (logits, packed(fixed, Prefixes.of(ids)), tokens)
            if recording is None:
                buffers = tuple(tensor.clone() for tensor in inputs)
                with Recording() as recording:
                    prefixes, tree = unpacked(fixed, buffers[1]), Tree(buffers[2], parents, 3)
                    outputs = fixed.scores(prefixes, buffers[0], partial(tree.seen_by, prefixes))
            for buffer, tensor in zip(buffers, inputs, strict=True):
                buffer.copy_(tensor)
            recording.replay()
            for index, text in enumerate(texts_of(ids, tokens, is_chain)):
                expected = processors(text, logits[:, index])
                assert torch.equal(numbers(outputs[:, index]), numbers(expected)), (kinds, case, index)
