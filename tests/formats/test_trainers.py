"""What the files of each trainer mean, by the facts of their configurations and the rules of their code."""

from __future__ import annotations

import pytest
import torch
from released import DFLASH, DOMINO_8B, QWEN3_8B, SPECULATORS_DFLASH, our_drafter, reduced, stored_tensors
from released import write_checkpoint as write

from hf_domino import DominoConfig, DominoDraftModel
from hf_domino.formats.loading import interpret
from hf_domino.target.view import TargetModel

NESTED = "dflash_config"
# Facts of sgl-project/SpecForge's configs (a6b6b02): layers of the target, those that are read, rotary base, and of
# Domino whether a position predicts the next token.
SPECFORGE = {
    "lfm2.5-1.2b-instruct-dflash": (16, [1, 4, 7, 10, 13], 1e6, None),
    "longcat-flash-dflash": (28, [1, 7, 13, 19, 25], 1e6, None),
    "qwen2.5-0.5b-dflash": (24, [1, 6, 11, 16, 21], 1e6, None),
    "qwen3-8b-dflash": (36, [1, 9, 17, 25, 33], 1e6, None),
    "qwen3.5-35b-a3b-dflash": (40, [1, 10, 19, 28, 37], 1e7, None),
    "qwen3.5-4b-dflash": (32, [1, 8, 15, 22, 29], 1e7, None),
    "qwen3.6-27b-dflash": (64, [1, 16, 31, 46, 61], 1e7, None),
    "qwen3-8b-domino": (36, [1, 9, 17, 25, 33], 1e6, True),
    "qwen3.5-4b-domino": (32, [3, 11, 19, 27, 31], 1e7, True),  # the last layer, too
    "qwen3.6-27b-domino-full-attention": (64, [1, 16, 31, 46, 61], 1e7, False),
}
# The whole of it at the top, and nothing nested.
DEEPSPEC = QWEN3_8B | {
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 7,
    "enable_confidence_head": False,
    "markov_rank": 0,
    "mask_token_id": 151669,
    "num_target_layers": 36,
    "target_layer_ids": [1, 9, 17, 25, 33],
}
VERL_SPECO = {name: value for name, value in QWEN3_8B.items() if name != "head_dim"} | {
    "model_type": "domino",
    "architectures": ["DominoDraftModel"],
    "hidden_size": 2560,
    "rope_theta": 5e6,
    "block_size": 16,
    "emb_dim": 256,
    "gru_hidden_dim": 1024,
    "lambda_base_start": 1.0,
    "mask_token_id": 151669,
    "num_context_layers": 5,
    "pure_draft_prefix_len": 1,
    "shift_label": True,
    "target_hidden_size": 2560,
    "target_layer_ids": [1, 9, 17, 25, 33],
    "target_num_hidden_layers": 36,
}
SPECULATORS_773 = SPECULATORS_DFLASH | {"projector_type": "domino", "emb_dim": 256, "gru_hidden_dim": 1024}


def read(stored) -> DominoConfig:
    return interpret(stored)[1]


@pytest.mark.parametrize("name", SPECFORGE)
def test_specforge(name):
    num_layers, layers, theta, order = SPECFORGE[name]
    stored = DFLASH if order is None else DOMINO_8B
    nested = stored[NESTED] | {"target_layer_ids": layers} | ({} if order is None else {"shift_label": order})
    config = read(stored | {"num_target_layers": num_layers, "rope_theta": theta, NESTED: nested})
    assert (config.num_target_layers, config.target_layer_ids) == (num_layers, layers)
    assert config.rope_parameters["rope_theta"] == theta
    assert (config.projector_type, config.shift_label) == ("dflash" if order is None else "domino", bool(order))


def test_specforges_early_domino_has_a_section_for_its_head():
    head = {name: DOMINO_8B[NESTED][name] for name in ("pure_draft_prefix_len", "gru_hidden_dim", "shift_label")}
    rest = {name: value for name, value in DOMINO_8B[NESTED].items() if name not in head}
    config = read(DOMINO_8B | {NESTED: rest, "domino_config": head})
    assert (config.shift_label, config.pure_draft_prefix_len, config.gru_hidden_dim) == (True, 1, 1024)


@pytest.mark.parametrize("name", ["sample_from_anchor", "query_zero_predicts_next", "shift_label"])
@pytest.mark.parametrize("place", ["top", NESTED])
@pytest.mark.parametrize("value", [True, False])
def test_the_order_of_a_block_is_read_by_every_name_and_in_every_place(name, place, value):
    said = {name: value} if place == "top" else {NESTED: DFLASH[NESTED] | {name: value}}
    assert read(DFLASH | said).shift_label is value
    assert read(SPECULATORS_DFLASH | {name: value}).shift_label is value


def test_values_that_do_nothing_are_no_reason_to_refuse():
    neutral = {"output_multiplier": 1.0, "input_embedding_scale": 1, "final_logit_softcapping": None, "causal": False}
    assert read(DFLASH | {NESTED: DFLASH[NESTED] | neutral}).projector_type == "dflash"


def test_deepspecs_dflash_is_dflash_and_begins_behind_the_anchor():
    config = read(DEEPSPEC)
    assert (config.projector_type, config.shift_label, config.num_draft_tokens) == ("dflash", True, 7)
    assert read(DEEPSPEC | {"sample_from_anchor": False}).shift_label is False


def test_verl_specos_domino_is_not_ours_and_keeps_its_rotary_base_and_heads():
    config = read(VERL_SPECO)
    assert config.rope_parameters["rope_theta"] == 5e6
    assert (config.head_dim, config.num_target_layers) == (2560 // 32, 36)
    assert (config.projector_type, config.shift_label, config.pure_draft_prefix_len) == ("domino", True, 1)


def test_speculators_domino_of_either_pull_request(tiny_qwen3, tmp_path):
    stored = reduced(SPECULATORS_773)
    ours = our_drafter(tiny_qwen3, reduced(DOMINO_8B))
    prefixes = {"prefix_gru": "domino_head.prefix_gru", "embed_proj": "domino_head.embed_proj"}
    loaded = DominoDraftModel.from_pretrained(write(tmp_path, stored, stored_tensors(ours, prefixes)))
    assert (loaded.config.shift_label, loaded.config.pure_draft_prefix_len) == (True, 1)
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in ours.state_dict().items())


def test_ours_tells_its_rotary_base_by_either_name():
    assert DominoConfig(rope_theta=5e6).rope_parameters == {"rope_type": "default", "rope_theta": 5e6}
    linear = {"rope_type": "linear", "factor": 2.0}
    assert DominoConfig(rope_theta=5e6, rope_parameters=linear).rope_parameters == linear | {"rope_theta": 5e6}
    with pytest.raises(ValueError, match=r"rope_theta must be 10000\.0 as in rope_parameters, got 5"):
        DominoConfig(rope_theta=5, rope_parameters=linear | {"rope_theta": 1e4})
    with pytest.raises(ValueError, match="block_sise must be a field of DominoConfig"):
        DominoConfig(block_sise=8)


@torch.no_grad()
def test_the_last_layer_is_read_after_the_final_norm_as_its_trainer_reads_it(tiny_qwen3, tmp_path):
    last = tiny_qwen3.config.num_hidden_layers - 1
    stored = reduced(DOMINO_8B)
    stored[NESTED]["target_layer_ids"] = [0, last]
    folder = write(tmp_path, stored, stored_tensors(our_drafter(tiny_qwen3, reduced(DOMINO_8B)), {}))
    drafter = DominoDraftModel.from_pretrained(folder)
    view = TargetModel(tiny_qwen3, drafter.config)
    ids = torch.arange(4, 14)[None]
    read = view.captured(tiny_qwen3(ids, **view.capture_kwargs()))
    assert torch.equal(read[1], tiny_qwen3.model(ids).last_hidden_state)
    options = {"max_new_tokens": 12, "do_sample": False}
    plain = tiny_qwen3.generate(ids, **options)
    for more in ({}, {"cache_implementation": "static"}):
        assert torch.equal(tiny_qwen3.generate(ids, assistant_model=drafter, **options, **more), plain)
