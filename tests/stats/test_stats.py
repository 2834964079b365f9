from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch
from builders import PAD
from oracle import oracle
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)

import hf_domino
from hf_domino.cli.answers import round_of
from hf_domino.data.writers import cut_at_end
from hf_domino.decoding import candidate_generator, loop
from hf_domino.decoding.estimates import Costs
from hf_domino.decoding.policy import Policy
from hf_domino.stats.decoding_stats import DecodingStats
from hf_domino.stats.phases import PHASES, PhaseTimer

PROMPT = torch.tensor([[5, 9, 33, 20, 7]])


def test_a_phase_inside_another_counts_once(monkeypatch):
    clock = iter([0.0, 1.0, 2.0, 7.0, 9.0, 19.0])  # phases begin at 0, 1 and 2, and end from the innermost on
    monkeypatch.setattr("hf_domino.stats.phases.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    timer = PhaseTimer(enabled=True)
    with timer.phase("rest"), timer.phase("verify"), timer.phase("target_forward"):
        pass
    assert timer.seconds() == {"draft": 0, "correction": 0, "target_forward": 5, "verify": 3, "rest": 11}


def test_phases_that_an_error_ends_are_over():
    timer = PhaseTimer(enabled=True)
    with pytest.raises(KeyError), timer.phase("verify"), timer.phase("target_forward"):
        raise KeyError
    with timer.phase("draft"):
        time.sleep(0.001)
    seconds = timer.seconds()
    assert seconds["draft"] >= 0.001
    assert 0 < seconds["verify"] + seconds["target_forward"] < 1  # no time was taken from them


def test_what_is_reset_is_forgotten():
    timer = PhaseTimer(enabled=True)
    with timer.phase("draft"):
        pass
    timer.reset()
    assert set(timer.seconds().values()) == {0.0}


def test_phases_of_a_generation_add_up_to_its_rounds(tiny_qwen3, tiny_drafter):
    tiny_qwen3.generate(PROMPT, assistant_model=tiny_drafter, max_new_tokens=4, do_sample=False)
    assert tiny_drafter.stats.phases is None
    with hf_domino.timed_phases():
        tiny_qwen3.generate(PROMPT, assistant_model=tiny_drafter, max_new_tokens=24, do_sample=False)
    stats = tiny_drafter.stats
    assert list(stats.phases) == list(PHASES)
    assert all(seconds > 0 for seconds in stats.phases.values())
    assert sum(stats.phases.values()) < stats.seconds
    assert "target_forward, s" in str(stats)


@pytest.mark.gpu
def test_phases_on_a_gpu_are_not_synchronised(tiny_qwen3, tiny_drafter, monkeypatch):
    calls = []
    synchronize = torch.cuda.synchronize
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: (calls.append(1), synchronize(*args)))
    target, drafter = tiny_qwen3.cuda(), tiny_drafter.cuda()
    try:
        target.generate(PROMPT.cuda(), assistant_model=drafter, max_new_tokens=24, do_sample=False)  # captures
        calls.clear()
        with hf_domino.timed_phases():
            target.generate(PROMPT.cuda(), assistant_model=drafter, max_new_tokens=24, do_sample=False)
    finally:
        target.cpu()
    assert sum(drafter.stats.phases.values()) > 0
    assert len(calls) == 1


class Threes(StoppingCriteria):
    """Ends a text behind a token that three divides, from the fifth new one on."""

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, -1] % 3 == 0) & (input_ids.shape[1] >= PROMPT.shape[1] + 5)


class Own(LogitsProcessor):
    """May keep state: it is shown one position after the other."""

    def __call__(self, input_ids, scores):
        return scores


SAMPLED = {"do_sample": True, "top_k": 0}
BATCH = SAMPLED | {"num_return_sequences": 3, "max_new_tokens": 14}
CALLS = {
    "prefill": {"max_new_tokens": 1},
    "budget": {"max_new_tokens": 2},
    "criterion": {"stopping_criteria": StoppingCriteriaList([Threes()])},
    "copied": {"prompt_lookup_num_tokens": 10, "sequence_bias": [[[9], 1000.0]]},
    "static": {"cache_implementation": "static"},
    "stateful": {"logits_processor": LogitsProcessorList([Own()])},
    "streamed": {"streamer": SimpleNamespace(put=lambda value: None, end=lambda: None)},
    "sampled": SAMPLED,
    "batch": BATCH,
    "batch with stop strings": BATCH | {"stop_strings": list("abcdefghijkl")},
}


@pytest.mark.parametrize("end_of_text", ["unknown", "never", "reached"])
@pytest.mark.parametrize("name", CALLS)
def test_rounds_bring_what_is_returned(target, make_drafter, tiny_tokenizer, name, end_of_text):
    """Beside the token of the prefill, wherever the text ends in its last round."""
    drafter, options = make_drafter(target), {"max_new_tokens": 17, "pad_token_id": PAD} | CALLS[name]
    options |= {"tokenizer": tiny_tokenizer} if "stop_strings" in options else {}
    torch.manual_seed(0)
    text = target.generate(PROMPT, **options)[0].tolist()
    end = {"unknown": None, "never": -1, "reached": text[-3:][0]}[end_of_text]
    with oracle(target, PROMPT, 1.0, **options):
        torch.manual_seed(0)
        texts = target.generate(PROMPT, assistant_model=drafter, eos_token_id=end, **options)[:, PROMPT.shape[1] :]
    counts = [len(cut_at_end([token for token in row if token != PAD], (end,)).ids) for row in texts.tolist()]
    stats = drafter.stats
    assert [1 + sum(row) for row in stats.rows] == counts
    assert stats.num_new_tokens == sum(counts)
    assert stats.num_rounds == 0 or stats.tokens_per_forward == (sum(counts) - len(counts)) / stats.num_rounds


def test_drafted_rounds_are_told_from_single_steps():
    stats = DecodingStats(3, rows=[[1, 4, 1], [3, 1]], proposed=[[0, 3, 0], [3, 0]])
    assert (stats.num_rounds, stats.num_drafted, stats.num_plain_steps) == (5, 2, 3)
    assert (stats.acceptance_length, stats.tokens_per_forward) == (3.5, 2.0)
    assert stats.acceptance_rate_at == [1.0, 1.0, 0.5]


def test_rounds_of_unknown_proposals_count_as_drafted():
    stats = DecodingStats(2, rows=[[1, 3]])
    assert stats.num_drafted == 2
    assert stats.acceptance_length == stats.tokens_per_forward == 2.0


def test_what_is_printed_tells_nodes_of_trees_from_proposals_of_chains(tiny_qwen3, make_drafter):
    options = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": -1}
    for tree_size, line in ((None, "proposals a draft"), (9, "nodes verified a round")):
        drafter = make_drafter(tiny_qwen3, draft_tree_size=9).view(draft_tree_size=tree_size)
        tiny_qwen3.generate(PROMPT, assistant_model=drafter, **options)
        assert drafter.stats.tree_size == tree_size
        nodes = drafter.stats.proposal_length
        assert (nodes > drafter.config.num_draft_tokens) == (tree_size is not None)
        assert f"{line:<24}{nodes:.2f}\n" in str(drafter.stats)


class Nominal(Policy):
    """Takes rounds to cost what they are expected to, whatever the clock says."""

    def observe(self, outcome, seconds):
        super().observe(outcome, Costs.nominal(outcome.plan.arm, outcome.num_proposed))


@pytest.mark.parametrize("batch_size", [1, 2])
def test_pauses_are_told_with_their_reason(tiny_qwen3, make_drafter, monkeypatch, batch_size):
    monkeypatch.setattr(candidate_generator, "policy_for", lambda *arguments: Nominal(6))
    drafter = make_drafter(tiny_qwen3, draft_length="adaptive")
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": -1}
    tiny_qwen3.generate(PROMPT.expand(batch_size, -1), assistant_model=drafter, **options)
    stats = drafter.stats
    paused = batch_size * sum(pause.num_steps for pause in stats.pauses)
    assert stats.num_plain_steps >= stats.num_paused == paused > 0  # others were made for their time
    first = stats.pauses[0]
    assert first.tokens < first.cost
    assert stats.proposed[0][first.first_round : first.first_round + first.num_steps] == [0] * first.num_steps
    assert stats.proposed[0][first.first_round - 1] > 0
    assert f"after round {first.first_round}, for {first.num_steps}" in str(stats)
    assert stats.acceptance_length >= stats.tokens_per_forward


def in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    return thread


@pytest.mark.parametrize("name", ["greedy", "stateful", "large vocabulary", "copied"])
def test_a_streamer_sees_the_round_of_each_token(tiny_qwen3, make_drafter, monkeypatch, name):
    """Also if tokens are committed one by one: the token's round is counted, and its end is known."""
    options = {"stateful": CALLS["stateful"], "copied": {"prompt_lookup_num_tokens": 4}}.get(name, {})
    if name == "large vocabulary":
        monkeypatch.setattr(loop, "STEPWISE_VOCABULARY", 1)
    drafter, seen = make_drafter(tiny_qwen3), []

    class Watching:
        stats = None

        def put(self, value):
            if self.stats is not None:  # the prompt comes before
                seen.append(list(self.stats.rows[0]))

        def end(self): ...

    options |= {"max_new_tokens": 40, "do_sample": False, "eos_token_id": -1}
    with oracle(tiny_qwen3, PROMPT, 0.7, **options):
        tiny_qwen3.generate(PROMPT, assistant_model=drafter, streamer=Watching(), **options)
    final = drafter.stats.rows[0]
    assert 1 < drafter.stats.tokens_per_forward < drafter.config.num_draft_tokens
    for position, lengths in list(enumerate(seen))[: -final[-1]]:  # the last round is cut where the text ends
        assert round_of(position, lengths) == round_of(position, final)


def test_a_streamed_call_has_its_statistics_on_the_streamer(tiny_qwen3, make_drafter):
    drafter = make_drafter(tiny_qwen3)
    options = {"assistant_model": drafter, "do_sample": False, "eos_token_id": -1}

    def stream(count):
        streamer = TextIteratorStreamer(SimpleNamespace(decode=lambda ids, **_: " ".join(map(str, ids))))
        thread = in_thread(lambda: tiny_qwen3.generate(PROMPT, streamer=streamer, max_new_tokens=count, **options))
        assert "".join(streamer)
        thread.join()
        return streamer.stats

    stats = stream(12)
    assert stats.num_new_tokens == 12
    assert drafter.stats is stats  # this thread has not generated
    tiny_qwen3.generate(PROMPT, max_new_tokens=4, **options)
    assert stream(9).num_new_tokens == 9
    assert drafter.stats.num_new_tokens == 4  # its own


def test_an_output_has_the_statistics_of_its_call(tiny_qwen3, tiny_drafter):
    options = {"do_sample": False, "max_new_tokens": 6, "return_dict_in_generate": True}
    plain = tiny_qwen3.generate(PROMPT, **options)
    output = tiny_qwen3.generate(PROMPT, assistant_model=tiny_drafter, **options)
    assert output.stats is tiny_drafter.stats
    assert output.keys() == plain.keys()


def test_statistics_before_any_call_say_what_to_do(tiny_qwen3, make_drafter):
    with pytest.raises(RuntimeError, match="is empty: call"):
        _ = make_drafter(tiny_qwen3).stats


class NoRoom:
    """A streamer that takes no attributes."""

    __slots__ = ()

    def put(self, value): ...

    def end(self): ...


def test_streamers_carry_the_statistics_of_their_last_call(tiny_qwen3, tiny_drafter):
    """Those that take attributes, and have no statistics of their own."""
    methods = {"put": lambda value: None, "end": lambda: None}
    usual, own, slotted = SimpleNamespace(**methods), SimpleNamespace(**methods, stats="its own"), NoRoom()
    for streamer, count in ((usual, 5), (own, 4), (slotted, 4), (usual, 3)):
        options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": -1, "streamer": streamer}
        tiny_qwen3.generate(PROMPT, assistant_model=tiny_drafter, **options)
        assert tiny_drafter.stats.num_new_tokens == count
    assert usual.stats is tiny_drafter.stats
    assert own.stats == "its own"
