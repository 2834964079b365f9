"""Which target is at hand: equal for copies in any dtype and place, another for other weights, said once."""

from __future__ import annotations

import copy
import threading
import warnings
from dataclasses import replace

import pytest
import torch
import transformers
from accelerate import cpu_offload
from families import tiny_config
from peft import LoraConfig, get_peft_model
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

import hf_domino
from hf_domino import DominoConfig, DominoDraftModel
from hf_domino.targets.identity import TargetIdentity, check_recorded, check_same, identify, recognise

pytestmark = pytest.mark.transformers

PROMPT = torch.tensor([[5, 9, 33, 20, 7]])
OPTIONS = {"do_sample": False, "max_new_tokens": 8}


def other_weights(target):
    """A target of the same shape that was trained a little further: every weight moves by 1e-3 of their spread."""
    other = copy.deepcopy(target)
    for weight in other.parameters():
        weight.data += 1e-2 * weight.std() * torch.randn_like(weight) if weight.dim() > 1 else 0
    return other


def text_of(whole, text):
    """The tensors of a multimodal model that are its text's, by the names that the text's class has."""
    tensors = {"lm_head.weight": whole.get_output_embeddings().weight.detach()}
    own = text.state_dict()
    for name, tensor in whole.get_decoder().state_dict().items():
        tensors[name if name in own else f"model.{name}"] = tensor
    return tensors


@pytest.fixture
def recorded(tiny_qwen3, tiny_drafter):
    """A drafter whose configuration names the tiny target."""
    target = copy.deepcopy(tiny_qwen3)
    target.config._name_or_path = target.name_or_path = "house/tiny"
    identify(target).record_in(tiny_drafter.config)
    return tiny_drafter


def said(target, drafter) -> list[str]:
    """Warnings of a call of `generate`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        target.generate(PROMPT, assistant_model=drafter, **OPTIONS)
    return [str(warning.message) for warning in caught if "trained for" in str(warning.message)]


def named(target, name: str):
    """A copy of a target that was loaded under another name."""
    target = copy.deepcopy(target)
    target.name_or_path = target.config._name_or_path = name
    return target


@pytest.mark.parametrize("way", [["bfloat16"], ["float16", "bfloat16"], ["float64"], ["float16"], ["float8_e4m3fn"]])
def test_no_rounding_changes_the_digest(way, tiny_qwen3):
    copied = copy.deepcopy(tiny_qwen3)
    for dtype in way:
        for weight in copied.parameters():
            weight.data = weight.data.to(getattr(torch, dtype))
    if way[-1].startswith("float8"):
        copied.to(torch.float32)
    assert identify(copied).has_weights_of(identify(tiny_qwen3))
    assert identify(copied).config_digest == identify(tiny_qwen3).config_digest


CHANGES = {
    "another rope_theta": lambda target: target.config.rope_parameters.update(rope_theta=5e5),
    "another epsilon": lambda target: setattr(target.config, "rms_norm_eps", 1e-2),
    "another activation": lambda target: setattr(target.config, "hidden_act", "gelu"),
    "scaled norms": lambda target: [scale(norm.weight, 1.25) for norm in target.modules() if "Norm" in str(type(norm))],
    "one scaled norm": lambda target: scale(target.model.layers[3].post_attention_layernorm.weight, 1.25),
    "a doubled matrix": lambda target: scale(target.model.layers[2].mlp.up_proj.weight, 2),
    "a pair that cancels": lambda target: [
        scale(target.model.layers[1].mlp.up_proj.weight, 2),
        scale(target.model.layers[1].mlp.down_proj.weight, 0.5),
    ],
    "doubled embeddings": lambda target: scale(target.get_input_embeddings().weight, 2),
    "negated embeddings": lambda target: scale(target.get_input_embeddings().weight, -1),
}


def scale(weight, factor: float) -> None:
    weight.data.mul_(factor)


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_made_with_other_values_is_refused_and_old_records_are_compared_as_they_were(change, tiny_qwen3):
    """All these targets have the shapes of the first one, and the signs, except for the last."""
    target = copy.deepcopy(tiny_qwen3)
    before = identify(target)
    old = replace(before, config_digest=before.config_digest[:16], weights_digest=before.weights_digest[:16])
    CHANGES[change](target)
    after = identify(target)
    with pytest.raises(ValueError, match=r"the target's (weights|config)_digest must be '\w+' \(.*, got '\w+'. Delete"):
        check_same(before, after, "states", "Delete it.")
    if "negated" not in change:
        check_same(old, after, "states", "Delete it.")
        assert old.has_weights_of(after)


def test_a_commit_is_recorded_if_only_one_can_be_meant(tiny_qwen3, tmp_path, monkeypatch):
    """Of several in the cache, the model may be from any, as with `revision`."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--house--tiny"
    target = named(tiny_qwen3, "house/tiny")
    for number, recorded in (("1" * 40, "1" * 40), ("2" * 40, None)):
        (folder / "snapshots" / number).mkdir(parents=True)
        (folder / "snapshots" / number / "config.json").write_text("{}")
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(number)
        assert identify(target).revision == recorded


def test_other_weights_have_another_digest(tiny_qwen3):
    first, second = identify(tiny_qwen3), identify(other_weights(tiny_qwen3))
    assert first.weights_digest != second.weights_digest
    assert first.config_digest == second.config_digest


@pytest.mark.parametrize("model_type", ["gemma3", "llava", "blip-2", "qwen3_5"])
def test_the_text_of_a_multimodal_target_is_the_same_target(model_type, tmp_path):
    """The whole model and the class of its text alone; the tower may be another, or of a dtype that tells nothing."""
    config = tiny_config(CONFIG_MAPPING[model_type], {})
    whole = AutoModelForImageTextToText.from_config(config).eval()
    text = AutoModelForCausalLM.from_config(config.get_text_config(decoder=True)).eval()
    text.load_state_dict(text_of(whole, text), strict=True)
    found = identify(text)
    assert identify(whole).weights_digest == found.weights_digest
    assert identify(whole).config_digest == found.config_digest
    whole.save_pretrained(tmp_path)
    saved = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype="bfloat16")
    check_same(found, identify(saved), "text.jsonl", "Delete it.")
    for name, weight in whole.named_parameters():
        if "vision" in name or "visual" in name:
            weight.data = torch.randn_like(weight)
    assert identify(whole).weights_digest == found.weights_digest
    whole.get_decoder().get_input_embeddings().weight.data.neg_()
    assert identify(whole).weights_digest != found.weights_digest


def test_the_record_is_saved_with_the_drafter(recorded, tmp_path):
    recorded.save_pretrained(tmp_path)
    loaded = TargetIdentity.recorded_in(DominoDraftModel.from_pretrained(tmp_path).config)
    assert (loaded.name, loaded.dtype) == ("house/tiny", "float32")
    assert loaded == TargetIdentity.recorded_in(recorded.config)
    assert TargetIdentity.recorded_in(DominoConfig()) is None


def test_names_of_folders_hold_no_path(tiny_qwen3, tmp_path):
    tiny_qwen3.save_pretrained(tmp_path / "somewhere" / "my-target")
    assert identify(AutoModelForCausalLM.from_pretrained(tmp_path / "somewhere" / "my-target")).name == "my-target"
    snapshot = identify(named(tiny_qwen3, "/cache/models--house--tiny/snapshots/abc123"))
    assert (snapshot.name, snapshot.revision) == ("house/tiny", "abc123")
    assert identify(named(tiny_qwen3, "house/tiny")).name == "house/tiny"
    assert identify(tiny_qwen3).name is None


def test_the_recorded_target_and_old_checkpoints_say_nothing(tiny_qwen3, make_drafter, recorded):
    target = named(tiny_qwen3, "elsewhere/Tiny")
    for drafter in (recorded, make_drafter(target)):
        assert said(target, drafter) == []
        assert drafter.stats.target is None
        assert "target" not in str(drafter.stats)


def test_a_copy_is_named_in_the_statistics(tiny_qwen3, recorded):
    target = named(tiny_qwen3, "/backup/copy").to(torch.bfloat16)
    assert said(target, recorded) == []
    assert recorded.stats.target == "dtype bfloat16 (recorded: float32), name copy (recorded: house/tiny)"
    assert recorded.stats.target in str(recorded.stats)


def test_an_adapter_is_seen_when_it_comes_and_goes(tiny_qwen3, recorded):
    target = named(tiny_qwen3, "house/tiny")
    assert said(target, recorded) == []
    assert recorded.stats.target is None
    adapted = get_peft_model(target, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)).eval()
    assert said(adapted, recorded) == []
    assert recorded.stats.target == "adapted"
    assert said(adapted.merge_and_unload(), recorded) == []
    assert "weights digest" in recorded.stats.target


def test_weights_that_cannot_be_read(tiny_qwen3, recorded, tmp_path):
    offloaded = named(tiny_qwen3, "house/tiny")
    cpu_offload(offloaded, torch.device("cpu"))
    assert said(offloaded, recorded) == []
    assert recorded.stats.target == "offloaded"
    quantization = pytest.importorskip("torchao.quantization")
    tiny_qwen3.save_pretrained(tmp_path)
    config = transformers.TorchAoConfig(quantization.Int8WeightOnlyConfig())
    quantised = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config).eval()
    assert said(quantised, recorded) == []
    assert "quantised" in recorded.stats.target
    assert identify(quantised).config_digest == identify(tiny_qwen3).config_digest


def test_another_target_is_warned_about_once(tiny_qwen3, recorded):
    other = named(other_weights(tiny_qwen3), "house/other")
    (warning,) = said(other, recorded)
    assert "trained for house/tiny, but this target has name house/other (recorded: house/tiny)" in warning
    assert "weights digest" in recorded.stats.target
    assert said(other, recorded) + said(other, recorded.view(draft_pool_size=4)) == []
    tuned = named(other_weights(tiny_qwen3), "house/tiny")
    assert said(tuned, recorded) == []
    assert "weights digest" in recorded.stats.target


def test_another_shape_is_warned_about_by_generate_and_by_check(tiny_qwen3, recorded, tiny_tokenizer):
    config = copy.deepcopy(tiny_qwen3.config)
    config.intermediate_size = 96
    wider = type(tiny_qwen3)(config).eval()
    with pytest.warns(UserWarning, match=r"config digest \w+ \(recorded: \w+\).*check_fit"):
        hf_domino.check_fit(recorded, wider, tiny_tokenizer, prompts=[[4, 5, 6], [7, 8], [9, 10]])
    assert said(wider, recorded) == []
    assert len(said(type(tiny_qwen3)(config).eval(), recorded)) == 1


def test_longer_positions_make_no_other_target(tiny_qwen3, recorded):
    """Only the statistics say so, also for a drafter that is given by its name."""
    target = named(tiny_qwen3, "house/tiny")
    target.config.rope_parameters.update(rope_type="linear", factor=2.0)
    longer = named(type(target)(target.config).eval(), "house/tiny")
    longer.load_state_dict(tiny_qwen3.state_dict())
    assert said(longer, recorded) == []
    assert "config digest" in recorded.stats.target
    check_recorded(recorded.config, longer)


def test_threads_warn_once_together(tiny_qwen3, recorded):
    other = named(other_weights(tiny_qwen3), "house/other")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threads = [threading.Thread(target=recognise, args=(recorded.config, other)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(caught) == 1


def test_later_calls_read_no_weights(tiny_qwen3, recorded, monkeypatch):
    target = named(tiny_qwen3, "house/tiny")
    recognise(recorded.config, target)
    monkeypatch.setattr("hf_domino.targets.identity.identify", lambda target: pytest.fail("weights were read again"))
    recognise(recorded.config, target)


def test_what_two_targets_made_is_not_mixed(tiny_qwen3):
    first, moved = identify(named(tiny_qwen3, "house/tiny")), identify(named(tiny_qwen3, "/backup/copy").bfloat16())
    check_same(first, moved, "text.jsonl", "Delete it.")
    check_same(None, moved, "text.jsonl", "Delete it.")
    other = identify(named(other_weights(tiny_qwen3), "house/tiny"))
    with pytest.raises(ValueError, match=r"weights_digest must be '\w+' \(that of house/tiny.*text.jsonl.*Delete it"):
        check_same(first, other, "text.jsonl", "Delete it.")
    adapted = [TargetIdentity(name, weights_digest="adapted") for name in ("house/tiny", "house/other")]
    with pytest.raises(ValueError, match=r"the target's name must be 'house/tiny' .*, got 'house/other'"):
        check_same(*adapted, "text.jsonl", "Delete it.")
