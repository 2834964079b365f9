"""Folders that cannot be loaded, each with one error that names the file or the field; and odd ones that can.

A folder is somebody else's work: what stands in it may be of any type and size.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from builders import build_drafter
from released import (
    IDS,
    RELEASED,
    WINDOWED,
    changed,
    our_drafter,
    reduced,
    stored_tensors,
    write_checkpoint,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModel, PreTrainedModel

from hf_domino import DominoConfig, DominoDraftModel
from hf_domino.formats import source
from hf_domino.formats.registry import OTHER_KINDS, format_of, refuse_others

pytestmark = pytest.mark.transformers

OURS, DOMINO, SPECULATORS, MUSE = "ours", "specforge_domino", "speculators_dflash", "muse_glimmer"
DRAFTED = "of few tokens"  # a drafter of SpecForge with a draft vocabulary, whose size its map alone tells
CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SHARD = "model-00001-of-00001.safetensors"
NAN, INFINITY, HUGE = float("nan"), float("inf"), 2**70
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
SLIDING = ["sliding_attention"] * 2
SCALES = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
LAYER_ROPE = "transformer_layer_config.rope_parameters"
# Contents of a file; None for none, a number for so many of its bytes. An error names the file.
FILES = {
    CONFIG: [None, b"", b'{"model_type": "dom', b"\xff\xfe\x00", b"[]", b"[" * 100_000, b"null", b'"domino"', b"{}"],
    SINGLE: [None, 0, 4, 100, 5000, b"\x08" + bytes(7) + b"not json", b"<html>" * 50],
    INDEX: [
        *(b"{", b"[]", b'{"metadata": {}}', b'{"weight_map": {}}', b'{"weight_map": ["fc.weight"]}'),
        *(b'{"weight_map": {"fc.weight": %s}}' % file for file in (b"1", b'"../model.safetensors"', b'"none"')),
    ],
}
# Of each layout: values of a field, None for none, that an error names by the last part of the field's name.
FIELDS = {
    OURS: {
        "model_type": [3],
        "hidden_size": ["32", 32.0, True, 0, 2**20, 2**40],
        **{name: [2**20] for name in ("intermediate_size", "gru_hidden_dim")},
        "num_hidden_layers": [[2], -1, 1, 3, 10**7],
        "head_dim": [7, 2**20],
        "hidden_act": ["nope"],
        "rms_norm_eps": ["tiny", NAN, 0, INFINITY],
        "initializer_range": ["0.02", NAN, 0, -0.02],
        "attention_dropout": ["0", NAN, 2, INFINITY],
        **{name: ["2", NAN, 0, INFINITY] for name in SCALES},
        "eos_token_id": ["2", 2.0, [2, "3"], -7],
        "num_target_layers": ["4", NAN, 0],
        "rope_theta": [5e6],
        "rope_parameters": [
            [1],
            {"rope_type": "yarn", "rope_theta": 1e4},
            {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            {"rope_type": "default", "rope_theta": -1},
        ],
        "dtype": ["float99", ["float32"], "float8_e4m3fn", "int8"],
        "vocab_size": [2**31 - 1, 2**40],
        "block_size": [1, 1025, 10**9, 0.5],
        "max_position_embeddings": [0, HUGE, 10**400],
        "draft_tree_size": [10**9, HUGE, 2.5],
        "mask_token_id": [64],
        "target_layer_ids": [None, "0,2", [0.5], [0, 0], [0, 4]],
        "projector_type": ["dspark", "dflash", "medusa"],
        "shift_label": ["true"],
        "pure_draft_prefix_len": [6],
        "layer_types": ["sliding_attention", SLIDING[:1], SLIDING],
        "sliding_window": ["8"],
        "quantization_config": [{"quant_method": "fp8"}, "int8", {}],
        **{name: [True] for name in ("draft_lenght", "attention_bias", "use_swa", "dflash_config")},
    },
    DOMINO: {
        **{name: [None] for name in ("hidden_size", "rope_theta", "dflash_config.target_layer_ids")},
        **{f"dflash_config.{name}": [None] for name in ("mask_token_id", "gru_hidden_dim")},
        "block_size": [None, "6"],
        "num_hidden_layers": [10**12],
        "num_attention_heads": [3],
        "emb_dim": [8],
        "rope_parameters": [{"rope_theta": 5e5}],
        "attention_bias": [True],
        "layer_types": [SLIDING, ["chunked_attention"] * 2],
        "model_type": ["no_such_type"],
        "architectures": [3, "DominoDraftModel", [["DominoDraftModel"]], {"a": 1}],
        "dflash_config": ["domino"],
        "dflash_config.projector_type": ["other", "dflash"],
        "dflash_config.shift_label": [1],
        "draft_vocab_size": [65],
        "quantization_config": [{"quant_method": "fp8"}],
        "dflash_config.quantization_config": [{"quant_method": "fp8"}],
        # Names, or places, of the block's order that contradict each other.
        "sample_from_anchor": [False],
        "dflash_config.query_zero_predicts_next": [False],
    },
    SPECULATORS: {
        "aux_hidden_state_layer_ids": [None, [0, 1], [True, 2]],
        "draft_vocab_size": [65, None, "8"],
        "hidden_size": [64],
        "target_hidden_size": [64],
        "transformer_layer_config": [None],
        "transformer_layer_config.quantization_config": [{"quant_method": "fp8"}],
        "speculators_model_type": ["other"],
        "projector_type": ["domino"],
    },
    MUSE: {"quantization_config": [{"quant_method": "fp8"}]},
}
ROPE = {
    "rope_theta": ["2", 0, 1, NAN, 10**400, None, True, [1]],
    "partial_rotary_factor": [0.5, NAN, "1"],
    **{name: ["2", NAN, 0, INFINITY, True, [2]] for name in ("factor", "attention_factor", "beta_fast", "beta_slow")},
    "original_max_position_embeddings": ["64", NAN, 0, -1, INFINITY, None],
    "mscale": ["1", NAN],
}
SMALLER = {"factor": "2", "original_max_position_embeddings": INFINITY, "attention_factor": NAN, "beta_fast": 0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
# Several fields at once, and what the error says.
TOGETHER = [
    *((OURS, {"rope_parameters": YARN | {name: value}}, name) for name, values in ROPE.items() for value in values),
    *((OURS, {"rope_parameters": part | {"factor": None}}, "factor") for part in (LINEAR, LLAMA3)),
    *((OURS, {"rope_parameters": LLAMA3 | {"low_freq_factor": value}}, "_freq_factor") for value in (None, "1", 0, 4)),
    (OURS, {"rope_parameters": {"full_attention": YARN, "sliding_attention": LINEAR}}, "full_attention"),
    *((DOMINO, {"rope_scaling": YARN | {name: SMALLER[name]}, "rope_theta": 1e4}, name) for name in SMALLER),
    *((SPECULATORS, {LAYER_ROPE: YARN | {name: SMALLER[name]}}, name) for name in SMALLER),
    *((OURS, {"layer_types": SLIDING, "sliding_window": value}, "sliding_window") for value in (HUGE, 5, -1)),
    (DOMINO, {"rope_theta": 1e6, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type"),
    (DOMINO, {"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
    (DOMINO, {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    (DOMINO, {"dflash_config.use_swa": True}, "sliding_window"),
    *(
        (DOMINO, {"dflash_config.causal_head": True, "sliding_window": 8, **beside}, "causal_head")
        for beside in (
            {"layer_types": SLIDING, "use_sliding_window": True},
            {"dflash_config.use_swa": True},
            {"dflash_config.causal": False},
        )
    ),
    (DOMINO, {"dflash_config.use_swa": True, "dflash_config.swa_window_size": "8"}, "sliding_window"),
    (DOMINO, {"sample_from_anchor": True, "dflash_config.sample_from_anchor": False}, "sample_from_anchor"),
    (SPECULATORS, {"shift_label": True, "sample_from_anchor": False}, "sample_from_anchor"),
]
ZEROS, FLAGS = torch.zeros(64), torch.zeros(64, dtype=torch.bool)
HEAD = ("prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0", "embed_proj.0.weight", "embed_proj.2.weight")
# Tensors that are put into the weights, None to take one out, and what the error says.
OF_ANY = [
    ({"fc.weight": None}, "without fc.weight"),
    (dict.fromkeys(HEAD), "projector_type"),
    ({"fc.bias": ZEROS}, "also fc.bias"),
    ({"layers.2.norm.weight": ZEROS}, "also layers.2.norm.weight"),
    ({"fc.weight": torch.zeros(32, 96)}, r"fc.weight must be of shape .* got \(32, 96"),
    ({"fc.weight": torch.zeros(32, 64, dtype=torch.int8)}, "fc.weight .* got 'I8'"),
    ({"logit_head.prefix_gru.weight_hh_l0": torch.zeros(48, 16)}, "got .*logit_head.prefix_gru.weight_hh_l0"),
    ({"norm.weight": torch.full((32,), NAN)}, "norm.weight must be finite"),
    ({"norm.weight": torch.full((32,), INFINITY, dtype=torch.float16)}, "norm.weight must be finite"),
    ({"embed_proj.2.weight": torch.full((64, 16), -INFINITY, dtype=torch.bfloat16)}, "embed_proj.2.* finite"),
]
OTHER_METHODS = {
    "layers.0.self_attn.k_proj_target.weight": "DFlare",
}
OF_DRAFTED = [
    ({"t2d": ~FLAGS}, "t2d"),
    ({"t2d": FLAGS}, "t2d"),
    ({"d2t": torch.ones(7, dtype=torch.bool)}, "d2t must be .* integer"),
    ({"d2t": torch.arange(7) + 0.5}, "d2t must be .* integer"),
    ({"d2t": torch.full((7,), 2**62)}, r"d2t must be of ids in \[0, 63\]"),
    ({"d2t": torch.arange(6, -1, -1)}, "d2t must be of ascending ids"),
    ({"d2t": torch.zeros(65, dtype=torch.int64)}, "draft_vocab_size"),
]
TENSORS = [
    *((name, *case) for name in (OURS, DOMINO) for case in OF_ANY),
    *((DOMINO, {name: ZEROS}, rf"method must be .* got '{kind} \({name}\)'") for name, kind in OTHER_METHODS.items()),
    *((DRAFTED, *case) for case in OF_DRAFTED),
    *((DOMINO, {"t2d": t2d}, "t2d must be a truth value for each of 64") for t2d in (~FLAGS[1:], FLAGS, ZEROS)),
]
# Drafters of kinds that are not ours, by what their configurations say.
KINDS = {
    "P-EAGLE": [
        {"speculators_model_type": "peagle"},
        {"architectures": ["LlamaEagle3DraftModel"], "num_hidden_layers": 36, "parallel_drafting": True},
    ],
    "EAGLE, not EAGLE-3": [{"architectures": ["LlamaForCausalLMEagle"]}, {"speculators_model_type": "eagle"}],
    "Medusa": [{"model_type": "medusa", "medusa_num_heads": 4}],
    "DSpark in another layout": [
        {"architectures": ["Qwen3DSparkModel"]},
        {"architectures": ["Qwen3DSparkModel"], "markov_rank": 0, "enable_confidence_head": True},
        {"dflash_config": {"projector_type": "dspark"}},
    ],
    "LiLiCorr": [{"architectures": ["LiLiCorrDraftModel"]}],
    # The classes of speculators and of a fork of SpecForge; the authors' own files have another, and load.
    "JetSpec in another layout": [
        {"speculators_model_type": "jetspec"},
        {"architectures": ["JetSpecDraftModel"], "head_type": "causal", "dflash_config": {}},
    ],
    "DFlash or DSpark on Gemma": [{"architectures": ["Gemma4DSparkModel"], "markov_rank": 0}],
    "MTP": [{"speculators_model_type": "mtp"}],
    "DSpark with gated attention": [{"architectures": ["Qwen35DSparkModel"], "markov_rank": 256}],
    "DFly in another layout": [{"speculators_model_type": "dfly"}, {"model_type": "dfly-mlx"}],
    "DFlare": [{"architectures": ["DFlareDraftModel"], "dflash_config": {}}],
    "XPress in another layout": [{"model_type": "xpress"}],
    "EAGLE-3 in another layout": [
        {"architectures": [name], "model_type": "llama", "draft_vocab_size": 8}
        for name in ("Gemma4Eagle3Model", "DeepSeekForCausalLMEagle3", "Qwen2ForCausalLMEagle3")
    ],
    "DFlash in another layout": [{"architectures": ["Qwen3_5DFlashModel"], "model_type": "qwen3_5_text"}],
}


@pytest.fixture(scope="module")
def whole(tiny_qwen3, tmp_path_factory):
    """Folders that load, by their layout."""
    root = tmp_path_factory.mktemp("whole")
    build_drafter(tiny_qwen3).save_pretrained(root / OURS)
    for name in (DOMINO, SPECULATORS, MUSE):
        stored = reduced(RELEASED[name])
        drafter = our_drafter(tiny_qwen3, stored)
        write_checkpoint(root / name, stored, stored_tensors(drafter, {}))
        if name == DOMINO:
            write_checkpoint(root / DRAFTED, stored, stored_tensors(drafter.restricted(IDS), {}))
    return root


@pytest.fixture
def broken(whole, tmp_path):
    """A copy of one of them, with fields of its configuration, and tensors, put in the place of its own."""

    def make(name, fields=None, tensors=None):
        folder = shutil.copytree(whole / name, tmp_path / name)
        stored = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(changed(stored, fields or {})))
        if tensors:
            kept = {key: tensor for key, tensor in (load_file(folder / SINGLE) | tensors).items() if tensor is not None}
            save_file(kept, folder / SINGLE, metadata={"format": "pt"})
        return folder

    return make


def assert_named(folder, said):
    with pytest.raises(ValueError, match=rf"(?s)(?=.*{said}).*(must be .*got|cannot be read)"):
        DominoDraftModel.from_pretrained(folder)


@pytest.mark.parametrize(("file", "content"), [(file, content) for file in FILES for content in FILES[file]])
@pytest.mark.parametrize("name", [OURS, DOMINO])
def test_a_file_that_cannot_be_read_is_named(broken, name, file, content):
    folder = broken(name)
    if file == INDEX:
        (folder / SINGLE).rename(folder / SHARD)
        shutil.copy(folder / SHARD, folder.parent / SINGLE)  # which an index must not lead to
    if content is None:
        (folder / file).rename(folder / "pytorch_model.bin")  # which is not loaded
    elif isinstance(content, int):
        (folder / file).write_bytes((folder / file).read_bytes()[:content])
    else:
        (folder / file).write_bytes(content)
    assert_named(folder, file)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [(name, field, value) for name in FIELDS for field in FIELDS[name] for value in FIELDS[name][field]],
)
def test_a_value_that_cannot_be_names_its_field(broken, name, field, value):
    assert_named(broken(name, {field: value}), field.rpartition(".")[2])


def test_a_file_that_we_wrote_is_ours_whatever_else_it_says(broken):
    assert_named(broken(OURS, {"of_another_version": 3}), "of_another_version must be a field of DominoConfig")


@pytest.mark.parametrize(("name", "fields", "said"), TOGETHER)
def test_values_that_cannot_be_together(broken, name, fields, said):
    assert_named(broken(name, fields), said)


@pytest.mark.parametrize(("name", "tensors", "said"), TENSORS)
def test_tensors_that_are_not_the_drafters(broken, name, tensors, said):
    assert_named(broken(name, tensors=tensors), said)


def test_renamed_tensors_are_no_other_method(broken):
    folder = broken(OURS)
    renamed = {f"module.{name}": tensor for name, tensor in load_file(folder / SINGLE).items()}
    save_file(renamed, folder / SINGLE, metadata={"format": "pt"})
    assert_named(folder, r"tensors must be complete \(projector_type='domino'.* without embed_proj")


def test_weights_that_are_replaced_while_they_are_loaded(tiny_qwen3, tmp_path, monkeypatch):
    """Headers are read first: what is missing behind them would be random."""
    build_drafter(tiny_qwen3).save_pretrained(tmp_path)
    load = PreTrainedModel.from_pretrained.__func__

    def replaced(cls, *args, **options):
        tensors = load_file(tmp_path / SINGLE)
        save_file({name: tensor for name, tensor in tensors.items() if name not in HEAD}, tmp_path / SINGLE)
        return load(cls, *args, **options)

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(replaced))
    message = r"tensors must be complete, got 'a file without embed_proj.*The checkpoint was changed while it was read"
    with pytest.raises(ValueError, match=message):
        DominoDraftModel.from_pretrained(tmp_path)


def test_what_can_be_is_taken(broken, tiny_qwen3):
    """Extremes that are meant, null where others write it, and what is not the drafter's."""
    rope = YARN | {"rope_theta": 1e11, "factor": 64, "mscale": 0, "mscale_all_dim": 0.707, "attention_factor": 0.1}
    DominoConfig(block_size=64, draft_tree_size=1024, rope_parameters=rope, rms_norm_eps=1e-12)
    DominoConfig(layer_types=["sliding_attention"] * 5, sliding_window=10**7, max_position_embeddings=10**7)
    largest = torch.full((32,), torch.finfo(torch.float16).max, dtype=torch.float16)
    fields = {"rope_scaling": YARN | {"attention_factor": None}, "rope_theta": 1e4, "num_labels": 10**12}
    folder = broken(DOMINO, fields, {"norm.weight": largest, "embed_tokens.weight": torch.full((64, 32), NAN)})
    drafter = DominoDraftModel.from_pretrained(folder)
    assert drafter.config.rope_parameters["factor"] == 2.0
    assert DominoDraftModel.from_pretrained(broken(OURS, {"num_labels": 10**12})).has_correction_head
    assert drafter.norm.weight.max() > 6e4
    tiny_qwen3.generate(torch.arange(5, 12)[None], assistant_model=drafter, max_new_tokens=4)


@pytest.mark.parametrize("name", [OURS, DOMINO])
def test_no_code_of_a_folder_is_run(broken, tmp_path, name):
    classes = {"AutoConfig": "theirs.Config", "AutoModel": "theirs.Model", "AutoModelForCausalLM": "theirs.Model"}
    folder = broken(name, {"auto_map": classes})
    for code in ("theirs.py", "custom_generate/generate.py"):
        (folder / code).parent.mkdir(exist_ok=True)
        (folder / code).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    for options in ({}, {"trust_remote_code": True}):
        assert DominoDraftModel.from_pretrained(folder, **options).has_correction_head
    if name == OURS:
        assert AutoModel.from_pretrained(folder).has_correction_head
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_drafters_of_another_kind_are_named(tmp_path, kind):
    for stored in KINDS[kind]:
        write_checkpoint(tmp_path, stored, {})
        with pytest.raises(ValueError, match=rf"method must be .*, got '{kind} \(.*hf_domino cannot run"):
            DominoDraftModel.from_pretrained(tmp_path)


def test_every_other_kind_is_tried_and_no_release_is_one():
    assert OTHER_KINDS.keys() == KINDS.keys()
    for stored in (*RELEASED.values(), *WINDOWED.values()):
        refuse_others(stored)
    assert format_of({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}) is None


def test_places_without_a_drafter(whole, saved_pair, tmp_path, monkeypatch):
    def head(url, token, timeout):
        raise ConnectionError("no network")

    monkeypatch.setattr(source, "get_hf_file_metadata", head)
    for place, options, said in (
        (whole / OURS / SINGLE, {}, "must be a folder or a Hub name"),
        (whole / OURS, {"subfolder": "elsewhere"}, "config.json must be in .*ours/elsewhere"),
        (whole / "our", {}, r"no such folder.*Did you mean '.*ours'\?"),
        ("somebody/ours", {}, r"the Hub does not answer \(no network\)"),
        (saved_pair[0], {}, "model_type must be 'domino', got 'qwen3': this is no drafter"),
    ):
        with pytest.raises(ValueError, match=said):
            DominoDraftModel.from_pretrained(place, **options)
