"""Checkpoints that cannot be loaded, each with one clear error."""

from __future__ import annotations

import copy
import json

import pytest
from released import RELEASED, WINDOWED, reduced, write_checkpoint

from hf_domino import DominoConfig, DominoDraftModel
from hf_domino.formats import source
from hf_domino.formats.registry import OTHER_KINDS, format_of, refuse_others

DOMINO, SPECULATORS, OURS = "specforge_domino", "speculators_dflash", "ours"
# A dictionary is put into the configuration, into the one it nests where it says so; None removes.
CONFIGS = [
    (DOMINO, {"hidden_size": None}, "hidden_size in the checkpoint's config.json must be given"),
    (
        DOMINO,
        {"num_hidden_layers": 10**12, "dflash_config": {"target_layer_ids": None}},
        "num_hidden_layers .* must be at most 1000, got 10{12}.",
    ),
    (DOMINO, {"block_size": None}, "block_size .* must be given"),
    (DOMINO, {"rope_theta": None}, "rope_theta .* must be given"),
    (DOMINO, {"block_size": "6", "dflash_config": {"block_size": "6"}}, "block_size .* must be int, got '6'"),
    (DOMINO, {"rope_scaling": {"rope_type": "longrope"}}, r"config.json \(.*\) cannot be read: .*'longrope'"),
    (DOMINO, {"num_attention_heads": 3}, "num_attention_heads must be a multiple of num_key_value_heads=2, got 3"),
    (DOMINO, {"emb_dim": 8}, "emb_dim .* must be 16 as in dflash_config.emb_dim, got 8"),
    (
        DOMINO,
        {"rope_parameters": {"rope_theta": 5e5}},
        "rope_theta .* must be 500000.0 as in rope_parameters",
    ),
    (
        DOMINO,
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        "must be one of .*'dynamic'",
    ),
    (DOMINO, {"attention_bias": True}, "attention_bias must be False"),
    (DOMINO, {"layer_types": ["sliding_attention"] * 2}, "sliding_window .* must be given, with use_sliding_window"),
    (DOMINO, {"layer_types": ["chunked_attention"] * 2}, "layer_types must be each one of .* got .'chunked_attention'"),
    (DOMINO, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config must be absent.*quantised"),
    (DOMINO, {"model_type": "no_such_type"}, "model_type of the backbone must be one that transformers knows"),
    (DOMINO, {"dflash_config": "domino"}, "dflash_config .* must be an object, got 'domino'"),
    (DOMINO, {"dflash_config": {"mask_token_id": None}}, "mask_token_id .* must be given"),
    (DOMINO, {"dflash_config": {"mask_token_id": 64}}, r"mask_token_id must be in \[0, 63\]"),
    (DOMINO, {"dflash_config": {"gru_hidden_dim": None}}, "gru_hidden_dim .* must be given"),
    (DOMINO, {"dflash_config": {"target_layer_ids": [0, 4]}}, r"target_layer_ids must be unique and in \[0, 3\]"),
    # A choice of training, which is never guessed.
    (
        DOMINO,
        {"dflash_config": {"target_layer_ids": None}},
        "target_layer_ids .* must be given.* training",
    ),
    (SPECULATORS, {"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids .* must be given"),
    # Two names, or places, of the block's order that contradict each other.
    (DOMINO, {"sample_from_anchor": False}, "sample_from_anchor .* must be True as shift_label, got False"),
    (
        DOMINO,
        {"dflash_config": {"query_zero_predicts_next": False}},
        "query_zero_predicts_next .* must be True as shift_label, got False",
    ),
    (SPECULATORS, {"shift_label": True, "sample_from_anchor": False}, "sample_from_anchor .* must be True as shift"),
    (
        DOMINO,
        {"sample_from_anchor": True, "dflash_config": {"sample_from_anchor": False}},
        "sample_from_anchor .* must be False as in dflash_config.sample_from_anchor, got True",
    ),
    (DOMINO, {"dflash_config": {"output_multiplier": 0.2}}, "output_multiplier .* must be 1.0, got 0.2"),
    (DOMINO, {"final_logit_softcapping": 20.0}, "final_logit_softcapping .* must be 0.0, got 20.0"),
    (DOMINO, {"dflash_config": {"input_embedding_scale": 2.0}}, "input_embedding_scale .* must be 1.0, got 2.0"),
    (SPECULATORS, {"output_multiplier": 2}, "output_multiplier .* must be 1.0, got 2"),
    (SPECULATORS, {"dflash_config": {"final_logit_softcapping": 20.0}}, "final_logit_softcapping .* must be 0.0, got"),
    (DOMINO, {"dflash_config": {"causal": True}}, "causal .* must be False, got True"),
    (OURS, {"draft_lenght": "full"}, "draft_lenght must be a field of DominoConfig, got none of that name"),
    (OURS, {"attention_bias": True}, "attention_bias must be a field of DominoConfig"),
    (OURS, {"use_swa": True}, "use_swa must be a field of DominoConfig"),
    (OURS, {"dflash_config": {"shift_label": False}}, "dflash_config must be a field of DominoConfig"),
    (OURS, {"rope_theta": 5e6}, "rope_theta must be 10000.0 as in rope_parameters, got 5000000.0"),
    (OURS, {"target_layer_ids": None}, "target_layer_ids .* must be given"),
    (DOMINO, {"dflash_config": {"projector_type": "other"}}, "projector_type must be one of domino.* got 'other'"),
    (DOMINO, {"dflash_config": {"projector_type": "dflash"}}, "projector_type must be 'domino' as architectures says"),
    (DOMINO, {"dflash_config": {"shift_label": 1}}, "shift_label .* must be bool, got 1"),
    (DOMINO, {"dflash_config": {"use_swa": True}}, "sliding_window .* must be given"),
    (
        DOMINO,
        {"dflash_config": {"use_swa": True, "swa_window_size": "8"}},
        "sliding_window .* must be int or None, got '8'",
    ),
    (DOMINO, {"dflash_config": {"attention_sink_bias": True}}, "attention_sink_bias .* must be False"),
    (DOMINO, {"is_causal": True}, "is_causal .* must be False"),
    (SPECULATORS, {"draft_vocab_size": 65}, r"draft_vocab_size must be in \[1, 64\] \(vocab_size=64\), got 65"),
    (SPECULATORS, {"draft_vocab_size": None}, r"draft_vocab_size must be in \[1, 64\] .* got 32000"),
    (SPECULATORS, {"draft_vocab_size": "8"}, "draft_vocab_size .* must be int or None, got '8'"),
    (DOMINO, {"draft_vocab_size": 65}, r"draft_vocab_size must be in \[1, 64\]"),
    (
        SPECULATORS,
        {"aux_hidden_state_layer_ids": [0, 1]},
        "aux_hidden_state_layer_ids must be a list .* from 1 on",
    ),
    (
        SPECULATORS,
        {"aux_hidden_state_layer_ids": [True, 2]},
        "aux_hidden_state_layer_ids must be a list .* from 1 on",
    ),
    (SPECULATORS, {"hidden_size": 64}, "hidden_size must be 32 as in transformer_layer_config.hidden_size, got 64"),
    (SPECULATORS, {"transformer_layer_config": None}, "transformer_layer_config .* must be given"),
    (
        SPECULATORS,
        {"speculators_model_type": "other"},
        "speculators_model_type must be 'dflash' or 'domino'",
    ),
]
KINDS = {
    "P-EAGLE": [
        {"speculators_model_type": "peagle"},
        {"architectures": ["LlamaEagle3DraftModel"], "num_hidden_layers": 36, "parallel_drafting": True},
    ],
    "EAGLE, not EAGLE-3": [
        {"architectures": ["LlamaForCausalLMEagle"], "model_type": "llama"},
        {"speculators_model_type": "eagle"},
    ],
    "Medusa with lm_heads of its own": [{"model_type": "medusa", "medusa_num_heads": 4}],
    "DFlash 2": [{"architectures": ["DFlash2DraftModel"], "dflash_config": {"selector_rank": 256}}],
    "DSpark": [
        {"architectures": ["Qwen3DSparkModel"]},
        {"architectures": ["Qwen3DSparkModel"], "markov_rank": 0, "enable_confidence_head": True},
        {"dflash_config": {"projector_type": "dspark"}},
    ],
    "LiLiCorr": [{"architectures": ["LiLiCorrDraftModel"]}],
    "JetSpec": [{"architectures": ["JetSpecDraftModel"], "dflash_config": {"causal": True}}],
    "DFlash or DSpark on Gemma": [{"architectures": ["Gemma4DSparkModel"], "markov_rank": 0}],
    "MTP": [{"speculators_model_type": "mtp"}],
}


def changed(stored, change):
    """A configuration with fields replaced, in nested ones too, and those that are None taken out."""
    stored = copy.deepcopy(stored)
    for name, value in change.items():
        is_nested = isinstance(value, dict) and isinstance(stored.get(name), dict)
        stored[name] = changed(stored[name], value) if is_nested else value
    return {name: value for name, value in stored.items() if value is not None}


@pytest.mark.parametrize(("name", "change", "message"), CONFIGS, ids=[f"{c[0]}-{next(iter(c[1]))}" for c in CONFIGS])
def test_configurations(tmp_path, name, change, message):
    stored = DominoConfig().to_dict() if name == OURS else reduced(RELEASED[name])
    write_checkpoint(tmp_path, changed(stored, change), {})
    with pytest.raises(ValueError, match=message):
        DominoDraftModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_drafters_of_another_kind_are_named(tmp_path, kind):
    for stored in KINDS[kind]:
        write_checkpoint(tmp_path, stored, {})
        with pytest.raises(
            ValueError, match=rf"kind must be Domino, DFlash or EAGLE-3, got '{kind} \(.*hf_domino cannot run"
        ):
            DominoDraftModel.from_pretrained(tmp_path)


def test_every_other_kind_is_tried_and_no_release_is_one():
    assert OTHER_KINDS.keys() == KINDS.keys()
    for stored in (*RELEASED.values(), *WINDOWED.values()):
        refuse_others(stored)
    assert format_of({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}) is None


def test_a_mistyped_folder_is_told_at_once(tmp_path, monkeypatch):
    def head(url, token, timeout):
        raise ConnectionError("no network")

    monkeypatch.setattr(source, "get_hf_file_metadata", head)
    (tmp_path / "released").mkdir()
    with pytest.raises(ValueError, match=r"no such folder\. Did you mean '.*released'\?"):
        DominoDraftModel.from_pretrained(tmp_path / "relesed")
    with pytest.raises(ValueError, match=r"the Hub does not answer \(no network\)"):
        DominoDraftModel.from_pretrained("somebody/relesed")


def test_targets_are_still_refused_as_such(saved_pair):
    with pytest.raises(ValueError, match=r"model_type must be 'domino', got 'qwen3': this is no drafter"):
        DominoDraftModel.from_pretrained(saved_pair[0])
    assert json.loads((saved_pair[0] / "config.json").read_text())["model_type"] == "qwen3"
