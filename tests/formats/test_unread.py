"""A field of a drafter's configuration that is neither read nor harmless is named, once, and refuses nothing."""

from __future__ import annotations

import json
import logging

import pytest
from builders import build_drafter
from method_table import EVERY
from released import (
    DFLASH,
    DOMINO_8B,
    MUSE_GLIMMER,
    RELEASED,
    WINDOWED,
    our_drafter,
    reduced,
    stored_tensors,
    write_checkpoint,
)
from released import SPECULATORS_DFLASH as SPECULATORS
from test_dspark_files import LAYOUTS, SELECTING
from test_interleaved import SAID
from test_trainers import DEEPSPEC_DFLASH, EAGLE, EAGLES, VERL_DOMINO

from hf_domino import DominoConfig, DominoDraftModel
from hf_domino.formats.adapters import unread_fields
from hf_domino.formats.registry import format_of

pytestmark = pytest.mark.transformers

KNOWN = {
    **RELEASED,
    **WINDOWED,
    **LAYOUTS,
    **SELECTING,
    **{name: EAGLE | fields for name, (fields, _) in EAGLES.items()},
    **{f"{name}, interleaved": stored for name, (_, stored) in SAID.items()},
    "deepspec_dflash": DEEPSPEC_DFLASH,
    "verl": VERL_DOMINO,
}
SECTION, LAYER = "dflash_config", "transformer_layer_config"
# Of a layout: fields that are put into it, and their names in the warning.
UNREAD = [
    (
        DFLASH,
        {"clever_trick": 2, "rope_parameters": {"rope_theta": 1e6, "wobble": 3}},
        "clever_trick, rope_parameters.wobble",
    ),
    (DFLASH, {SECTION: DFLASH[SECTION] | {"clever_trick": "on"}}, "dflash_config.clever_trick"),
    (DFLASH, {"eagle_config": {"clever_trick": True}}, "eagle_config"),
    (MUSE_GLIMMER, {"clever_trick": [1]}, "clever_trick"),
    (
        SPECULATORS,
        {LAYER: SPECULATORS[LAYER] | {"block_size": 4}, "clever_trick": 0.5},
        "clever_trick, transformer_layer_config.block_size",
    ),
    (SPECULATORS, {"sliding_window": 4}, "sliding_window"),
    (
        SPECULATORS,
        {"speculators_config": {"algorithm": "dflash", "clever_trick": 1}},
        "speculators_config.clever_trick",
    ),
    (EAGLE, {"eagle_config": {"clever_trick": True}}, "eagle_config.clever_trick"),
    ({"model_type": "domino", "draft_pool_size": 8, "clever_trick": False}, {}, "clever_trick"),
]


@pytest.mark.parametrize("name", KNOWN)
def test_nothing_is_named_in_the_files_of_known_trainers(name):
    stored = KNOWN[name]
    assert format_of(stored).unread(stored) == []


@pytest.mark.parametrize(("stored", "fields", "named"), UNREAD)
def test_a_field_that_nobody_knows_is_named_with_its_place(stored, fields, named):
    stored = stored | fields
    assert ", ".join(format_of(stored).unread(stored)) == named


@pytest.mark.parametrize("value", [False, 0])
def test_a_field_that_is_false_may_say_something(value):
    stored = DFLASH | {"clever_trick": value, SECTION: DFLASH[SECTION] | {"clever_trick": value}}
    assert format_of(stored).unread(stored) == ["clever_trick", f"{SECTION}.clever_trick"]


# Of a copy of Qwen3.6's configuration, which DeepSpec and Automodel make.
NOISE = {"attn_output_gate": True, "full_attention_interval": 4, "linear_num_key_heads": 16, "mtp_num_hidden_layers": 1}


@pytest.mark.parametrize("stored", [DEEPSPEC_DFLASH, EAGLE])
def test_what_a_copied_configuration_says_of_the_target_alone_is_known(stored):
    stored = stored | NOISE | {"vision_config": {"depth": 27}, "num_experts": 128}
    assert format_of(stored).unread(stored) == []


@pytest.mark.parametrize("value", [None, "", [], {}])
def test_an_empty_field_of_others_says_nothing(value):
    stored = DFLASH | {"clever_trick": value, SECTION: DFLASH[SECTION] | {"clever_trick": value}}
    assert format_of(stored).unread(stored) == []


def test_what_is_not_read_is_said_once_at_load(tiny_qwen3, tmp_path, caplog):
    stored = reduced(DOMINO_8B)
    tensors = stored_tensors(our_drafter(tiny_qwen3, stored), {})
    write_checkpoint(tmp_path, stored | {"clever_trick": 2, "num_anchors": 512}, tensors)
    with caplog.at_level(logging.WARNING):
        DominoDraftModel.from_pretrained(tmp_path).save_pretrained(tmp_path / "ours")
    said = [record.getMessage() for record in caplog.records if "not read" in record.getMessage()]
    assert len(said) == 1
    assert "not read: clever_trick. " in said[0]
    assert (unread_fields(tmp_path), unread_fields(tmp_path / "ours")) == (["clever_trick"], [])
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path)}))
    assert unread_fields(tmp_path / "adapter") == ["clever_trick"]


def test_our_own_files_hold_nothing_that_is_not_read(tiny_qwen3, tmp_path, caplog):
    for kind, fields in EVERY.items():
        build_drafter(tiny_qwen3, **fields).save_pretrained(tmp_path / kind)
        with caplog.at_level(logging.WARNING):
            DominoDraftModel.from_pretrained(tmp_path / kind)
    assert "not read" not in caplog.text
    stored = json.loads((tmp_path / "domino" / "config.json").read_text()) | {"torchscript": False}
    assert format_of(stored).unread(stored) == []
    assert DominoConfig(**stored).projector_type == "domino"
