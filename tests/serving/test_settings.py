"""Which folders are served, and which settings and targets are refused by name."""

import re

import pytest
from builders import TINY, build_drafter
from transformers import Gemma3TextConfig, Qwen3Config

from hf_domino import DominoConfig
from hf_domino.formats.exporting import refusals, stored_config
from hf_domino.serving.settings import READ, TESTED, check_settings, check_target, served_config, version_notice
from hf_domino.targets.identity import config_digest

GREEDY = {
    "num_speculative_tokens": 7,
    "draft_sample_method": "greedy",
    "use_local_argmax_reduction": False,
    "use_heterogeneous_vocab": False,
    "num_speculative_tokens_per_batch_size": None,
}
REFUSED = [
    ("draft_sample_method", "probabilistic"),
    ("use_local_argmax_reduction", True),
    ("use_heterogeneous_vocab", True),
    ("num_speculative_tokens_per_batch_size", [(1, 4, 7)]),
    ("num_speculative_tokens", 8),
    ("num_speculative_tokens", 0),
    ("num_speculative_tokens", None),
    ("tensor_parallel_size", 2),
    ("pipeline_parallel_size", 2),
]


PLAIN = DominoConfig(projector_type="dflash", shift_label=False)


@pytest.mark.parametrize(
    "stored",
    [
        stored_config(PLAIN) | {"mask_token_id": 7, "rope_theta": 1, "quantization_config": {}},  # it is not judged
        stored_config(PLAIN, "speculators"),
        stored_config(DominoConfig(projector_type="dflash2", conv_kernel_size=2, shift_label=False)),
        {"architectures": ["LlamaForCausalLM"]},
    ],
    ids=["specforge", "speculators", "dflash2", "none"],
)
def test_other_peoples_drafters_are_left_to_vllm(stored):
    assert served_config(stored) is None


@pytest.mark.parametrize("projector_type", ["domino", "dflash"])
@pytest.mark.parametrize("shift_label", [True, False])
@pytest.mark.parametrize("prefix_len", [0, 1])
def test_what_we_export_is_served_as_it_is(tiny_qwen3, projector_type, shift_label, prefix_len):
    shape = {"projector_type": projector_type, "shift_label": shift_label, "pure_draft_prefix_len": prefix_len}
    config = build_drafter(tiny_qwen3, **shape).config
    told = served_config(Qwen3Config.from_dict(stored_config(config)).to_dict())  # as vLLM hands it over
    if projector_type == "dflash" and not shift_label:
        assert told is None
        return
    names = ["projector_type", "shift_label", "block_size", "target_layer_ids", "emb_dim", "gru_hidden_dim"]
    names = names[:4] if projector_type == "dflash" else [*names, "pure_draft_prefix_len"]
    assert [getattr(told, name) for name in names] == [getattr(config, name) for name in names]


@pytest.mark.parametrize("count", [1, 4, 7])
def test_settings_that_are_served(count):
    check_settings(DominoConfig(block_size=8), GREEDY | {"num_speculative_tokens": count})


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_settings_that_are_refused(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be .*, got .*[.] [A-Z]"):
        check_settings(DominoConfig(block_size=8), GREEDY | {name: value})


def test_another_target_is_refused(tiny_qwen3):
    config = build_drafter(tiny_qwen3).config
    config.target_config_digest = config_digest(tiny_qwen3.config)
    told = served_config(stored_config(config))
    check_target(told, tiny_qwen3.config)
    others = {name: 2 * TINY[name] for name in ("vocab_size", "num_hidden_layers", "hidden_size")}
    for name, value in (others | {"intermediate_size": 96}).items():
        field = name if name in others else "config_digest"
        with pytest.raises(ValueError, match=f"the target's {field} must be "):
            check_target(told, Qwen3Config(**(TINY | {name: value})))
    gemma = Gemma3TextConfig(**(TINY | {"vocab_size": 64}))
    with pytest.raises(ValueError, match="the target's model_type must be another than Gemma's"):
        check_target(DominoConfig.for_target(gemma), gemma)


def test_versions_that_were_not_tested_are_said():
    assert all(version_notice(version) is None for version in (*TESTED, f"{TESTED[0]}+cpu"))
    notice = version_notice("0.40.1")
    assert all(part in notice for part in (*TESTED, *READ, "0.40.1"))


@pytest.mark.parametrize(
    "fields", [{}, {"projector_type": "dflash"}, {"projector_type": "dflash", "shift_label": False}]
)
def test_convolutions_are_served(fields):
    config = DominoConfig(conv_kernel_size=2, **fields)
    told = served_config(Qwen3Config.from_dict(stored_config(config)).to_dict())
    assert (told.conv_kernel_size, told.conv_group_size) == (2, config.conv_group_size)


@pytest.mark.parametrize(
    "broken",
    [{"input_embedding_scale": 2.0}, {"layer_fusion": True}, {"output_multiplier": 0.5}, {"hidden_act": "gelu"}],
)
@pytest.mark.parametrize("kind", ["domino", "dflash"])
def test_export_and_the_plugin_refuse_the_same_in_the_same_words(kind, broken):
    config = DominoConfig(projector_type=kind, **broken)
    stored = stored_config(config)
    (reason,) = refusals(stored, config)["vllm"]
    with pytest.raises(ValueError, match=f"^{re.escape(str(reason))}$"):
        served_config(stored)
