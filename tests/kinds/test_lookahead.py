"""Lookahead (arXiv 2402.02057): the window by levels and positions, and the pool, written out beside the package."""

from __future__ import annotations

import itertools

import pytest
import torch
from calls_of_kinds import PROMPTS, SAMPLED, TEMPERATURE, calls, generate, noise_of

import hf_domino

NGRAM, WINDOW, CANDIDATES, NODES = 4, 3, 2, 18
KINDS = {"trees": {"draft_tree_size": NODES}, "chains": {"draft_tree_size": None}}


@pytest.fixture
def drafter(wide):
    sizes = {"ngram_size": NGRAM, "window_size": WINDOW, "num_candidates": CANDIDATES}
    return hf_domino.lookahead(wide, draft_length="full", **sizes).double()


class Reference:
    """Guesses of each row's positions at levels 0..n-2, and the pool of all rows."""

    def __init__(self, target, noise):
        self.target, self.noise, self.pool = target, noise, {}
        self.guesses, self.read = {}, {}

    def keep(self, *ngram):
        others = [rest for rest in self.pool.get(ngram[0], []) if rest != ngram[1:]]
        self.pool[ngram[0]] = [ngram[1:], *others][:CANDIDATES]

    def see(self, row, text):
        for end in range(max(self.read.get(row, 0), NGRAM - 1), len(text)):
            self.keep(*text[end - NGRAM + 1 : end + 1])
        self.read[row] = len(text)

    def guess(self, row, text, level, place):
        """What a level says of a position, or the next one of a column still there, or the text from its beginning."""
        upper_levels = range(level, min(NGRAM - 1, place - len(text) + 2))
        known = (self.guesses[row].get((upper, place)) for upper in upper_levels)
        return next((token for token in known if token is not None), text[place % len(text)])

    def proposals(self, row, text):
        """The paths of the window, and those that are proposed, in their order."""
        anchor = len(text) - 1
        self.guesses.setdefault(row, {})
        window = [
            tuple(self.guess(row, text, 0, anchor + step) for step in range(1, column + 1))
            + tuple(self.guess(row, text, level, anchor + column + level) for level in range(1, NGRAM - 1))
            for column in range(WINDOW)
        ]
        pairs = itertools.zip_longest(self.pool.get(text[-1], []), window)
        return window, [path for pair in pairs for path in pair if path]

    def advance(self, row, text, window, ran):
        """Every level takes what the next one had, and the last what the target gives behind the paths that ran."""
        anchor = len(text) - 1
        columns = [
            [self.guess(row, text, level, anchor + column + level) for level in range(NGRAM - 1)]
            for column in range(WINDOW)
        ]
        columns[0][0] = text[-1]
        after = {
            (level, anchor + column + level): token
            for column, tokens in enumerate(columns)
            for level, token in enumerate(tokens)
        }
        for column, (path, tokens) in enumerate(zip(window, columns, strict=True)):
            if path in ran:
                new = self.token_behind(row, text, path)
                self.keep(*tokens, new)
                moved = enumerate([*tokens[1:], new])
                after |= {(level, anchor + column + 1 + level): token for level, token in moved}
        self.guesses[row] = after

    def token_behind(self, row, text, path):
        logits = self.target(torch.tensor([[*text, *path]])).logits[0, -1]
        if self.noise is not None:
            step = len(text) - len(PROMPTS[row]) + len(path)
            logits = logits / TEMPERATURE - self.noise[step, row].log()
        return int(logits.argmax())


def nodes_of(paths):
    """All beginnings of paths, as long as there is room for one more."""
    nodes = {}
    for path in paths:
        for end in range(1, len(path) + 1):
            if path[:end] not in nodes and len(nodes) == NODES:
                break
            nodes[path[:end]] = True
    return set(nodes)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_proposals_are_those_of_the_paper_and_the_text_is_plain(wide, drafter, rounds, kind, batch_size, do_sample):
    drafter, (ids, options) = drafter.view(**KINDS[kind]), calls(batch_size)
    options |= SAMPLED if do_sample else {}
    plain = generate(wide, None, ids, **options)
    assert torch.equal(generate(wide, drafter, ids, **options), plain)
    # A chain is verified where nobody has the noise of the step behind it.
    has_noise = do_sample and kind == "trees"
    reference = Reference(wide, noise_of(batch_size, wide.config.vocab_size) if has_noise else None)
    num_from_pool = 0
    for together in groups_of(rounds):
        for row, text, *_ in together:
            reference.see(row, text)
        expected = [reference.proposals(row, text) for row, text, *_ in together]
        for (row, text, drafted, _), (window, paths) in zip(together, expected, strict=True):
            if kind == "chains":  # filled up where another row's is longer
                assert tuple(drafted[: len(paths[0])]) == paths[0]
            ran = nodes_of(paths if kind == "trees" else [tuple(drafted)])
            assert kind == "chains" or set(drafted) == ran
            num_from_pool += len(set(paths) - set(window))
            reference.advance(row, text, window, ran)
    assert num_from_pool > 5
    pool = {first: tuple(map(tuple, each)) for first, each in reference.pool.items()}
    for token in range(wide.config.vocab_size):
        kept = tuple(tuple(rest) for rest in drafter.ngrams[token].tolist() if rest[0] >= 0)
        assert kept == pool.get(token, ())


def test_nothing_is_proposed_behind_an_end_of_the_text(wide, drafter, rounds):
    ids, options = calls(1)
    end = generate(wide, drafter, ids, **options)[0, -8].item()  # the pool goes on behind it
    rounds.clear()
    ended = options | {"eos_token_id": end}
    assert torch.equal(generate(wide, drafter, ids, **ended), generate(wide, None, ids, **ended))
    paths = [path for _, _, drafted, _ in rounds for path in drafted]
    assert any(path[-1] == end for path in paths)
    assert not any(end in path[:-1] for path in paths)


def groups_of(rounds):
    """What rows drafted together, round by round."""
    together = []
    for each in rounds:
        if together and each[0] <= together[-1][0]:
            yield together
            together = []
        together.append(each)
    yield together


def test_a_pool_that_has_seen_the_text_proposes_more(wide, drafter):
    ids, options = calls(1)
    first, again = [], []
    for counts in (first, again):
        generate(wide, drafter, ids, **options)
        counts += drafter.stats.rows[0]
    assert len(again) < 0.7 * len(first)
