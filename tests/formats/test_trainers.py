"""What the files of each trainer mean: facts of their configurations, and of the code that trains and serves them."""

from __future__ import annotations

import pytest
import torch
from released import (
    DFLASH,
    DOMINO_8B,
    MUSE_GLIMMER,
    QWEN3_8B,
    SPECULATORS_DFLASH,
    SPECULATORS_DOMINO,
    changed,
    our_drafter,
    reduced,
    stored_tensors,
    write_checkpoint,
)
from transformers import AutoConfig

from hf_domino import DominoConfig, DominoDraftModel
from hf_domino.formats.loading import interpret
from hf_domino.targets.view import TargetModel
from hf_domino.training.objective.forward import read_target

pytestmark = pytest.mark.transformers

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64, "mask_token_id": 3}
SECTION, LAYER_IDS = "dflash_config", [1, 9, 17, 25, 33]
ORDERS = ("shift_label", "sample_from_anchor", "query_zero_predicts_next")
# What differs among the files of `configs/` of sgl-project/SpecForge (a6b6b02), by their names. Of block drafters:
# layers of the target, layers that are read, rotary base, and of Domino whether a position predicts the next token.
BLOCK_DRAFTERS = {
    "lfm2.5-1.2b-instruct-dflash": (16, [1, 4, 7, 10, 13], 1e6, None),
    "qwen3-4b-dflash, qwen3-8b-dflash": (36, LAYER_IDS, 1e6, None),
    "qwen3.5-4b-dflash": (32, [1, 8, 15, 22, 29], 1e7, None),
    "qwen3-8b-domino": (36, LAYER_IDS, 1e6, True),
    "qwen3.5-4b-domino": (32, [3, 11, 19, 27, 31], 1e7, True),
    "qwen3.6-27b-domino-full-attention": (64, [1, 16, 31, 46, 61], 1e7, False),
}
# And of EAGLE-3, beside a Llama's sizes.
YARN = {"rope_type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707, "beta_fast": 32.0}
EAGLES = {
    "llama3-8B, llama4-scout-17B-16E, ling-flash-2.0": ({}, {}),
    "deepseek-v3-671b": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 29, 57]}}, [1, 29, 57]),
    "deepseek-v2-lite": ({"rope_theta": 10000, "rope_scaling": YARN | {"original_max_position_embeddings": 4096}}, {}),
    "gemma3-1b": ({"head_dim": 256, "sliding_window": 512, "use_sliding_window": False}, {}),
    "phi4": ({"model_type": "phi3", "rope_theta": 250000.0}, {}),
    "qwen3-30B-A3B-eagle3.1": ({"fc_norm": True, "norm_output": True}, {}),
    "qwen2.5-7b": ({"draft_vocab_size": 16000, "sliding_window": 131072, "use_sliding_window": False}, {}),
}
EAGLE = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "vocab_size": 151936,
    "draft_vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 163840,
}
MROPE = {"type": "mrope", "mrope_section": [16, 24, 24]}
NOT_READ = {
    "qwen2-5-vl-7b-eagle3": (EAGLE | {"rope_theta": 1e6, "rope_scaling": MROPE}, "must be one of .* got 'mrope'"),
    "qwen2.5-vl-32b-eagle3": (EAGLE | {"hidden_size": 5120, "num_attention_heads": 28}, "5120. is not a multiple"),
    "qwen3-8b-dspark": (
        DFLASH | {"architectures": ["DSparkDraftModel"]},
        r"Domino, .* got 'DSpark in another layout \(dspark\)'",
    ),
    "qwen3-8b-peagle": (
        EAGLE | {"architectures": ["PEagleDraftModel"], "num_hidden_layers": 4},
        "method must be .*EAGLE",
    ),
}
# Flat: nothing is nested, and no field tells the order of a block.
DEEPSPEC_DFLASH = QWEN3_8B | {
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 7,
    "confidence_head_with_markov": True,
    "enable_confidence_head": False,
    "markov_rank": 0,
    "mask_token_id": 151669,
    "num_anchors": 512,
    "num_target_layers": 36,
    "target_layer_ids": LAYER_IDS,
}
# As its own class writes it: the head's width and the kind of attention are left out.
VERL_DOMINO = {
    "architectures": ["DominoDraftModel"],
    "model_type": "domino",
    "block_size": 16,
    "dtype": "bfloat16",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 1,
    "vocab_size": 151936,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "mask_token_id": 151669,
    "target_layer_ids": LAYER_IDS,
    "num_context_layers": 5,
    "num_target_layers": 5,
    "target_num_hidden_layers": 36,
    "target_hidden_size": 2560,
    "shift_label": True,
    "projector_type": "domino",
    "emb_dim": 256,
    "gru_hidden_dim": 1024,
    "pure_draft_prefix_len": 1,
    "num_anchors": 512,
    "loss_decay_gamma": 7.0,
    "lambda_base_start": 1.0,
    "lambda_base_decay_steps": 2000,
}


def read(stored) -> DominoConfig:
    return interpret(stored)[1]


@pytest.mark.parametrize("name", BLOCK_DRAFTERS)
def test_specforges_block_drafters(name):
    num_layers, layer_ids, theta, order = BLOCK_DRAFTERS[name]
    told = {"num_target_layers": num_layers, "rope_theta": theta, f"{SECTION}.target_layer_ids": layer_ids}
    told |= {} if order is None else {f"{SECTION}.shift_label": order}
    config = read(changed(DFLASH if order is None else DOMINO_8B, told))
    assert (config.num_target_layers, config.target_layer_ids) == (num_layers, layer_ids)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": theta}
    assert (config.projector_type, config.shift_label) == ("dflash" if order is None else "domino", bool(order))


@pytest.mark.parametrize("name", EAGLES)
def test_specforges_eagles(name):
    fields, layer_ids = EAGLES[name]
    config = read(EAGLE | fields)
    assert (config.projector_type, config.target_layer_ids) == ("eagle3", layer_ids or None)
    assert config.rope_parameters["rope_theta"] == fields.get("rope_theta", 10000.0)
    assert config.head_dim == fields.get("head_dim", 128)
    assert config.draft_width == fields.get("draft_vocab_size", 32000)
    assert (config.fc_norm, config.norm_output) == ("fc_norm" in fields,) * 2


@pytest.mark.parametrize("name", NOT_READ)
def test_specforges_files_that_are_refused_say_why(name):
    stored, message = NOT_READ[name]
    with pytest.raises(ValueError, match=message):
        read(stored)


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("stored", [DFLASH, DOMINO_8B, SPECULATORS_DFLASH, DEEPSPEC_DFLASH, VERL_DOMINO])
def test_the_order_of_a_block_is_read_by_each_of_its_names_in_each_place(stored, name):
    nested = {field: value for field, value in stored.get(SECTION, {}).items() if field not in ORDERS}
    bare = {field: value for field, value in stored.items() if field not in ORDERS} | {SECTION: nested}
    for value in (True, False):
        assert read(bare | {name: value}).shift_label is value
        assert read(bare | {SECTION: nested | {name: value}}).shift_label is value
        assert read(bare | {name: value, SECTION: nested | dict.fromkeys(ORDERS, value)}).shift_label is value


def proposing(kind, count, **said):
    """A file of speculators with blocks of 16, of which so many positions give proposals."""
    told = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": count}]}
    head = {"dspark": {"markov_rank": 8}, "domino": SPECULATORS_DOMINO}.get(kind, {})
    stored = SPECULATORS_DFLASH | {"speculators_model_type": kind, "block_size": 16} | head
    return {name: value for name, value in stored.items() if name not in ORDERS} | {"speculators_config": told} | said


@pytest.mark.parametrize("kind", ["dflash", "dspark", "domino"])
def test_speculators_number_of_proposals_tells_the_order_of_its_block(kind):
    for count, order in ((15, False), (16, True), (7, kind != "dflash")):
        assert read(proposing(kind, count)).shift_label is order
        assert read(proposing(kind, count, sample_from_anchor=order)).num_draft_tokens == 15 + order
    for count in (15, 16):
        with pytest.raises(
            ValueError, match=rf"speculative_tokens .* must be {31 - count} of block_size=16 .* got {count}"
        ):
            read(proposing(kind, count, sample_from_anchor=count == 15))


def test_the_order_of_speculators_files_that_do_not_tell_it():
    for kind, order in (("domino", True), ("dspark", True), ("dflash", False)):
        stored = proposing(kind, None, speculators_config=None)
        assert read(stored).shift_label is order
        for section in ("dflash_config", "dspark_config"):
            assert read(stored | {section: {"sample_from_anchor": not order}}).shift_label is not order
            with pytest.raises(ValueError, match="sample_from_anchor"):
                read(stored | {section: {"sample_from_anchor": order}, "sample_from_anchor": not order})


def test_a_spare_anchor_is_an_order_of_a_block_too():
    assert read(DFLASH | {"dspark_bonus_anchor": False}).shift_label is True
    with pytest.raises(ValueError, match=r"dspark_bonus_anchor .* must be True as sample_from_anchor=False says"):
        read(DFLASH | {"dspark_bonus_anchor": False, "sample_from_anchor": False})


@pytest.mark.parametrize("stored", [DFLASH, SPECULATORS_DFLASH, MUSE_GLIMMER])
def test_scales_of_plain_dflash_are_read(stored):
    nested = {"output_multiplier": 0.5, "input_embedding_scale": 1, "final_logit_softcapping": 0.0, "causal": False}
    config = read(stored | {SECTION: stored.get(SECTION, {}) | nested})
    assert (config.projector_type, config.output_multiplier, config.input_embedding_scale) == ("dflash", 0.5, 1)
    assert config.final_logit_softcapping is None


def test_deepspecs_dflash_is_dflash_and_begins_behind_the_anchor():
    assert read(DEEPSPEC_DFLASH | {"architectures": ["DFlashDraftModel"]}).shift_label is True  # restamped
    config = read(DEEPSPEC_DFLASH)
    assert (config.projector_type, config.shift_label, config.num_draft_tokens) == ("dflash", True, 7)


def test_ours_tells_its_rotary_base_by_either_name():
    assert DominoConfig(rope_theta=5e6).rope_parameters == {"rope_type": "default", "rope_theta": 5e6}
    linear = {"rope_type": "linear", "factor": 2.0}
    assert DominoConfig(rope_theta=5e6, rope_parameters=linear).rope_parameters == linear | {"rope_theta": 5e6}
    assert DominoConfig().rope_parameters == {"rope_type": "default", "rope_theta": 1e4}
    with pytest.raises(ValueError, match="rope_theta must be a field of DominoConfig"):
        DominoDraftModel(DominoConfig(**SIZES)).view(rope_theta=5e6)


def test_verl_specos_domino_keeps_its_rotary_base_and_the_width_of_its_heads(tiny_qwen3, tmp_path):
    config = read(VERL_DOMINO)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    assert (config.head_dim, config.num_target_layers, config.target_layer_ids) == (80, 36, LAYER_IDS)
    assert (read(changed(VERL_DOMINO, {"shift_label": None})).shift_label) is True  # its trainer knows no other
    small = reduced(VERL_DOMINO) | {"target_num_hidden_layers": 4, "target_hidden_size": 32, "num_hidden_layers": 2}
    ours = our_drafter(tiny_qwen3, reduced(DOMINO_8B))
    write_checkpoint(tmp_path, small, stored_tensors(ours, {}) | {"embed_tokens.weight": torch.zeros(64, 32)})
    loaded = DominoDraftModel.from_pretrained(tmp_path)
    assert (loaded.config.head_dim, loaded.config.shift_label, loaded.config.pure_draft_prefix_len) == (8, True, 1)
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in ours.state_dict().items())
    with pytest.raises(ValueError, match=r"target_hidden_size.* must be a field of DominoConfig"):
        AutoConfig.from_pretrained(tmp_path)  # which knows no formats


def test_a_domino_of_another_writer_with_our_fields_alone_has_the_width_of_its_heads():
    """Nothing in it is of another name than ours, but the width that ours always tell is not there."""
    theirs = {
        name: value
        for name, value in VERL_DOMINO.items()
        if name in DominoConfig.of_method("domino").__dataclass_fields__
    }
    config = read(theirs | {"model_type": "domino", "rope_theta": 1e6, "num_target_layers": 36})
    assert (config.head_dim, config.rope_parameters["rope_theta"]) == (80, 1e6)


@pytest.mark.parametrize("told", [{"partial_rotary_factor": 0.25}, {}])
def test_deepspecs_copy_of_its_targets_partial_rotation_means_nothing(told):
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    copied = DEEPSPEC_DFLASH | told | {"model_type": "qwen3_5_text", "rope_theta": None, "rope_parameters": rope}
    assert read(copied).rope_parameters == {"rope_type": "default", "rope_theta": 1e7}
    with pytest.raises(ValueError, match=r"partial_rotary_factor must be 1.0, got 0.25"):
        read(DFLASH | {"rope_theta": None, "rope_parameters": rope})


def test_layers_that_a_file_does_not_tell_can_be_given(tiny_qwen3, tmp_path):
    stored = changed(reduced(DFLASH), {f"{SECTION}.target_layer_ids": None})
    write_checkpoint(tmp_path, stored, stored_tensors(our_drafter(tiny_qwen3, reduced(DFLASH)), {}))
    assert DominoDraftModel.from_pretrained(tmp_path, target_layer_ids=[0, 1]).config.target_layer_ids == [0, 1]


@pytest.fixture
def last_layer_too(tiny_qwen3, tmp_path):
    """A file of SpecForge's Domino that reads the last layer, as its qwen3.5-4b-domino.json does; loaded and saved."""
    stored = changed(reduced(DOMINO_8B), {f"{SECTION}.target_layer_ids": [1, 3]})
    write_checkpoint(tmp_path / "theirs", stored, stored_tensors(our_drafter(tiny_qwen3, reduced(DOMINO_8B)), {}))
    DominoDraftModel.from_pretrained(tmp_path / "theirs").save_pretrained(tmp_path / "ours")
    return DominoDraftModel.from_pretrained(tmp_path / "ours")


@torch.no_grad()
@pytest.mark.parametrize("cache", [None, "static"])
def test_the_last_layers_state_is_read_after_the_final_norm(tiny_qwen3, last_layer_too, cache, monkeypatch):
    ids = torch.arange(4, 14)[None]
    expected = tiny_qwen3.model(ids, output_hidden_states=True).hidden_states
    target = TargetModel(tiny_qwen3, last_layer_too.config.layer_ids(tiny_qwen3.config))
    captured, final = read_target(target, {"input_ids": ids}, final=True)
    assert torch.equal(expected[4], tiny_qwen3.model(ids).last_hidden_state)
    for states in (target.captured(tiny_qwen3(ids, **target.capture_kwargs())), captured):
        assert torch.equal(states[0], expected[2])
        assert torch.equal(states[1], expected[4])
    assert torch.equal(final, expected[4])
    seen, fuse = [], last_layer_too.fuse_context

    def fuse_context(states):
        seen.append(torch.cat(list(states), dim=-1))
        return fuse(states)

    monkeypatch.setattr(last_layer_too, "fuse_context", fuse_context)
    options = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": cache}
    text = tiny_qwen3.generate(ids, assistant_model=last_layer_too, **options)
    assert torch.equal(text, tiny_qwen3.generate(ids, **options))
    torch.testing.assert_close(seen[0][:, :10], torch.cat((expected[2], expected[4]), dim=-1))


@pytest.mark.parametrize("stored", [DFLASH, SPECULATORS_DFLASH, MUSE_GLIMMER], ids=["dflash", "speculators", "muse"])
@pytest.mark.parametrize("field", ["causal", "is_causal", "attention_sink_bias"])
def test_what_is_not_done_here_is_refused_in_every_layout_and_place(stored, field):
    for said in ({field: 0.5}, {"dflash_config": stored.get("dflash_config", {}) | {field: 0.5}}):
        with pytest.raises(ValueError, match=f"{field} .* must be .*, got 0.5"):
            interpret(stored | said)
    nested = SPECULATORS_DFLASH["transformer_layer_config"] | {"final_logit_softcapping": 30.0}
    with pytest.raises(ValueError, match=r"final_logit_softcapping .* must be False, got 30.0"):
        interpret(SPECULATORS_DFLASH | {"transformer_layer_config": nested})


def test_what_dflash_2_leaves_out_is_what_its_trainer_always_does_or_is_named():
    windows = {"layer_types": ["sliding_attention"] * 5, "sliding_window": 64, "use_sliding_window": True}
    nested = SPECULATORS_DFLASH["transformer_layer_config"] | windows
    told = {"speculators_model_type": "dflash2", "transformer_layer_config": nested}
    config = read(SPECULATORS_DFLASH | told)
    assert (config.projector_type, config.shift_label, config.sliding_window_non_causal) == ("dflash2", False, True)
    assert (config.conv_kernel_size, config.conv_group_size, config.selector_rank) == (2, 16, 256)
    assert config.selector_top_k == config.draft_pool_size == 16
    for name in ("DFlash2DraftModel", "Qwen3DFlash2DraftModel"):  # of z-lab and Automodel
        with pytest.raises(ValueError, match=r"selector_rank in .* must be given"):
            read(DFLASH | {"architectures": [name]})


def test_transformers_own_drafter_says_its_order_by_the_same_names():
    assert interpret(MUSE_GLIMMER | {"sample_from_anchor": True})[1].shift_label is True
    assert interpret(MUSE_GLIMMER)[1].shift_label is False
