"""Files whose fields have the right names and impossible values: one error that names the field, and nothing is made.

A folder is somebody else's work: what stands in it may be of any type and size.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from builders import TINY, VOCAB_SIZE, build_drafter
from released import RELEASED, our_drafter, reduced, stored_tensors, write_checkpoint
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from hf_domino import DominoConfig, DominoDraftModel
from hf_domino.formats.source import check_is_target

NAN, HUGE = float("nan"), 2**70
THEIRS = ("specforge_domino", "speculators_dflash", "muse_glimmer")
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
WINDOWS = {"layer_types": ["sliding_attention"] * 2}
IDS = [0, 3, 4, 9, 11, 40, 62]
# Field by field: values that it cannot have, and what the error says of each.
FIELDS = {
    "block_size": [(10**6, r"in \[2, 1024\]"), (10**9, r"in \[2, 1024\]"), (1025, "got 1025"), (0.5, "must be int")],
    "draft_tree_size": [(10**9, r"in \[1, 1024\]"), (HUGE, r"in \[1, 1024\]"), (2.5, "int or str or None")],
    "max_position_embeddings": [(HUGE, "2147483647"), (10**400, "2147483647"), (0, "got 0")],
    "ngram_size": [(10**9, r"in \[3, 1024\]")],
    "window_size": [(10**9, r"in \[1, 1024\]")],
    "num_candidates": [(10**9, r"in \[1, 1024\]")],
    "rms_norm_eps": [(NAN, "got nan"), (0.0, "got 0.0"), (1e300, "1000000000000000"), ("tiny", "must be float")],
    "attention_dropout": [(NAN, r"in \[0, 1\]"), (2, r"in \[0, 1\]"), (-1, r"in \[0, 1\]")],
    "initializer_range": [(NAN, "got nan"), (-1.0, "got -1.0")],
    "quantization_config": [({"quant_method": "fp8"}, "absent, got .*quantised"), ("int8", "absent"), ({}, "absent")],
}
ROPE = {
    "rope_theta": ["2", 0, 1, -1, NAN, 10**400, None, True, [1]],
    "factor": ["2", 0, -1, NAN, 1e-300, float("inf"), None, True, {}],
    "attention_factor": ["1", 0, NAN, 1e300],
    "beta_fast": ["1", 0, NAN],
    "beta_slow": ["1", 0, NAN],
    "original_max_position_embeddings": ["64", 0, NAN],
    "mscale": ["1", -1, NAN],
    "mscale_all_dim": [NAN],
    "partial_rotary_factor": [0.5, NAN, "1"],
}
LLAMA3_ROPE = {
    "factor": ["8", 0, NAN],
    "low_freq_factor": ["1", 0, NAN],
    "high_freq_factor": ["4", 0, NAN],
    "original_max_position_embeddings": ["64", 0, NAN],
}
CASES = [
    *(({field: value}, f"{field} .*{word}") for field, cases in FIELDS.items() for value, word in cases),
    *(({"rope_parameters": YARN | {field: value}}, field) for field, values in ROPE.items() for value in values),
    *(({"rope_parameters": LLAMA3 | {field: value}}, field) for field, vs in LLAMA3_ROPE.items() for value in vs),
    *((WINDOWS | {"sliding_window": value}, "sliding_window .*in .6, 2147483647.") for value in (HUGE, 5, -1)),
]


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**TINY)).eval()


@pytest.fixture(scope="module")
def whole(target, tmp_path_factory):
    """Folders that load: ours, and some of others."""
    root = tmp_path_factory.mktemp("whole")
    build_drafter(target).save_pretrained(root / "ours")
    for name in THEIRS:
        stored = reduced(RELEASED[name])
        write_checkpoint(root / name, stored, stored_tensors(our_drafter(target, stored), {}))
    return root


def changed(folder, **fields):
    """The folder, with fields of its config.json set."""
    stored = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stored | fields))
    return folder


def with_tensors(folder, tensors):
    """The folder, with tensors put into its weights."""
    stored = load_file(folder / "model.safetensors") | tensors
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(("fields", "message"), CASES, ids=[str(case[0])[:70] for case in CASES])
def test_a_value_that_cannot_be_names_its_field(whole, tmp_path, fields, message):
    folder = changed(shutil.copytree(whole / "ours", tmp_path / "it"), **fields)
    with pytest.raises(ValueError, match=message):
        DominoDraftModel.from_pretrained(folder)


@pytest.mark.parametrize("value", [3, "DominoDraftModel", [["DominoDraftModel"]], [None], {"a": 1}, True])
def test_architectures_that_are_no_list_of_texts(whole, tmp_path, value):
    folder = changed(shutil.copytree(whole / "specforge_domino", tmp_path / "it"), architectures=value)
    with pytest.raises(ValueError, match=r"architectures in the checkpoint's config.json must be a list of texts, got"):
        DominoDraftModel.from_pretrained(folder)
    with pytest.raises(ValueError, match=r"architectures in the checkpoint's config.json must be a list of texts"):
        check_is_target(folder, "target")


@pytest.mark.parametrize("name", THEIRS)
def test_quantised_files_of_others_are_refused_wherever_it_stands(whole, tmp_path, name):
    nested = {"quantization_config": {"quant_method": "fp8"}}
    section = {"specforge_domino": "dflash_config", "speculators_dflash": "transformer_layer_config"}.get(name)
    stored = json.loads((whole / name / "config.json").read_text())
    for fields in (nested, {section: stored[section] | nested} if section else nested):
        folder = changed(shutil.copytree(whole / name, tmp_path / "it", dirs_exist_ok=True), **fields)
        with pytest.raises(ValueError, match=r"quantization_config must be absent, got .*The weights are quantised"):
            DominoDraftModel.from_pretrained(folder)


def test_null_in_rotary_parameters_of_others_is_left_out(whole, tmp_path, target):
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "attention_factor": None}
    folder = changed(shutil.copytree(whole / "specforge_domino", tmp_path / "it"), rope_scaling=rope)
    drafter = DominoDraftModel.from_pretrained(folder)
    assert drafter.config.rope_parameters["factor"] == 2.0
    prompt = torch.arange(5, 12)[None]
    target.generate(prompt, assistant_model=drafter, max_new_tokens=4)


@pytest.mark.parametrize("name", ["ours", "specforge_domino"])
def test_a_number_of_labels_is_not_counted(whole, tmp_path, name):
    folder = changed(shutil.copytree(whole / name, tmp_path / "it"), num_labels=10**12)
    assert DominoDraftModel.from_pretrained(folder).has_correction_head


def test_ordinary_extremes_are_taken():
    """Bounds are for what nobody means: the largest of what is known of is well inside."""
    rope = YARN | {"rope_theta": 1e11, "factor": 64, "mscale": 0, "mscale_all_dim": 0.707, "attention_factor": 0.1}
    config = DominoConfig(block_size=64, draft_tree_size=1024, rope_parameters=rope, rms_norm_eps=1e-12)
    assert config.rope_parameters["mscale"] == 0
    DominoConfig(layer_types=["sliding_attention"] * 5, sliding_window=10**7, max_position_embeddings=10**7)


@pytest.mark.parametrize(
    ("d2t", "t2d", "message"),
    [
        (None, [0, 3, 4, 9, 11, 40, 63], "t2d must be true for the tokens of d2t alone"),
        (None, [], "t2d must be true for the tokens of d2t alone"),
        (torch.ones(7, dtype=torch.bool), None, "d2t must be at least one integer, got '7 of torch.bool'"),
        (torch.arange(7) + 0.5, None, "d2t must be at least one integer, got '7 of torch.float32'"),
        (torch.full((7,), 2**62), None, r"d2t must be of ids in \[0, 63\]"),
        (torch.tensor([0, 5, 4, 3, 2, 1, 0]), None, "d2t must be of ascending ids"),
    ],
)
@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize("name", ["specforge_domino", "speculators_dflash"])
def test_a_draft_vocabulary_that_contradicts_itself(target, tmp_path, name, is_told, d2t, t2d, message):
    stored = reduced(RELEASED[name])
    ours = our_drafter(target, stored).restricted(IDS)
    stored |= {"draft_vocab_size": len(IDS)} if is_told or name == "speculators_dflash" else {}
    tensors = stored_tensors(ours, {})
    flags = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    tensors["t2d"] = flags.index_fill(0, torch.tensor(IDS if t2d is None else t2d, dtype=torch.int64), True)
    write_checkpoint(tmp_path, stored, tensors | ({} if d2t is None else {"d2t": d2t}))
    with pytest.raises(ValueError, match=f"the checkpoint's {message}"):
        DominoDraftModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("value", [NAN, float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["norm.weight", "layers.1.mlp.up_proj.weight", "embed_proj.2.weight"])
def test_weights_that_are_no_numbers(whole, tmp_path, name, dtype, value):
    folder = shutil.copytree(whole / "ours", tmp_path / "it")
    tensor = load_file(folder / "model.safetensors")[name].to(dtype)
    tensor.view(-1)[3] = value
    with_tensors(folder, {name: tensor})
    with pytest.raises(ValueError, match=f"the checkpoint's {name} must be finite, got 'NaN or infinity'"):
        DominoDraftModel.from_pretrained(folder)


def test_the_largest_numbers_are_numbers_and_the_targets_tensors_are_not_read(whole, tmp_path):
    folder = shutil.copytree(whole / "ours", tmp_path / "it")
    tensor = torch.full((32,), torch.finfo(torch.float16).max, dtype=torch.float16)
    with_tensors(folder, {"norm.weight": tensor, "embed_tokens.weight": torch.full((64, 32), NAN)})
    assert DominoDraftModel.from_pretrained(folder).norm.weight.max() > 6e4
