"""Folders that are broken, each with one error that names the file or the field."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from builders import build_drafter
from released import RELEASED, our_drafter, reduced, stored_tensors, write_checkpoint
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from hf_domino import DominoDraftModel

OURS, THEIRS = "ours", "specforge"
SINGLE, INDEX, SHARD = "model.safetensors", "model.safetensors.index.json", "model-00001-of-00001.safetensors"


def config(**fields):
    """Sets fields of config.json; None takes them out."""

    def change(folder):
        stored = json.loads((folder / "config.json").read_text()) | fields
        (folder / "config.json").write_text(json.dumps({k: v for k, v in stored.items() if v is not None}))

    return change


def file(name, content):
    """Writes a file; None removes it."""
    return lambda folder: (folder / name).unlink() if content is None else (folder / name).write_bytes(content)


def cut(length):
    return lambda folder: (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:length])


def index(content):
    """Names the weights in an index, as shards are."""

    def change(folder):
        (folder / SINGLE).rename(folder / SHARD)
        (folder / INDEX).write_text(content if isinstance(content, str) else json.dumps(content))

    return change


def tensors(change_tensors):
    def change(folder):
        stored = load_file(folder / SINGLE)
        change_tensors(stored)
        save_file(stored, folder / SINGLE, metadata={"format": "pt"})

    return change


def pickled(folder):
    torch.save(load_file(folder / SINGLE), folder / "pytorch_model.bin")
    (folder / SINGLE).unlink()


def head_twice(stored):
    stored |= {f"logit_head.{name}": tensor + 1 for name, tensor in stored.items() if "prefix_gru" in name}


def folder_instead(folder):
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()


FILES = [
    ("no config.json", file("config.json", None), r"config.json must be in .*got None"),
    ("a folder for config.json", folder_instead, r"config.json must be in .*got None"),
    ("an empty config.json", file("config.json", b""), r"config.json must be a JSON file, got 'Expecting value"),
    ("half a config.json", file("config.json", b'{"model_type": "dom'), r"config.json must be a JSON file, got"),
    ("a config.json of bytes", file("config.json", b"\xff\xfe\x00"), r"config.json must be a JSON file, got .*utf-8"),
    ("a list", file("config.json", b"[]"), r"config.json must be a JSON object, got \[\]"),
    ("a deep list", file("config.json", b"[" * 100_000), r"config.json must be a JSON file, got .*recursion"),
    ("null", file("config.json", b"null"), r"config.json must be a JSON object, got None"),
    ("a number", file("config.json", b"3"), r"config.json must be a JSON object, got 3"),
    ("a text", file("config.json", b'"domino"'), r"config.json must be a JSON object, got 'domino'"),
    ("an empty object", file("config.json", b"{}"), r"model_type .* must be given, got None"),
    ("no weights", file(SINGLE, None), r"model.safetensors must be among the weights"),
    ("pickled weights", pickled, r"Pickled weights \(pytorch_model.bin\) are not loaded"),
    ("no bytes", cut(0), r"model.safetensors of the checkpoint must be a whole safetensors file"),
    ("half a length", cut(4), r"model.safetensors .* must be a whole safetensors file, got .*header too small"),
    ("half a header", cut(100), r"model.safetensors .* must be a whole safetensors file"),
    ("half the tensors", cut(5000), r"model.safetensors .* must be a whole safetensors file, got .*not fully covered"),
    (
        "garbage",
        file(SINGLE, b"\x08" + bytes(7) + b"not json"),
        r"whole safetensors file, got .*invalid JSON",
    ),
    ("a web page", file(SINGLE, b"<html>" * 50), r"model.safetensors .* must be a whole safetensors file"),
    ("half an index", index("{"), r"index.json must be a JSON file"),
    ("a list of shards", index([SHARD]), r"index.json must be a JSON object"),
    ("an index without files", index({"metadata": {}}), r"weight_map of .*index.json must be an object .* got None"),
    ("an index of no tensors", index({"weight_map": {}}), r"weight_map of .* got \{\}"),
    ("a list of tensors", index({"weight_map": ["fc.weight"]}), r"weight_map of .* got \['fc.weight'\]"),
    ("a number for a file", index({"weight_map": {"fc.weight": 1}}), r"weight_map of .*index.json .* got 1"),
    ("a file elsewhere", index({"weight_map": {"fc.weight": "../x.safetensors"}}), r"weight_map of .* got '../x"),
    (
        "no such shard",
        index({"weight_map": {"fc.weight": "a.safetensors"}}),
        r"a.safetensors of .* must be in",
    ),
]
FIELDS = [
    ({"model_type": 3}, r"model_type of the backbone must be one that transformers knows, got 3"),
    ({"hidden_size": "32"}, r"hidden_size .* must be int, got '32'"),
    ({"hidden_size": 32.0}, r"hidden_size .* must be int, got 32.0"),
    ({"hidden_size": True}, r"hidden_size .* must be int, got True"),
    ({"hidden_size": 0}, r"hidden_size must be in \[1, 1048576\], got 0"),
    ({"num_hidden_layers": [2]}, r"num_hidden_layers .* must be int, got \[2\]"),
    ({"num_hidden_layers": -1}, r"num_hidden_layers must be in \[1, 1000\], got -1"),
    ({"head_dim": 7}, r"head_dim must be even"),
    ({"hidden_act": "nope"}, r"hidden_act .* must be one that transformers knows, got 'nope'"),
    ({"rms_norm_eps": "tiny"}, r"rms_norm_eps .* must be float, got 'tiny'"),
    ({"rope_parameters": [1]}, r"rope_parameters .* must be dict or None, got \[1\]"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, r"cannot be read: .*rope_parameters.*'factor'"),
    ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, r"must be one of .*'dynamic'"),
    (
        {"rope_parameters": {"rope_type": "default", "rope_theta": "10000"}},
        r"rope_theta'\] must be a number, got '10000'",
    ),
    (
        {"rope_parameters": {"rope_type": "default", "rope_theta": -1}},
        r"rope_theta'\] must be in \[2, .*, got -1",
    ),
    ({"rms_norm_eps": float("nan")}, r"rms_norm_eps must be in \[1e-15, .*, got nan"),
    ({"dtype": "float99"}, r"dtype .* must be one of bfloat16, .*, got 'float99'"),
    ({"dtype": ["float32"]}, r"dtype .* must be one of bfloat16, .*, got \['float32'\]"),
    ({"dtype": "float8_e4m3fn"}, r"dtype .* must be one of bfloat16, float16, float32, float64, got 'float8_e4m3fn'"),
    ({"dtype": "int8"}, r"dtype .* must be one of bfloat16, .*, got 'int8'"),
    ({"vocab_size": 2**40}, r"vocab_size must be in \[1, 2147483647\], got"),
    ({"vocab_size": 2**31 - 1}, r"embed_proj.2.weight must be of shape \(2147483647, 16\) .* got \(64, 16\). Load it"),
    ({"hidden_size": 2**40}, r"hidden_size must be in \[1, 1048576\], got"),
    ({"hidden_size": 2**20}, r"embed_proj.0.weight must be of shape .*hidden_size=1048576"),
    ({"intermediate_size": 2**20}, r"down_proj.weight must be of shape .*intermediate_size=1048576"),
    ({"num_attention_heads": 2**20, "head_dim": 2**20}, r"k_norm.weight must be of shape .*head_dim=1048576"),
    ({"gru_hidden_dim": 2**20}, r"embed_proj.0.weight must be of shape .*gru_hidden_dim=1048576"),
    ({"num_hidden_layers": 10**7}, r"num_hidden_layers must be in \[1, 1000\], got 10000000"),
    ({"num_hidden_layers": 3}, r"complete \(.*num_hidden_layers=3.*a file without layers.2.* \(11 tensors\)"),
    ({"num_hidden_layers": 1}, r"those of a drafter \(.*num_hidden_layers=1.*also layers.1.* \(11 tensors\)"),
    ({"block_size": 1}, r"block_size must be in \[2, 1024\], got 1"),
    ({"mask_token_id": 64}, r"mask_token_id must be in \[0, 63\]"),
    ({"target_layer_ids": "0,2"}, r"target_layer_ids .* must be list\[int\] or None, got '0,2'"),
    ({"target_layer_ids": [0.5]}, r"target_layer_ids .* must be list\[int\] or None, got \[0.5\]"),
    ({"target_layer_ids": [0, 0]}, r"target_layer_ids must be unique"),
    ({"projector_type": "dspark"}, r"projector_type must be one of .* got 'dspark'"),
    ({"projector_type": "dflash"}, r"projector_type must be 'domino' for this checkpoint"),
    ({"shift_label": "true"}, r"shift_label .* must be bool, got 'true'"),
    ({"pure_draft_prefix_len": 6}, r"pure_draft_prefix_len must be in \[0, 5\]"),
    ({"layer_types": "sliding_attention"}, r"layer_types .* must be list\[str\] or None"),
    ({"layer_types": ["sliding_attention"]}, r"layer_types must be one of .*num_hidden_layers=2"),
    ({"layer_types": ["sliding_attention"] * 2}, r"sliding_window must be a whole number \(block_size=6; .* got None"),
    ({"sliding_window": "8"}, r"sliding_window .* must be int or None, got '8'"),
]
TENSORS = [
    (OURS, lambda stored: stored.pop("fc.weight"), r"tensors must be complete .* without fc.weight'. Save the"),
    (OURS, lambda stored: stored.clear(), r"projector_type must be 'dflash' for this checkpoint"),
    (OURS, lambda stored: stored.update({"fc.bias": torch.zeros(32)}), r"tensors must be .*also fc.bias"),
    (
        OURS,
        lambda stored: stored.update({"fc.weight": torch.zeros(32, 96)}),
        r"fc.weight must be of shape .* got \(32, 96",
    ),
    (OURS, lambda stored: stored.update({"fc.weight": stored["fc.weight"].to(torch.int8)}), r"fc.weight .* got 'I8'"),
    (OURS, head_twice, r"tensors must be .*also logit_head.prefix_gru.weight_hh_l0"),
    (THEIRS, lambda stored: stored.pop("prefix_gru.weight_hh_l0"), r"without prefix_gru.weight_hh_l0'. Save the"),
    (THEIRS, lambda stored: stored.update({"layers.2.norm.weight": torch.zeros(32)}), r"also layers.2.norm.weight"),
    (THEIRS, head_twice, r"tensors must be there once each, got 'logit_head.prefix_gru.* and prefix_gru"),
]
CASES = [
    *((f"{which}: {name}", which, change, message) for which in (OURS, THEIRS) for name, change, message in FILES),
    *((f"{OURS}: {fields}", OURS, config(**fields), message) for fields, message in FIELDS),
    (f"{THEIRS}: a list of dtypes", THEIRS, config(dtype=["float32"]), r"config.json \(DFlash .* cannot be read"),
    (f"{THEIRS}: layers", THEIRS, config(num_hidden_layers=10**12), r"num_hidden_layers .* at most 1000, got 1000000"),
    *((f"{which}: {message}", which, tensors(change), message) for which, change, message in TENSORS),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Folders that load, by their format."""
    from builders import TINY
    from transformers import Qwen3Config, Qwen3ForCausalLM

    root, target = tmp_path_factory.mktemp("whole"), Qwen3ForCausalLM(Qwen3Config(**TINY))
    build_drafter(target).save_pretrained(root / OURS)
    stored = reduced(RELEASED["specforge_domino"])
    write_checkpoint(root / THEIRS, stored, stored_tensors(our_drafter(target, stored), {}))
    for name in (OURS, THEIRS):
        assert DominoDraftModel.from_pretrained(root / name).has_correction_head
    return root


@pytest.mark.parametrize(("which", "change", "message"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_one_error_that_names_it(whole, tmp_path, which, change, message):
    folder = shutil.copytree(whole / which, tmp_path / "drafter")
    change(folder)
    with pytest.raises(ValueError, match=message):
        DominoDraftModel.from_pretrained(folder)


@pytest.mark.parametrize("which", [OURS, THEIRS])
def test_no_code_of_a_folder_is_run(whole, tmp_path, which):
    folder = shutil.copytree(whole / which, tmp_path / "drafter")
    classes = {"AutoConfig": "theirs.Config", "AutoModel": "theirs.Model", "AutoModelForCausalLM": "theirs.Model"}
    config(auto_map=classes)(folder)
    for name in ("theirs.py", "custom_generate/generate.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert DominoDraftModel.from_pretrained(folder).has_correction_head
    assert DominoDraftModel.from_pretrained(folder, trust_remote_code=True).has_correction_head
    if which == OURS:
        assert AutoModel.from_pretrained(folder).has_correction_head
    assert not (tmp_path / "ran").exists()


def test_places_without_a_drafter(whole):
    with pytest.raises(ValueError, match=r"must be a folder or a Hub name, got '.*model.safetensors'"):
        DominoDraftModel.from_pretrained(whole / OURS / SINGLE)
    with pytest.raises(ValueError, match=r"config.json must be in .*ours/elsewhere"):
        DominoDraftModel.from_pretrained(whole / OURS, subfolder="elsewhere")
