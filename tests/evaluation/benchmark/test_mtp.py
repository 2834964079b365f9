"""MTP layers of a target itself, by Transformers' own loop: where there are some, they are measured."""

from __future__ import annotations

import pytest
import torch
from builders import TINY
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from hf_domino.evaluation.benchmark.measure import Bench
from hf_domino.evaluation.benchmark.methods import choose_methods
from hf_domino.evaluation.benchmark.options import BenchOptions
from hf_domino.pair import Pair

LAYERS = {"layer_types": ["full_attention", "sliding_attention"] * 2, "mlp_layer_types": ["dense"] * 4}
LAYERS |= {"sliding_window": 16, "num_mtp_layers": 1, "mtp_mlp_layer_types": ["dense"]}
OPTIONS = BenchOptions(methods=("mtp",), temperature=0.7, max_new_tokens=12, repeats=1)


@pytest.fixture
def pair_of(tmp_path, tiny_tokenizer):
    """A function that saves a random target, with its MTP layers or without, and loads it as a pair."""

    def make(has_layers=True, **fields):
        torch.manual_seed(0)
        if not hasattr(CONFIG_MAPPING["mellum"](), "num_mtp_layers"):
            pytest.skip("this Transformers knows no MTP layers of that family")
        target = AutoModelForCausalLM.from_config(CONFIG_MAPPING["mellum"](**TINY | LAYERS | fields))
        torch.nn.init.zeros_(target.lm_head.weight)  # the text is one token, which the layers also propose
        target.save_pretrained(tmp_path)
        if has_layers:
            tensors, path = load_file(tmp_path / "model.safetensors"), tmp_path / "model.safetensors"
            for name, tensor in MtpModel(target, 1).state_dict().items():
                if name.startswith("layers."):
                    tensors[f"mtp.{name.replace('mtp_block.', '')}"] = tensor.contiguous()
            save_file(tensors, path, {"format": "pt"})
        target = AutoModelForCausalLM.from_pretrained(tmp_path)
        return Pair("tiny", tmp_path, target, tiny_tokenizer, {})

    return make


def test_it_is_measured_where_the_target_has_layers(pair_of):
    pair = pair_of()
    methods, skipped = choose_methods(pair, OPTIONS)
    assert (list(methods), skipped) == (["plain", "mtp"], {})
    bench = Bench(pair, methods, OPTIONS)
    for mode in ("greedy", "sample"):
        _, row = bench.measure(mode, 0, [{"text": "t7 t8 t9"}])
        assert row["new_tokens"] == 12
        assert row["num_rounds"] == row["num_drafted"] >= 6
    greedy = bench.measure("greedy", 0, [{"text": "t7 t8 t9"}])[1]
    assert greedy["equals_plain"]
    assert greedy["acceptance_length"] > 1.8  # one layer: two tokens a round, but for the last


def test_why_it_is_not_measured_is_told(pair_of):
    reasons = [choose_methods(pair_of(False, **fields), OPTIONS)[1]["mtp"] for fields in ({}, {"num_mtp_layers": None})]
    assert "MtpModel weights are missing" in reasons[0]
    assert reasons[1] == "the target has no such layers"
    batched = BenchOptions(methods=("mtp",), batch_size=2)
    assert choose_methods(pair_of(), batched)[1]["mtp"] == "Transformers decodes it one sequence at a time"
