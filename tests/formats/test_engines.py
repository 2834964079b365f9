"""The rules of engines, each with a configuration that breaks it alone.

SGLang's were compared with its own `parse_dflash_draft_config`, the others with what their loaders raise or ignore.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from released import DFLASH, DOMINO_8B, SPECULATORS_DFLASH, changed

from hf_domino import DominoConfig
from hf_domino.formats.engines import ENGINES, unmet
from hf_domino.formats.exporting import refusals, stored_config

pytestmark = pytest.mark.transformers

DOMINO = DOMINO_8B | {"architectures": ["DFlashDraftModel"]}
SERVED = DFLASH | {"hidden_act": "silu"}
SPECULATORS = changed(SPECULATORS_DFLASH, {"transformer_layer_config.hidden_act": "silu"})
MARKOV = DominoConfig(projector_type="dspark")
SELECTING = DominoConfig(projector_type="dflash2", conv_kernel_size=2, shift_label=False)
DSPARK, DFLASH2 = stored_config(MARKOV), stored_config(SELECTING)
# Engine, configuration, change (None removes), field.
BROKEN = [
    ("sglang", DOMINO, {"dflash_config.pure_draft_prefix_len": 0}, "pure_draft_prefix_len"),
    ("sglang", DOMINO, {"dtype": "float32"}, "dtype"),
    ("sglang", DOMINO, {"hidden_act": "gelu"}, "hidden_act"),
    ("sglang", SERVED, {"shift_label": True}, "shift_label"),
    ("sglang", SPECULATORS, {}, "the format"),
    ("sglang", DFLASH2, {"dflash_config.shift_label": True}, "shift_label"),
    ("sglang", DSPARK, {"sample_from_anchor": False}, "sample_from_anchor"),
    ("vllm", DFLASH2, {"dflash_config.shift_label": True}, "shift_label"),
    ("vllm", stored_config(SELECTING, "speculators"), {}, "speculators_model_type"),
    ("vllm", DSPARK, {"markov_head_type": "gated"}, "markov_head_type"),
    ("vllm", stored_config(MARKOV, "speculators"), {"markov_head_type": "rnn"}, "markov_head_type"),
    ("vllm", DFLASH2, {"dflash_config.conv_kernel_size": None}, "conv_kernel_size"),
    ("vllm", DSPARK, {"conv_kernel_size": 2}, "conv_kernel_size"),
    *(("vllm", stored, {"input_embedding_scale": 2.0}, "input_embedding_scale") for stored in (DOMINO, SERVED, DSPARK)),
    ("sglang", DSPARK, {"conv_kernel_size": 2}, "conv_kernel_size"),
    *(("sglang", stored, {"output_multiplier": 0.5}, "output_multiplier") for stored in (DOMINO, SERVED, DSPARK)),
    *(("sglang", one, {"input_embedding_scale": 2.0}, "input_embedding_scale") for one in (SERVED, DSPARK, DFLASH2)),
    ("dflash", SERVED, {"conv_kernel_size": 2}, "conv_kernel_size"),
    ("dflash", DSPARK, {}, "projector_type"),
    ("dflash", DFLASH2, {}, "projector_type"),
    ("vllm", SPECULATORS, {"sample_from_anchor": True}, "sample_from_anchor"),
    ("vllm", SERVED, {"hidden_act": "gelu"}, "hidden_act"),
    ("dflash", DOMINO, {}, "projector_type"),
    ("dflash", SERVED, {"shift_label": True}, "shift_label"),
    ("dflash", SERVED, {"num_target_layers": None}, "num_target_layers"),
    ("dflash", SPECULATORS, {}, "the format"),
]


@pytest.mark.parametrize(("engine", "stored", "change", "field"), BROKEN)
def test_not_taken(engine, stored, change, field):
    (found,) = unmet(changed(stored, change), ENGINES[engine])
    assert found.field == field
    assert str(found).startswith(f"{field} must be {found.expected}, got {found.value!r}. ")
    assert str(found).endswith(".")


@pytest.mark.parametrize("kind", ["domino", "dflash"])
def test_convolutions_are_taken_by_sglang_and_vllm(kind):
    fields = {"pure_draft_prefix_len": 1} if kind == "domino" else {"shift_label": False}
    config = DominoConfig(projector_type=kind, conv_kernel_size=2, **fields)
    assert [name for name, reasons in refusals(stored_config(config), config).items() if not reasons] == [
        "sglang",
        "vllm",
    ]
    assert ENGINES["vllm"].plugin_for(config) == ENGINES["vllm"].plugin


def test_what_we_write_breaks_no_rule_that_writing_can_keep():
    domino = DominoConfig(pure_draft_prefix_len=1)
    dflash = DominoConfig(projector_type="dflash", shift_label=False)
    taken = {
        (engine, layout, config.projector_type)
        for config, layout in (
            *itertools.product((domino, dflash, MARKOV, SELECTING), ["specforge"]),
            *itertools.product((dflash, MARKOV, SELECTING), ["speculators"]),
        )
        for engine, reasons in refusals(stored_config(config, layout), config).items()
        if not reasons
    }
    assert taken == {
        *((engine, "specforge", "domino") for engine in ("sglang", "vllm")),
        *((engine, "specforge", "dflash") for engine in ENGINES),
        *((engine, "specforge", kind) for engine in ("sglang", "vllm") for kind in ("dspark", "dflash2")),
        *(("vllm", "speculators", kind) for kind in ("dflash", "dspark")),
    }


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_the_page_on_serving_starts_engines_as_we_say(name):
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    assert ENGINES[name].title in page
    assert ENGINES[name].command_for(DominoConfig(), "my-drafter-served", "TARGET") in page
