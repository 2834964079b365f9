"""Released checkpoints load: their fields at full size, their logits at reduced size."""

from __future__ import annotations

import shutil

import pytest
import torch
from released import (
    DOMINO_4B,
    DOMINO_8B,
    LAYER_IDS,
    MEANT,
    PREFIXES,
    RELEASED,
    WINDOWED,
    our_drafter,
    reduced,
    stored_tensors,
)
from released import write_checkpoint as write
from safetensors.torch import load_file, save_file
from transformers import pipeline

from hf_domino import DominoConfig, DominoDraftModel
from hf_domino.formats import loading
from hf_domino.formats.registry import format_of
from hf_domino.integration.assisted_call import pipeline_drafter
from hf_domino.pair import load_pair
from hf_domino.targets.view import TargetModel

pytestmark = pytest.mark.transformers

# Facts of METHOD: 8B and 4B of Domino, of which the head 55,934,976 and 50,823,168.
PARAMETERS = {"8b": (DOMINO_8B, 1_104_561_408), "4b": (DOMINO_4B, 588_250_368)}
FIRST, SECOND = "a" * 40, "b" * 40  # commits
FP32_TOL = {"atol": 1e-5, "rtol": 1e-5}  # a few roundings of sums over a hundred products


def config_of(stored) -> DominoConfig:
    return DominoConfig(**format_of(stored).read(stored))


@torch.no_grad()
def draft_logits(drafter, target) -> torch.Tensor:
    """Corrected logits `[1, K, V]` of a block after a fixed context, through the target's own layers."""
    torch.manual_seed(7)
    ids = torch.randint(4, 64, (1, 12))
    view = TargetModel(target, drafter.config.layer_ids(target.config))
    context = drafter.fuse_context(view.captured(target(ids, **view.capture_kwargs())))
    block = torch.full((1, drafter.config.block_size), drafter.config.mask_token_id)
    block[:, 0] = ids[:, -1]
    positions = torch.arange(12 + drafter.config.block_size)[None]
    hidden = drafter(view.embed(block), positions[:, 12:], context, positions[:, :12])
    logits = drafter.vocabulary.logits(view, hidden)
    if drafter.has_correction_head:
        states = drafter.prefix_gru(view.embed(ids[:, : drafter.config.block_size]))
        logits = logits + drafter.embed_proj(torch.cat((hidden, states), dim=-1))
    return logits


@pytest.mark.parametrize("name", RELEASED)
def test_fields_at_full_size(name):
    config = config_of(RELEASED[name])
    is_muse, is_domino = name == "muse_glimmer", name in ("specforge_domino", "model_optimizer", "speculators_domino")
    assert config.target_layer_ids == ([1, 13, 25, 37, 49] if is_muse else LAYER_IDS)
    assert (config.block_size, config.mask_token_id) == (16, 201818 if is_muse else 151669)
    assert (config.vocab_size, config.hidden_size) == ((202048, 6656) if is_muse else (151936, 4096))
    assert config.rope_parameters["rope_theta"] == (500000.0 if is_muse else 1000000)
    assert config.num_target_layers == (36 if "dflash_config" in RELEASED[name] else None)
    assert (config.projector_type, config.shift_label) == (("domino", True) if is_domino else ("dflash", False))
    assert config.pure_draft_prefix_len == int(is_domino)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (32, 8, 128)


@pytest.mark.parametrize("size", PARAMETERS)
def test_parameters_at_full_size(size):
    stored, count = PARAMETERS[size]
    with torch.device("meta"):
        drafter = DominoDraftModel(config_of(stored))
    assert sum(parameter.numel() for parameter in drafter.parameters()) == count


@pytest.mark.parametrize(
    ("name", "prefixes", "max_shard_size"),
    [
        *((name, name, "5GB") for name in RELEASED | WINDOWED),
        *(("specforge_domino", nested, "5GB") for nested in ("nested_head", "nested_model")),
        ("specforge_domino", "", "40KB"),
    ],
)
def test_logits(tiny_qwen3, tmp_path, name, prefixes, max_shard_size):
    stored, windows = reduced((RELEASED | WINDOWED)[name]), {}
    if name in WINDOWED:
        kinds = ["sliding_attention", "full_attention" if name == "specforge_windows" else "sliding_attention"]
        window = {"muse_glimmer_windows": 9, "jetspec": stored.get("max_position_embeddings")}.get(name, 8)
        windows = {"layer_types": kinds, "sliding_window": window}
        windows["sliding_window_non_causal"] = MEANT[name][1]
    ours = our_drafter(tiny_qwen3, stored, **windows)
    tensors = stored_tensors(ours, PREFIXES.get(prefixes.removesuffix("_windows"), {}))
    if "speculators" in name:  # they store parts of the target, too
        vocab = {name: torch.zeros(64, 32) for name in ("embed_tokens.weight", "lm_head.weight")}
        tensors |= vocab | {"verifier_norm.weight": torch.ones(32), "d2t": torch.arange(64), "t2d": torch.ones(64) > 0}
    folder = write(tmp_path, stored, tensors, max_shard_size)
    loaded, info = DominoDraftModel.from_pretrained(folder, output_loading_info=True)
    assert info["unexpected_keys"] == set()  # nothing of the target is reported
    expected = draft_logits(ours, tiny_qwen3)
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in ours.state_dict().items())
    # Mapped weights may lie at other addresses, and sums over them round in another order.
    torch.testing.assert_close(draft_logits(loaded, tiny_qwen3), expected, **FP32_TOL)
    fields = ("block_size", "shift_label", "pure_draft_prefix_len", "mask_token_id", "projector_type", "eos_token_id")
    fields = fields if "dflash_config" in stored else fields[:-1]
    assert [getattr(loaded.config, field) for field in fields] == [getattr(ours.config, field) for field in fields]
    others = [{"target_layer_ids": [1, 2], "num_target_layers": 4}]
    if windows:
        others += [{"sliding_window_non_causal": not MEANT[name][1]}, {"layer_types": None, "sliding_window": None}]
    for other in others:
        assert (draft_logits(loaded.view(**other), tiny_qwen3) - expected).abs().max() > 1e-3


def test_windows_at_full_size():
    for name, (window, non_causal) in MEANT.items():
        config, stored = config_of(WINDOWED[name]), WINDOWED[name]
        assert (config.sliding_window, config.sliding_window_non_causal) == (window, non_causal)
        is_mixed = name == "specforge_windows"
        assert config.layer_types == (stored["layer_types"] if is_mixed else ["sliding_attention"] * 5)
    defaults = config_of({"model_type": "muse_glimmer_assistant"})  # of Transformers' class: windows throughout
    assert (defaults.sliding_window, set(defaults.layer_types)) == (2049, {"sliding_attention"})


@pytest.mark.parametrize("layer_type", ["full_attention", "sliding_attention"])
def test_logits_of_transformers_own_class(tmp_path, layer_type):
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
    from transformers.cache_utils import DFlashCache

    stored = reduced(RELEASED["muse_glimmer"]) | {"layer_types": ["full_attention", layer_type], "sliding_window": 8}
    del stored["vocab_size"]
    native = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**stored)).eval()
    for name, parameter in native.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    native.save_pretrained(tmp_path)
    drafter = DominoDraftModel.from_pretrained(tmp_path, dtype=torch.float32)
    noise, features, positions = torch.randn(1, 6, 32), torch.randn(1, 12, 64), torch.arange(18)[None]
    cache = DFlashCache(config=native.config)
    with torch.no_grad():
        cache.set_previous_accepted_tokens(12)
        expected = native(noise, features, position_ids=positions, past_key_values=cache).last_hidden_state
        context = drafter.fuse_context(features.split(32, dim=-1))
        found = drafter(noise, positions[:, 12:], context, positions[:, :12])
    torch.testing.assert_close(found, expected)


@pytest.fixture
def checkpoint(tiny_qwen3, tmp_path):
    """A reduced SpecForge checkpoint for the tiny target."""
    stored = reduced(DOMINO_8B)
    return write(tmp_path / "released", stored, stored_tensors(our_drafter(tiny_qwen3, stored), {}))


def test_arguments_of_from_pretrained_pass_through(checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "deep" / "inside")
    options = {"subfolder": "inside", "dtype": torch.bfloat16, "draft_length": "full", "output_loading_info": True}
    drafter, info = DominoDraftModel.from_pretrained(tmp_path / "deep", **options)
    assert (drafter.dtype, drafter.config.draft_length) == (torch.bfloat16, "full")
    assert info["unexpected_keys"] == set()


@pytest.fixture
def cache(checkpoint, tmp_path):
    """A cache of downloads: somebody/drafter at two commits, of which the first is on its main branch."""
    repository = tmp_path / "cache" / "models--somebody--drafter"
    for commit in (FIRST, SECOND):
        shutil.copytree(checkpoint, repository / "snapshots" / commit)
    newer = repository / "snapshots" / SECOND / "model.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(newer).items()}, newer, metadata={"format": "pt"})
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(FIRST)
    return tmp_path / "cache"


def test_from_the_cache_without_network(cache):
    options = {"cache_dir": cache, "local_files_only": True}
    drafter = DominoDraftModel.from_pretrained("somebody/drafter", **options)
    assert drafter.view(draft_length="full").config._commit_hash == FIRST
    assert (
        DominoDraftModel.from_pretrained("somebody/drafter", revision=SECOND, **options).config._commit_hash == SECOND
    )
    with pytest.raises(ValueError, match=r"got 'somebody/drafters': .* not downloaded before, and local_files_only"):
        DominoDraftModel.from_pretrained("somebody/drafters", **options)


def test_what_is_pushed_while_it_loads_is_not_mixed_in(checkpoint, cache, monkeypatch):
    read = loading.read_config

    def read_and_push(*args):
        (cache / "models--somebody--drafter" / "refs" / "main").write_text(SECOND)
        return read(*args)

    monkeypatch.setattr(loading, "read_config", read_and_push)
    drafter = DominoDraftModel.from_pretrained("somebody/drafter", cache_dir=cache, local_files_only=True)
    assert torch.equal(drafter.fc.weight, load_file(checkpoint / "model.safetensors")["fc.weight"])
    assert drafter.config._commit_hash == FIRST


def test_by_name_in_a_pipeline_and_on_the_command_line(checkpoint, saved_pair):
    generator = pipeline("text-generation", model=str(saved_pair[0]), assistant_model=str(checkpoint))
    assert isinstance(generator.assistant_model, DominoDraftModel)
    assert load_pair(saved_pair[0], checkpoint).drafter.has_correction_head


def test_a_pipeline_leaves_to_transformers_what_it_runs_itself(tiny_qwen3, tmp_path):
    stored = reduced(RELEASED["muse_glimmer"])
    folder = write(tmp_path, stored, stored_tensors(our_drafter(tiny_qwen3, stored), PREFIXES["muse_glimmer"]))
    assert pipeline_drafter(tiny_qwen3, folder) is None


def test_a_self_test_where_the_checkpoint_does_not_count_the_targets_layers(tiny_qwen3, tmp_path):
    from hf_domino import check_fit

    stored = reduced(RELEASED["speculators_dflash"])
    folder = write(tmp_path, stored, stored_tensors(our_drafter(tiny_qwen3, stored), {}))
    result = check_fit(DominoDraftModel.from_pretrained(folder), tiny_qwen3, prompts=[[4, 5, 6]], max_new_tokens=16)
    assert result.variants
