"""Drafters leave as they came: folders in other projects' words give the same drafter again."""

from __future__ import annotations

import json
import os

import pytest
import torch
from builders import build_drafter
from released import RELEASED
from test_released import FP32_TOL, draft_logits

from hf_domino import DominoConfig, DominoDraftModel
from hf_domino.formats.exporting import stored_config
from hf_domino.formats.registry import format_of

pytestmark = pytest.mark.transformers

# What a drafter is, whoever stores it; the rest is ours alone, or follows from these.
FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_parameters"),
    *("block_size", "mask_token_id", "target_layer_ids", "projector_type", "shift_label", "num_draft_tokens"),
    *("conv_kernel_size", "output_multiplier", "has_sliding_layers", "sliding_window", "sliding_window_non_causal"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
HEAD_FIELDS = ("emb_dim", "gru_hidden_dim", "pure_draft_prefix_len")
YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 64}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
CONVOLVED = {"conv_kernel_size": 2, "conv_group_size": 8}
# What differs from a tiny drafter's defaults, and the format.
EXPORTS = {
    "domino": ({"pure_draft_prefix_len": 1, "rms_norm_eps": 1e-5}, "specforge"),
    "domino_unshifted": ({"shift_label": False, "rope_parameters": YARN}, "specforge"),
    "dflash": ({"projector_type": "dflash", "shift_label": False}, "specforge"),
    "dflash_windows": ({"projector_type": "dflash", "shift_label": False, **WINDOWS}, "specforge"),
    "domino_windows": ({"pure_draft_prefix_len": 1, "sliding_window_non_causal": True, **WINDOWS}, "specforge"),
    "dflash_shifted": ({"projector_type": "dflash", "num_target_layers": None}, "specforge"),
    "dflash_convolved": ({"projector_type": "dflash", "shift_label": False, **CONVOLVED}, "specforge"),
    "domino_convolved": ({"pure_draft_prefix_len": 1, "output_multiplier": 0.5, **CONVOLVED}, "specforge"),
    "dflash_speculators": ({"projector_type": "dflash", "shift_label": False, "rope_parameters": YARN}, "speculators"),
    "shifted_speculators": ({"projector_type": "dflash", "initializer_range": 0.1}, "speculators"),
}


@pytest.mark.parametrize("name", EXPORTS)
def test_round_trip(tiny_qwen3, tmp_path, name):
    overrides, layout = EXPORTS[name]
    drafter = build_drafter(tiny_qwen3, target_layer_ids=[0, 2], **overrides)
    written = drafter.export(tmp_path, layout, dtype=torch.float32)
    assert (written.folder, written.files) == (tmp_path, ("config.json", "model.safetensors"))
    again, info = DominoDraftModel.from_pretrained(tmp_path, output_loading_info=True)
    assert info["unexpected_keys"] == set()
    assert again.dtype == torch.float32
    fields = FIELDS + (HEAD_FIELDS if drafter.has_correction_head else ())
    assert {name: getattr(again.config, name) for name in fields} == {
        name: getattr(drafter.config, name) for name in fields
    }
    tensors = again.state_dict()
    assert tensors.keys() == drafter.state_dict().keys()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in drafter.state_dict().items())
    torch.testing.assert_close(draft_logits(again, tiny_qwen3), draft_logits(drafter, tiny_qwen3), **FP32_TOL)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored == stored_config(again.config, layout, torch.float32)
    for_transformers_4 = stored.get("transformer_layer_config", stored)["rope_scaling"]
    assert (for_transformers_4 is not None) == (overrides.get("rope_parameters") == YARN)


@pytest.mark.parametrize(
    ("name", "layout"),
    [("specforge_domino", "specforge"), ("zlab", "specforge"), ("speculators_dflash", "speculators")],
)
def test_configurations_of_the_releases_are_written_as_they_were(name, layout):
    released = RELEASED[name]
    written = stored_config(DominoConfig(**format_of(released).read(released)), layout)
    assert written["architectures"] == ["DFlashDraftModel"]
    kept = released.keys() - {"architectures", "auto_map", "speculators_config", "transformer_layer_config"}
    assert {key: written[key] for key in kept} == {key: released[key] for key in kept}
    nested, theirs = (stored.get("transformer_layer_config", {}) for stored in (written, released))
    assert nested.items() >= theirs.items()


def test_bfloat16_in_shards(tiny_drafter, tmp_path):
    written = tiny_drafter.export(tmp_path, max_shard_size=20_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(written.files) == set(os.listdir(tmp_path)) == {
        "config.json", "model.safetensors.index.json", *index["weight_map"].values()
    }  # fmt: skip
    assert len(written.files) > 4
    again = DominoDraftModel.from_pretrained(tmp_path)
    assert again.dtype == torch.bfloat16
    ours = tiny_drafter.state_dict()
    assert all(torch.equal(tensor, ours[name].bfloat16()) for name, tensor in again.state_dict().items())
    tiny_drafter.export(tmp_path, dtype="float16", overwrite=True)  # no shard is left to be read
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]
    assert DominoDraftModel.from_pretrained(tmp_path).dtype == torch.float16


DFLASH = {"projector_type": "dflash"}


@pytest.mark.parametrize(
    ("fields", "options", "said"),
    [
        ({}, {"format": "gguf"}, "format must be one of specforge, speculators, got 'gguf'. save_pretrained writes"),
        (
            {},
            {"format": "speculators"},
            "projector_type must be one of dflash, dspark, dflash2 .* got 'domino'. Use format=",
        ),
        (DFLASH | WINDOWS, {"format": "speculators"}, "sliding_window must be None .* got 8. Use format="),
        (DFLASH | {"target_layer_ids": [1, 3]}, {"format": "speculators"}, "target_layer_ids must be .*Use format="),
        ({}, {"dtype": "int8"}, "dtype must be one of .* got 'int8'"),
        ({}, {"engine": "tgi"}, "engine must be one of .* got 'tgi'"),
        ({}, {"engine": "sglang"}, "SGLang .*: pure_draft_prefix_len must be 1, got 0.* Train with"),
        ({"output_multiplier": 0.5}, {"engine": "vllm"}, "vLLM .*: output_multiplier must be absent, got 0.5"),
        ({}, {"engine": "dflash"}, "dflash .*: projector_type must be 'dflash', got 'domino'"),
    ],
)
def test_refused_before_anything_is_written(tiny_qwen3, tmp_path, fields, options, said):
    with pytest.raises(ValueError, match=said):
        build_drafter(tiny_qwen3, **fields).export(tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


def test_a_folder_that_is_not_empty(tiny_drafter, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"the folder to export to must be empty, got .* or pass overwrite=True"):
        tiny_drafter.export(tmp_path)
    with pytest.raises(ValueError, match=r"to must be a folder that can be written to, got '.*notes.txt'"):
        tiny_drafter.export(tmp_path / "notes.txt", overwrite=True)
    tiny_drafter.export(tmp_path, overwrite=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_what_stood_in_the_folder_is_kept_where_the_disk_is_full(tiny_drafter, tmp_path, no_file_beyond):
    tiny_drafter.export(tmp_path, dtype="float16", max_shard_size=20_000)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with no_file_beyond(10_000), pytest.raises(OSError, match=r"could not be written: File too large.* before is kept"):
        tiny_drafter.export(tmp_path, overwrite=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    tiny_drafter.export(tmp_path, overwrite=True)
    assert DominoDraftModel.from_pretrained(tmp_path).dtype == torch.bfloat16


def test_tensors_that_are_not_the_drafters_own(tiny_drafter, tmp_path):
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(tiny_drafter, peft.LoraConfig(r=2, target_modules=["fc"]))
    with pytest.raises(ValueError, match=r"tensors must be those .*'fc.base_layer.weight, fc.lora.*Merge an"):
        adapted.export(tmp_path)
    assert adapted.merge_and_unload().export(tmp_path).files
    tiny_drafter.fc.to("meta")
    with pytest.raises(ValueError, match=r"tensors must be in memory, got \['fc.weight'\]. Load the drafter without"):
        tiny_drafter.export(tmp_path / "new")


def test_of_a_wanted_engine_alone_is_said_what_it_will_not_take(tiny_qwen3, tmp_path, caplog):
    served = build_drafter(tiny_qwen3, pure_draft_prefix_len=1)
    with caplog.at_level("WARNING"):
        found = served.export(tmp_path, engine="sglang").refusals
    assert not found["sglang"]
    assert found["dflash"]
    assert "will not take" not in caplog.text


def test_what_engines_will_not_take_is_said_before_writing(tiny_drafter, tmp_path, monkeypatch, caplog):
    def save(*args, **kwargs):
        assert "SGLang 0.5.20 to 0.5.23 will not take this drafter: pure_draft_prefix_len must be 1" in caplog.text
        raise OSError("disk full")

    monkeypatch.setattr("hf_domino.formats.exporting.save_torch_state_dict", save)
    with caplog.at_level("WARNING"), pytest.raises(OSError, match="disk full"):
        tiny_drafter.export(tmp_path)
    assert not (tmp_path / "config.json").exists()  # no folder that looks whole
