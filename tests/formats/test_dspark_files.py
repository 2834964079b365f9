"""Files of DSpark, DFlash 2, DFly and XPress in others' layouts draft as formulas say, by the written tensors."""

from __future__ import annotations

import json

import pytest
import torch
from builders import MASK
from markov import DFLY, RANK, SELECTOR, XPRESS, Markov, build
from oracle import proposed
from released import IDS, SPECULATORS_DFLASH, changed, reduced, write_checkpoint
from safetensors.torch import load_file
from test_export import FIELDS

from hf_domino import DominoConfig, DominoDraftModel
from hf_domino.formats.exporting import stored_config
from hf_domino.formats.fields import AROUND_LAYERS, HEADS
from hf_domino.formats.registry import format_of

pytestmark = pytest.mark.transformers

HIDDEN, PROMPT = 32, torch.arange(7, 19)[None]
GREEDY = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": -1}
# DeepSpec's flat layout: the target's configuration, and no field that tells the order of a block.
DEEPSPEC = {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "layer_types": ["full_attention"] * 2,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "block_size": 4,
    "mask_token_id": MASK,
    "num_target_layers": 4,
    "target_layer_ids": [0, 2],
    "num_anchors": 512,
    "confidence_head_with_markov": True,
    "enable_confidence_head": True,
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
}
SPECULATORS = reduced(SPECULATORS_DFLASH) | {
    "architectures": ["DSparkSpeculator"],
    "speculators_model_type": "dspark",
    "block_size": 4,
    "draft_vocab_size": len(IDS),
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
FLAT = {name: value for name, value in DEEPSPEC.items() if name not in ("markov_rank", "markov_head_type")}
SPECFORGE = changed(FLAT, dict.fromkeys(("enable_confidence_head", "confidence_head_with_markov", "target_layer_ids")))
SPECFORGE |= {
    "architectures": ["DSparkDraftModel"],
    "dflash_config": {
        "projector_type": "dspark",
        "markov_rank": RANK,
        "target_layer_ids": [0, 2],
        "mask_token_id": MASK,
    },
}
MODEL_OPTIMIZER = SPECFORGE | {
    "architectures": ["DFlashDraftModel"],
    "dflash_config": SPECFORGE["dflash_config"] | {"shift_label": True, "use_confidence_head": True},
}
LAYOUTS = {"deepspec": DEEPSPEC, "speculators": SPECULATORS, "specforge": SPECFORGE, "model_optimizer": MODEL_OPTIMIZER}
TOP = {"markov_head.": "", "confidence_head.proj": "confidence_proj"}  # Model-Optimizer's names
# z-lab's DFlash 2, and the flat one of speculators; sizes are at the defaults of nobody.
SIZES = {name: value for name, value in SELECTOR.items() if name != "projector_type"}
NESTED = {"block_size": 4, "mask_token_id": MASK, "target_layer_ids": [0, 2], "input_embedding_scale": 1.5}
NESTED |= SIZES | {"output_multiplier": 0.5, "final_logit_softcapping": 4.0}
WINDOWS = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 2048, "use_sliding_window": True}
ZLAB = SPECFORGE | WINDOWS | {"architectures": ["DFlash2DraftModel"], "is_causal": False, "dflash_config": NESTED}
FLAT_DFLASH2 = reduced(SPECULATORS_DFLASH) | SIZES | {"block_size": 4, "speculators_model_type": "dflash2"}
SELECTING = {"zlab": ZLAB, "speculators_dflash2": FLAT_DFLASH2}
# AngelSpec's, which counts in num_target_layers what is read, and has names of its own for what all have.
ANGELSPEC = changed(FLAT, dict.fromkeys(("rope_parameters", "num_anchors", "head_dim", "enable_confidence_head")))
ANGELSPEC |= {"architectures": ["Qwen3DFlyModel"], "rope_theta": 10000.0, "markov_rank": 0, "num_target_layers": 2}
ANGELSPEC |= {"target_num_hidden_layers": 4, "target_hidden_size": HIDDEN, "enable_hidden_correction": True}
ANGELSPEC |= {"hidden_correction_intermediate_size": DFLY["hidden_correction_intermediate_size"]}
ANGELSPECS = {"fc.": "context_proj.", "hidden_norm.": "context_norm.", "norm.": "final_norm."}
# Of XPress's authors, whose head has other names; and that of speculators.
XPRESS_AUTHORS = changed(FLAT, dict.fromkeys(("target_layer_ids", "mask_token_id", "enable_confidence_head")))
XPRESS_AUTHORS |= {"architectures": ["Qwen3XPressModel"], "xpress_rank": 8, "xpress_mlp_hidden": 24}
XPRESS_AUTHORS |= {"xpress_num_passes": 6, "xpress_block_size": 4}
XPRESS_AUTHORS |= {"dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": MASK}}
REFINERS = {f"mlp_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
REFINERS |= {"refiner_head": "xpress_head", "token_embed": "w1", "readout": "w2", "mix_l": "mix.L"}
SPECULATORS_XPRESS = SPECULATORS_DFLASH | {"architectures": ["XPressSpeculator"], "speculators_model_type": "xpress"}
SPECULATORS_XPRESS = reduced(SPECULATORS_XPRESS) | {"block_size": 4, "sample_from_anchor": False}
SPECULATORS_XPRESS |= {name: value for name, value in XPRESS.items() if name != "projector_type"}
CORRECTED = {"angelspec": ANGELSPEC, "xpress_authors": XPRESS_AUTHORS, "speculators_xpress": SPECULATORS_XPRESS}
WINDOWED = {"layer_types": WINDOWS["layer_types"], "sliding_window": 8, "sliding_window_non_causal": True}
ORDERED = [("vanilla", None), ("rnn", True), ("gated", False), ("rnn", False)]
CASES = [(layout, *case) for layout in LAYOUTS for case in ORDERED]
CASES += [(layout, "selector", order) for layout in SELECTING for order in (None, True, False)]
CASES += [("angelspec", "dfly", order) for order in (None, True)]
CASES += [(layout, "xpress", order) for layout in ("xpress_authors", "speculators_xpress") for order in (None, True)]


def written(target, layout, kind):
    """Tensors of a file under DeepSpec's names, random, and what is stored beside them."""
    width = len(IDS) if layout == "speculators" else 64
    told = {"zlab": WINDOWS | {"sliding_window_non_causal": True}}.get(layout, {})
    is_dspark = kind not in ("selector", "dfly", "xpress")
    told |= {"enable_confidence_head": layout != "specforge"} if is_dspark else {}
    told.pop("use_sliding_window", None)
    drafter = build(target, kind, target_layer_ids=[0, 2], **told)
    tensors = {name: tensor.float() for name, tensor in drafter.state_dict().items()}
    if is_dspark:
        tensors["markov_head.markov_w2.weight"] = torch.randn(width, RANK)
    beside = {}
    if layout in ("deepspec", "speculators", "angelspec"):
        beside = {"embed_tokens.weight": torch.zeros(64, HIDDEN), "lm_head.weight": torch.zeros(width, HIDDEN)}
    if layout == "speculators":
        tensors["d2t"] = torch.tensor(IDS) - torch.arange(width)
        beside["t2d"] = torch.zeros(64, dtype=torch.bool).index_fill(0, torch.tensor(IDS), True)
    return tensors, beside


@pytest.mark.parametrize(("layout", "kind", "order"), CASES)
def test_files_of_others_draft_as_their_formulas_say(tiny_qwen3, tmp_path, layout, kind, order):
    tensors, beside = written(tiny_qwen3, layout, kind)
    theirs = tensors
    if layout == "model_optimizer":
        theirs = dict(tensors)
        for ours, their in TOP.items():
            theirs = {name.replace(ours, their): tensor for name, tensor in theirs.items()}
    if layout == "angelspec":
        theirs = {}
        for name, tensor in tensors.items():
            ours = next((prefix for prefix in ANGELSPECS if name.startswith(prefix)), "")
            theirs[ANGELSPECS.get(ours, "") + name.removeprefix(ours)] = tensor
    if layout == "xpress_authors":
        theirs = dict(tensors)
        for ours, their in REFINERS.items():
            theirs = {name.replace(ours, their): tensor for name, tensor in theirs.items()}
    stored = (LAYOUTS | SELECTING | CORRECTED)[layout]
    place = "dflash_config." if "dflash_config" in stored else ""
    if kind == "selector":
        theirs = {name.replace("codebook.weight", "codebook"): tensor for name, tensor in tensors.items()}
    elif kind not in ("dfly", "xpress"):
        stored = changed(stored, {f"{place}markov_head_type": kind})
    if order is not None:
        stored = stored | {"sample_from_anchor": order}
        if place:
            stored = changed(stored, {"dflash_config.shift_label": order})
    write_checkpoint(tmp_path, stored, theirs | beside)
    if (order, kind) == (False, "rnn"):
        with pytest.raises(ValueError, match="shift_label with markov_head_type='rnn' must be True, got False"):
            DominoDraftModel.from_pretrained(tmp_path)
        return
    drafter = DominoDraftModel.from_pretrained(
        tmp_path, draft_pool_size=None, draft_tree_size=None, dtype=torch.float32
    )
    method = {"selector": "dflash2", "dfly": "dfly", "xpress": "xpress"}.get(kind, "dspark")
    config, is_next = drafter.config, method == "dspark" if order is None else order  # as all of them are trained
    told = {"dflash2": SIZES, "dfly": DFLY | {"layer_fusion": True}, "xpress": XPRESS}.get(
        method, {"markov_head_type": kind}
    )
    if layout == "zlab":
        told = NESTED
    assert told.items() <= config.to_dict().items()
    assert (config.projector_type, config.num_target_layers) == (method, None if "aux" in str(stored) else 4)
    assert (config.shift_label, config.num_draft_tokens) == (is_next, 4 if is_next else 3)
    assert drafter.state_dict().keys() == tensors.keys()
    with proposed() as rounds:
        text = tiny_qwen3.generate(PROMPT, assistant_model=drafter, **GREEDY)
    assert torch.equal(text, tiny_qwen3.generate(PROMPT, **GREEDY))
    reference = Markov(drafter, tiny_qwen3, tensors)
    assert len(rounds) > 8
    for _, ids, proposals in rounds[::5]:
        assert proposals == reference.chain(ids, None, len(proposals))


WRITTEN = [(DEEPSPEC, "specforge"), (changed(ZLAB, {"mask_token_id": None}), "specforge"), (SPECULATORS, "speculators")]
WRITTEN += [(FLAT_DFLASH2 | {"architectures": ["DFlash2DraftModel"]}, "speculators")]
SECTIONS = ("transformer_layer_config", "dflash_config")
# What is the trainer's; of windows we write where they end; and the verifier's name is ours.
UNWRITTEN = {"num_anchors", "speculators_config", "layer_types", "sliding_window", "use_sliding_window"}


@pytest.mark.parametrize(("released", "layout"), WRITTEN)
def test_configurations_are_written_as_they_were(released, layout):
    fields = format_of(released).read(released)
    if layout == "speculators":  # which counts windows in two ways
        fields |= {"layer_types": None, "sliding_window": None}
    written = stored_config(DominoConfig(**fields), layout)
    for section in SECTIONS:
        theirs = released.get(section, {})
        assert {name: written[section][name] for name in theirs.keys() - UNWRITTEN} == {
            name: theirs[name] for name in theirs.keys() - UNWRITTEN
        }
    kept = released.keys() - UNWRITTEN - set(SECTIONS)
    assert {name: written.get(name) for name in kept} == {name: released[name] for name in kept}


EXPORTED = [(name, "specforge", {"enable_confidence_head": True}) for name in ("vanilla", "rnn")]
EXPORTED += [("gated behind the anchor", layout, {}) for layout in ("specforge", "speculators")]
EXPORTED += [("vanilla", "specforge", WINDOWED), ("rnn", "speculators", {"enable_confidence_head": True})]
SCALED = {"output_multiplier": 0.5, "final_logit_softcapping": 4.0, "input_embedding_scale": 1.5}
EXPORTED += [("selector behind the anchor", "specforge", SCALED), ("selector behind the anchor", "speculators", {})]
EXPORTED += [("selector", "specforge", WINDOWED), ("selector", "specforge", {"conv_kernel_size": None})]
EXPORTED += [("vanilla", "specforge", {"conv_kernel_size": 3, "conv_group_size": 8} | SCALED)]


# What a drafter is, whoever stores it.
TOLD = (*FIELDS, *AROUND_LAYERS, "draft_vocab_size")


@pytest.mark.parametrize(("kind", "layout", "fields"), EXPORTED)
@pytest.mark.parametrize("token_ids", [None, IDS], ids=["", "drafted"])
def test_exported_and_loaded_they_draft_as_before(tiny_qwen3, tmp_path, kind, layout, fields, token_ids):
    fields = {"draft_tree_size": None, "target_layer_ids": [0, 2], "draft_length": "full"} | fields
    drafter = build(tiny_qwen3, kind, **fields).float()
    if token_ids is not None:
        drafter = drafter.restricted(token_ids)
    if token_ids is not None and "selector" in kind and layout == "speculators":
        with pytest.raises(
            ValueError, match=r"draft_vocab_size must be None .* \(whose DFlash 2 drafts all tokens\), got 7"
        ):
            drafter.export(tmp_path, layout)
        return
    drafter.export(tmp_path, layout, dtype=torch.float32)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert ("candidate_selector.successor_codebook" in names) == ("selector" in kind)
    again = DominoDraftModel.from_pretrained(tmp_path, draft_tree_size=None, draft_length="full", draft_pool_size=None)
    tensors = again.state_dict()
    assert tensors.keys() == drafter.state_dict().keys()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in drafter.state_dict().items())
    names = (*TOLD, *sum(HEADS[again.config.projector_type], ()))
    told, before = ([(name, getattr(one.config, name)) for name in names] for one in (again, drafter))
    assert told == before
    found = []
    for one in (drafter, again):
        with proposed() as rounds:
            tiny_qwen3.generate(PROMPT, assistant_model=one, **GREEDY)
        found.append([(ids, proposals) for _, ids, proposals in rounds])
    assert found[0] == found[1]
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored == stored_config(again.config, layout, torch.float32)
    if layout == "speculators":
        assert (
            stored["speculators_config"]["algorithm"] == stored["speculators_model_type"] == again.config.projector_type
        )


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("selector", "conv_kernel_size", None),
        ("vanilla", "conv_kernel_size", 2),
        ("selector", "output_multiplier", 0.5),
    ],
)
def test_what_the_layout_of_speculators_does_not_hold(tiny_qwen3, tmp_path, kind, field, value):
    drafter = build(tiny_qwen3, kind, **{field: value, "conv_group_size": 8})
    expected = "given for DFlash 2 alone" if field == "conv_kernel_size" else "None"
    with pytest.raises(ValueError, match=f"{field} must be {expected} .* got {value}. Use format="):
        drafter.export(tmp_path, "speculators")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("field", ["selector_rank", "selector_top_k", "conv_kernel_size"])
def test_what_a_selector_does_not_tell_is_named(tiny_qwen3, tmp_path, field):
    tensors, _ = written(tiny_qwen3, "zlab", "selector")
    write_checkpoint(tmp_path, changed(ZLAB, {f"dflash_config.{field}": None}), tensors)
    said = r"also layers.0.attention_conv" if field == "conv_kernel_size" else rf"{field} in .* must be given"
    with pytest.raises(ValueError, match=said):
        DominoDraftModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_a_confidence_head_that_does_not_read_the_token_before(tiny_qwen3, tmp_path, layout):
    tensors, beside = written(tiny_qwen3, layout, "vanilla")
    head = {"confidence_head.proj.weight": torch.randn(1, HIDDEN), "confidence_head.proj.bias": torch.randn(1)}
    stored = LAYOUTS[layout]
    place = "dflash_config." if "dflash_config" in stored else ""
    said = {f"{place}enable_confidence_head": True, f"{place}confidence_head_with_markov": False}
    write_checkpoint(tmp_path, changed(stored, said), tensors | beside | head)
    drafter = DominoDraftModel.from_pretrained(tmp_path, dtype=torch.float32)
    assert drafter.config.confidence_head_with_markov is False
    hidden, tokens = torch.randn(5, HIDDEN), torch.arange(5, 10)
    expected = (hidden @ head["confidence_head.proj.weight"][0] + head["confidence_head.proj.bias"]).sigmoid()
    torch.testing.assert_close(drafter.confidence(hidden, tokens), expected)
    drafter.save_pretrained(tmp_path / "ours")
    assert DominoDraftModel.from_pretrained(tmp_path / "ours").config.confidence_head_with_markov is False


def test_a_confidence_head_of_other_width_and_a_rank_of_0_are_named(tiny_qwen3, tmp_path):
    tensors, beside = written(tiny_qwen3, "deepspec", "vanilla")
    wrong = tensors | {"confidence_head.proj.weight": torch.zeros(1, HIDDEN + 1)}
    write_checkpoint(tmp_path / "width", DEEPSPEC, wrong | beside)
    with pytest.raises(ValueError, match=r"confidence_head.proj.weight must be of shape \(1, 40\)"):
        DominoDraftModel.from_pretrained(tmp_path / "width")
    write_checkpoint(tmp_path / "rank", SPECULATORS | {"markov_rank": 0}, tensors | beside)
    with pytest.raises(ValueError, match=r"method must be .* got 'DSpark in another layout"):
        DominoDraftModel.from_pretrained(tmp_path / "rank")
