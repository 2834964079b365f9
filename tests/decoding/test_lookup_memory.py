"""A memory of texts: what it finds, what it holds, and what it costs."""

import copy
import itertools
import os
import pickle
import stat
import threading
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from hf_domino import LookupMemory
from hf_domino.decoding.lookup_memory import LONGEST_MATCH
from hf_domino.decoding.ngram_index import MOST_PLACES

MOST_BYTES = 40  # a token, which the index must not exceed
PASSAGE = list(range(100, 160))


def matches(memory, tokens):
    """The length of each match of the last tokens, and the token after it."""
    return [(length, memory.ring.token_of[slot]) for length, slot in memory.places(memory.add(tokens))]


def longest_by_hand(tokens):
    """The length of the longest repetition of the last tokens, by comparing with every place of the text."""
    lengths = [0]
    for end in range(2, len(tokens)):
        length = 0
        while length < min(end, LONGEST_MATCH) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        lengths.append(length if length >= 2 else 0)
    return max(lengths)


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(tokens=st.lists(st.integers(-1, 1), max_size=MOST_PLACES), splits=st.lists(st.integers(0, MOST_PLACES)))
def test_the_longest_match_is_found(tokens, splits):
    memory = LookupMemory()
    sequence = memory.add([])
    bounds = [0, *sorted(splits), len(tokens)]
    for start, end in itertools.pairwise(bounds):
        memory.extend(sequence, tokens[start:end])
    found = memory.places(sequence)
    assert max((length for length, _ in found), default=0) == longest_by_hand(tokens)
    assert found == sorted(found, key=lambda place: -place[0])
    for length, slot in found:
        place = next(place for place in range(2, len(tokens)) if memory.ring.age(slot) == len(tokens) - 1 - place)
        assert tokens[place - length : place] == tokens[len(tokens) - length :]
        assert memory.ring.token_of[slot] == tokens[place]


def test_long_texts_are_indexed_like_short_ones():
    """Many tokens at once take another way than a few."""
    generator = np.random.default_rng(0)
    texts = [generator.integers(0, 5, size).tolist() for size in (400, 3, 90, 700, 26, 1)]
    at_once, one_by_one = LookupMemory(), LookupMemory()
    for text in texts:
        at_once.add(text)
        sequence = one_by_one.add(text[:7])
        for token in text[sequence.num_tokens :]:
            one_by_one.extend(sequence, [token])
    for length in (2, 5, 9):
        for text in texts:
            wanted = [99, 98, *text[:length]]
            assert matches(at_once, wanted) == matches(one_by_one, wanted)


def test_sequences_that_grow_in_turns_are_read_as_if_they_were_alone():
    memory = LookupMemory()
    first, second = memory.add([]), memory.add([])
    for token in PASSAGE:
        memory.extend(first, [token])
        memory.extend(second, [1000 - token])
    assert matches(memory, [7, *PASSAGE[10:15]]) == [(5, PASSAGE[15])]
    assert matches(memory, [7, *(1000 - token for token in PASSAGE[10:15])]) == [(5, 1000 - PASSAGE[15])]


def test_texts_that_begin_alike_are_held_once():
    memory = LookupMemory()
    memory.add(PASSAGE)
    assert len(memory) == 60
    first = memory.add([*PASSAGE, 1, 2, 3])  # a conversation that goes on
    second = memory.add([*PASSAGE, 4, 5, 6])
    third = memory.add([*PASSAGE[:20], 7, 8])
    assert len(memory) == 60 + 3 + 3 + 2
    assert [sequence.num_tokens for sequence in (first, second, third)] == [63, 63, 22]
    memory.extend(first, [9])
    assert matches(memory, [77, *PASSAGE[50:], 1, 2, 3]) == [(13, 9)]
    assert {token for _, token in matches(memory, [78, *PASSAGE[50:]])} == {1, 4}
    assert {token for _, token in matches(memory, [79, *PASSAGE[10:20]])} == {7, PASSAGE[20]}
    before = len(memory)
    for text in ([*PASSAGE, 1, 2, 3, 9], [*PASSAGE, 4, 5], PASSAGE[:20]):
        memory.add(text)
    assert len(memory) == before
    memory.add(PASSAGE[1:])  # the same words, but another beginning
    assert len(memory) == before + 59


def test_the_oldest_tokens_are_dropped():
    memory = LookupMemory(max_tokens=100)
    for start in range(0, 1000, 50):
        memory.add(range(start, start + 50))
    assert len(memory) == 100
    assert matches(memory, [7, 960, 961, 962]) == [(3, 963)]
    assert matches(memory, [7, 800, 801, 802]) == []
    long = LookupMemory(max_tokens=100)
    sequence = long.add(range(1000))
    assert len(long) == 100
    long.extend(sequence, [998, 999])
    assert [(length, long.ring.token_of[slot]) for length, slot in long.places(sequence)] == [(2, 998)]
    long.extend(sequence, [950, 951])
    assert long.ring.token_of[long.places(sequence)[0][1]] == 952


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 2), max_size=70)), max_size=40))
def test_whatever_is_overwritten_every_match_is_within_the_memory(pieces):
    memory = LookupMemory(max_tokens=64)
    sequences = {}
    for name, tokens in pieces:
        if name in sequences:
            memory.extend(sequences[name], tokens)
        else:
            sequences[name] = memory.add(tokens)
        found = memory.places(sequences[name])
        assert len(memory) <= 64
        assert all(2 <= length <= LONGEST_MATCH and 0 <= slot < 64 for length, slot in found)


def test_a_cleared_memory_holds_nothing_and_goes_on():
    memory = LookupMemory(max_tokens=200)
    sequence = memory.add(PASSAGE)
    memory.clear()
    assert len(memory) == 0
    assert matches(memory, [7, *PASSAGE[3:9]]) == []
    memory.extend(sequence, [1, 2, 3, 1, 2])
    assert [memory.ring.token_of[slot] for _, slot in memory.places(sequence)] == [3]
    assert not np.isin(memory.ring.tokens, PASSAGE[10:]).any()


def test_a_saved_memory_finds_the_same(tmp_path):
    generator = np.random.default_rng(1)
    memory = LookupMemory(max_tokens=700)
    texts = [[*PASSAGE[:12], *generator.integers(0, 6, 150).tolist()] for _ in range(7)]
    for text in texts:
        memory.add(text)
    memory.save(tmp_path / "texts.safetensors")
    assert load_file(tmp_path / "texts.safetensors")["tokens"].shape == (700,)
    loaded = LookupMemory.load(tmp_path / "texts.safetensors")
    assert (len(loaded), loaded.max_tokens) == (700, 700)
    small = LookupMemory.load(tmp_path / "texts.safetensors", max_tokens=100)
    assert (len(small), small.max_tokens) == (100, 100)
    large = LookupMemory.load(tmp_path / "texts.safetensors", max_tokens=5000)
    for text in texts[-4:]:
        wanted = [77, *text[-9:-2]]
        assert matches(memory, wanted) == matches(loaded, wanted) == matches(large, wanted) != []
    assert matches(small, [77, *texts[-1][-9:-2]])[0] == (7, texts[-1][-2])
    before = len(large)
    large.add(texts[-1])  # its beginning is found again
    assert len(large) == before


@pytest.mark.skipif(os.name != "posix", reason="this system has other permissions")
def test_only_its_owner_can_read_a_saved_memory(tmp_path):
    path = tmp_path / "texts.safetensors"
    memory = LookupMemory(max_tokens=100)
    memory.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    memory.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640, "a file that is shared on purpose stays shared"


@pytest.mark.parametrize(
    ("tensors", "metadata", "words"),
    [
        ({}, None, "format"),
        ({"tokens": np.zeros(3, np.int32)}, {"format": "pt"}, "format"),
        ({"tokens": np.zeros(3, np.int32), "before": np.array([-1, 0, 2], np.int32)}, "ours", "links"),
        ({"tokens": np.zeros(3, np.int32), "before": np.array([-2, 0, 1], np.int32)}, "ours", "links"),
        ({"tokens": np.zeros(3, np.int64), "before": np.array([-1, 0, 1], np.int32)}, "ours", "links"),
        ({"tokens": np.zeros(2, np.int32), "before": np.array([-1, 0, 1], np.int32)}, "ours", "links"),
        ({"tokens": np.zeros(3, np.int32)}, "ours", "safetensors"),
    ],
)
def test_other_files_are_rejected(tmp_path, tensors, metadata, words):
    path = tmp_path / "texts.safetensors"
    if metadata == "ours":
        metadata = {"format": "hf_domino lookup memory", "version": "1", "max_tokens": "100"}
    save_file(tensors, path, metadata)
    with pytest.raises(ValueError, match=f"the file of a lookup memory must be .*{words}"):
        LookupMemory.load(path)
    path.write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="must be a whole safetensors file"):
        LookupMemory.load(path)


@pytest.mark.parametrize("count", [0, 63, 2**31, 1.5, "many", True, None])
def test_sizes_out_of_range_are_rejected(count):
    with pytest.raises(ValueError, match="max_tokens must be"):
        LookupMemory(max_tokens=count)


@pytest.mark.parametrize("tokens", [[[1, 2]], [1.5], ["a"], [2**31], torch.zeros(1, 3, dtype=torch.long)])
def test_what_is_no_sequence_is_rejected(tokens):
    with pytest.raises(ValueError, match="tokens must be a sequence of token ids of 32 bits"):
        LookupMemory().add(tokens)


def test_tensors_can_be_added():
    memory = LookupMemory()
    memory.add(torch.tensor(PASSAGE))
    assert matches(memory, [7, *PASSAGE[3:9]]) == [(6, PASSAGE[9])]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda memory: pickle.loads(pickle.dumps(memory))])
def test_copies_are_memories_of_their_own(copied):
    memory = LookupMemory(max_tokens=1000)
    memory.add(PASSAGE)
    other = copied(memory)
    assert matches(other, [7, *PASSAGE[3:9]]) == [(6, PASSAGE[9])]
    other.add([1, 2, 3, 4])
    assert (len(memory), len(other)) == (60, 60 + 7 + 4)
    assert matches(memory, [7, 1, 2, 3]) == []


def test_threads_can_use_it_together():
    memory = LookupMemory()
    generator = np.random.default_rng(2)
    texts = [[thread, *generator.integers(0, 8, 400).tolist()] for thread in range(6)]
    errors = []

    def write(text):
        try:
            sequence = memory.add(text[:50])
            for start in range(50, len(text), 3):
                memory.extend(sequence, text[start : start + 3])
                memory.places(sequence)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(memory) == 6 * 401
    for text in texts:
        memory.add(text)
    assert len(memory) == 6 * 401, "every text is there as a whole"


def test_a_token_takes_few_bytes():
    tracemalloc.start()
    try:
        memory = LookupMemory(max_tokens=50_000)
        memory.add(np.random.default_rng(3).integers(0, 40_000, 60_000))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(memory) == 50_000
    assert taken < MOST_BYTES * 50_000


@pytest.mark.parametrize("period", [1, 2, 7])
def test_a_search_compares_few_tokens_however_often_they_occur(period):
    memory = LookupMemory()
    sequence = memory.add([token % period for token in range(100_000)])
    compared = []
    count = memory.ring.match_length

    def counted(slot, recent):
        length = count(slot, recent)
        compared.append(length)
        return length

    memory.ring.match_length = counted
    found = memory.places(sequence)
    assert found[0][0] == LONGEST_MATCH
    assert sum(compared) <= 1100
