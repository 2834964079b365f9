"""One generation and its rounds, and that what is measured again has not been learnt from."""

from __future__ import annotations

import pytest
import torch

import hf_domino
from hf_domino.evaluation.benchmark import measure
from hf_domino.evaluation.benchmark.measure import Bench
from hf_domino.evaluation.benchmark.methods import choose_methods, drafter_in
from hf_domino.evaluation.benchmark.options import BenchOptions
from hf_domino.evaluation.benchmark.prompts import encode
from hf_domino.evaluation.benchmark.timing import generate_timed, streamed_rounds
from hf_domino.pair import load_pair


@pytest.mark.parametrize("has_events", [False, True], ids=["", "gpu"])
def test_each_text_begins_with_an_empty_table(tiny_pair_folder, has_events, monkeypatch):
    pair = load_pair(str(tiny_pair_folder), dtype=torch.float32, device="cpu")
    drafter = hf_domino.recycling(pair.target, draft_length="full")

    def without_phases(*models, **call):
        found = generate_timed(*models, **call)
        if "assistant_model" in call:
            drafter.stats.phases = None
        return found

    if has_events:  # phases have a run of their own there
        monkeypatch.setattr(measure, "generate_timed", without_phases)
    options = BenchOptions(temperature=0.0, max_new_tokens=24)
    bench = Bench(pair, {"plain": {}, "drafted": {"assistant_model": drafter}}, options)
    batch = [{"text": "t7 t8 t9"}]
    bench.warm_up(batch)
    _, row = bench.measure("greedy", 0, batch)
    assert row["ms_per_round"] is not None
    alone = hf_domino.recycling(pair.target, draft_length="full")
    call = {"do_sample": False, "max_new_tokens": 24, "assistant_model": alone}
    inputs = encode(pair.tokenizer, batch)
    pair.target.generate(**inputs, **call)
    assert row["num_rounds"] == len(alone.stats.rows[0])
    pair.target.generate(**inputs, **call)
    assert row["num_rounds"] > len(alone.stats.rows[0])  # a table that has seen the text


def test_rounds_are_those_behind_the_prompt(tiny_qwen3):
    inputs = {"input_ids": torch.tensor([[5, 9, 33, 20, 7, 5, 9, 33]])}
    call = {"do_sample": False, "max_new_tokens": 20, "prompt_lookup_num_tokens": 3}
    forwards = []
    hook = tiny_qwen3.register_forward_hook(lambda *_: forwards.append(1))
    rounds = streamed_rounds(tiny_qwen3, inputs, **call)
    hook.remove()
    assert len(rounds) == len(forwards) - 1
    tokens, seconds = generate_timed(tiny_qwen3, inputs, **call)
    assert seconds > 0
    assert 0 < tokens.shape[1] - sum(rounds) <= 4  # what came with the forward over the prompt


def test_each_method_drafts_in_its_own_way(tiny_pair_folder):
    pair = load_pair(str(tiny_pair_folder), dtype=torch.float32, device="cpu")
    chosen, skipped = choose_methods(pair, BenchOptions(methods=("all",), tree_size=9, lookup_tokens=4))
    assert skipped.keys() == {"mtp"}
    told = {name: drafter.config for name, call in chosen.items() if (drafter := drafter_in(call)) is not None}
    assert (told["domino"].draft_length, told["domino"].draft_tree_size) == ("full", None)
    assert (told["domino_adaptive"].draft_length, told["domino_lookup"].draft_length) == ("adaptive", "adaptive")
    assert (told["Domino, chains"].draft_tree_size, told["Domino, trees"].draft_tree_size) == (None, 9)
    copying = {name for name, call in chosen.items() if call.get("prompt_lookup_num_tokens") == 4}
    assert copying == {"prompt_lookup", "recycling_lookup", "domino_lookup"}
    recycled = {name for name, config in told.items() if config.projector_type == "recycling"}
    assert recycled == {"recycling", "recycling_lookup"}
