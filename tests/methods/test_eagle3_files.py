"""Folders in the layouts of EAGLE-3's releases, small and random: what they hold drafts as the formulas say."""

from __future__ import annotations

import json

import pytest
import torch
from builders import EOS, TINY
from calls_of_methods import PROMPTS, generate
from formulas import OPTIONS, PATHS_TOL, Formula, build
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from hf_domino import DominoDraftModel
from hf_domino.formats.adapters import unread_fields
from hf_domino.formats.loading import interpret
from hf_domino.targets.view import TargetModel

IDS = [0, 3, 4, 9, 11, 40, 62]
LLAMA = {name: TINY[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")} | {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "eos_token_id": EOS,
    "torch_dtype": "float64",
}
DEFAULT_IDS = [1, 3, 4]  # of a target of eight layers
# Of each layout: what its configuration adds, options of the drafter, layers, tensors that are left out.
LAYOUTS = {
    "speculators": (
        {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": LLAMA,
            "draft_vocab_size": len(IDS),
            "eagle_aux_hidden_state_layer_ids": [1, 3],
            "fc_norm": True,
            "tie_word_embeddings": False,
        },
        *(OPTIONS["whole"], [0, 2], ()),
    ),
    "speculators, normed": (
        {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": LLAMA,
            "draft_vocab_size": len(IDS),
            "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        }
        | OPTIONS["normed"],
        *(OPTIONS["normed"] | {"own_lm_head": True}, DEFAULT_IDS, ()),
    ),
    "speculators, of Qwen3": (
        {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": LLAMA | {"model_type": "qwen3"},
            "draft_vocab_size": len(IDS),
            "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        },
        *({"qk_norm": True, "own_lm_head": True}, DEFAULT_IDS, ()),
    ),
    "AngelSlim": (
        LLAMA
        | {"architectures": ["Eagle3LlamaForCausalLM"], "draft_vocab_size": len(IDS), "tie_word_embeddings": True},
        *({"own_lm_head": True, "own_embeddings": True}, DEFAULT_IDS, ()),
    ),
    "SpecForge": (
        LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(IDS)},
        *({"own_lm_head": True}, DEFAULT_IDS, ()),
    ),
    "SGLang, the target's lm_head": (
        LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": None},
        *({}, DEFAULT_IDS, ("d2t", "t2d")),
    ),
    "Automodel": (  # the target's own configuration, but for these
        LLAMA
        | {
            "architectures": ["LlamaEagle3DraftModel"],
            "draft_vocab_size": len(IDS),
            "num_hidden_layers": 8,
            "target_hidden_size": 32,
            "tie_word_embeddings": False,
            "parallel_drafting": False,
        },
        *({"own_lm_head": True, "own_embeddings": True}, DEFAULT_IDS, ()),
    ),
    "DeepSpec": (  # the target's own too; layers are counted from 0, and queries and keys normed
        LLAMA
        | {
            "architectures": ["Qwen3Eagle3Model"],
            "model_type": "qwen3_5_text",
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
            "target_layer_ids": [0, 2, 3, 5, 6],
            "num_target_layers": 8,
            "ttt_length": 7,
            "step_loss_decay": 0.8,
            "tie_word_embeddings": False,
        },
        *({"own_lm_head": True, "own_embeddings": True, "qk_norm": True}, [0, 2, 3, 5, 6], ("d2t", "t2d")),
    ),
    "authors": (
        LLAMA | {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": len(IDS)},
        *({"own_lm_head": True, "own_embeddings": True}, DEFAULT_IDS, ()),
    ),
    "Model-Optimizer": (
        LLAMA
        | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": len(IDS),
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": [1, 5],
                "use_aux_hidden_state": True,
                "norm_before_fc": True,
                "use_input_layernorm_in_first_layer": True,
                "use_last_layernorm": True,
                "use_mtp_layernorm": False,
            },
        },
        *({"own_lm_head": True, "norm_before_fc": True}, [1, 5], ("t2d",)),
    ),
}


@pytest.fixture(scope="module")
def deep():
    """An fp64 target of eight layers."""
    torch.manual_seed(0)
    target = LlamaForCausalLM(LlamaConfig(**TINY | {"num_hidden_layers": 8})).eval().double()
    target.generation_config.eos_token_id = None
    return target


def stored(folder, name, target):
    """A folder of a layout, and the drafter that is in it."""
    config, options, layers, left_out = LAYOUTS[name]
    ours = build(target, "plain", block_size=7, target_layer_ids=layers, draft_tree_size=None, **options)
    if "d2t" not in left_out:
        ours = ours.restricted(IDS)
    t2d = torch.zeros(64, dtype=torch.bool).index_fill(0, torch.tensor(IDS), True)
    tensors = ours.state_dict() | {"t2d": t2d}
    prefix = "layers.0." if "speculators" in name else "midlayer."
    tensors = {key.replace("layers.0.", prefix): value.clone() for key, value in tensors.items() if key not in left_out}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return ours


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_loads_and_drafts_by_the_formulas(deep, tmp_path, name, rounds):
    ours = stored(tmp_path, name, deep)
    loaded, info = DominoDraftModel.from_pretrained(tmp_path, output_loading_info=True)
    assert (info["unexpected_keys"], loaded.dtype) == (set(), torch.float64)
    assert loaded.config.projector_type == "eagle3"
    assert unread_fields(tmp_path) == []
    assert loaded.config.layer_ids(deep.config) == LAYOUTS[name][2]
    assert all(torch.equal(tensor, loaded.state_dict()[key]) for key, tensor in ours.state_dict().items())
    view, reference = TargetModel(deep, loaded.config.layer_ids(deep.config)), Formula(ours, deep)
    ids = torch.arange(9, 24)[None]
    states = loaded.fuse_context(view.captured(deep(ids, **view.capture_kwargs())))
    hidden = loaded.draft_blocks(view, ids, states, torch.tensor([[7]]))[0, 0]
    logits = loaded.vocabulary.scatter(loaded.logits(view, hidden))
    entries, state = reference.begin(ids[0, :8].tolist())
    for depth in range(3):
        torch.testing.assert_close(logits[depth].double(), reference.logits(state), rtol=PATHS_TOL, atol=PATHS_TOL)
        entries, state = reference.go_on(entries, state, int(ids[0, 8 + depth]))
    chains = loaded.view(draft_tree_size=None, draft_length="full", draft_pool_size=None)
    assert torch.equal(generate(deep, chains, PROMPTS[0][None]), generate(deep, None, PROMPTS[0][None]))
    _, text, proposals, _ = rounds[3]
    assert proposals == reference.chain(text, None, len(proposals))
    loaded.save_pretrained(tmp_path / "ours")
    again = DominoDraftModel.from_pretrained(tmp_path / "ours")
    assert all(torch.equal(tensor, again.state_dict()[key]) for key, tensor in ours.state_dict().items())
    assert again.config.layer_ids(deep.config) == LAYOUTS[name][2]


@pytest.mark.parametrize("name", ["speculators", "Model-Optimizer"])
def test_interleaved_rotary_positions_draft_the_same_tokens(deep, tmp_path, name, rounds):
    """Neighbours of a head in the place of its halves: the numbers are moved, and the drafts are those of before."""
    stored(tmp_path, name, deep)
    known, before = DominoDraftModel.from_pretrained(tmp_path), []
    tensors = load_file(tmp_path / "model.safetensors")
    for key, tensor in tensors.items():
        if "q_proj" in key or "k_proj" in key:
            tensors[key] = tensor.unflatten(0, (-1, 2, 4)).transpose(1, 2).flatten(0, 2).contiguous()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    place = "transformer_layer_config" if name == "speculators" else "eagle_config"
    config = LAYOUTS[name][0]
    config = config | {place: config[place] | {"rope_interleaved": True}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for drafter in (known, DominoDraftModel.from_pretrained(tmp_path)):
        rounds.clear()
        generate(deep, drafter.view(draft_tree_size=None, draft_length="full"), PROMPTS[0][None])
        before.append([(text, proposals) for _, text, proposals, _ in rounds])
    assert before[0] == before[1]
    assert len(before[0]) > 3


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("SpecForge", {"parallel_drafting": True}, r"method must be .* got 'P-EAGLE \(parallel_drafting=True\)'"),
        ("SpecForge", {"target_hidden_size": 64}, "target_hidden_size .* must be 32, got 64.*cannot run"),
        ("SpecForge", {"sliding_window": 128}, "sliding_window .* must be absent, or at least 256 .* got 128"),
        ("Model-Optimizer", {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state .* must be True"),
        ("Model-Optimizer", {"eagle_config": {"parallel_draft_step": 4}}, "parallel_draft_step .* must be 1, got 4"),
        ("speculators", {"eagle_aux_hidden_state_layer_ids": [0, 1]}, "must be a list of integers from 1 on"),
        ("speculators", {"transformer_layer_config": None}, "transformer_layer_config .* must be given"),
        ("SpecForge", {"hidden_size": None}, "hidden_size in the checkpoint's config.json must be given"),
    ],
)
def test_what_cannot_be_run_is_named(name, change, message):
    with pytest.raises(ValueError, match=message):
        interpret(LAYOUTS[name][0] | change)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ("layers.0.self_attn.q_norm.weight", "without layers.0.self_attn.k_norm.weight"),
        ("fc.bias", "also fc.bias"),
        ("layers.1.input_layernorm.weight", "num_hidden_layers=1.*also layers.1.input_layernorm.weight"),
        ("d2t", "tensors must be complete .* without d2t"),
    ],
)
def test_tensors_that_do_not_fit_are_named(deep, tmp_path, tensor, message):
    ours = stored(tmp_path, "speculators", deep)
    tensors = {key: value.clone() for key, value in ours.state_dict().items() if key != tensor}
    tensors |= {} if tensor == "d2t" else {tensor: torch.ones(8, dtype=torch.float64)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        DominoDraftModel.from_pretrained(tmp_path)


def test_embeddings_that_are_tied_to_an_lm_head_that_is_not_there_are_named(deep, tmp_path):
    stored(tmp_path, "AngelSlim", deep)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"tie_word_embeddings .* must be False without an lm_head of its own, got True"
    ):
        DominoDraftModel.from_pretrained(tmp_path)


def test_a_window_that_nothing_reaches_is_none():
    for fields in ({"sliding_window": 256}, {"sliding_window": 8, "use_sliding_window": False}):
        assert interpret(LAYOUTS["SpecForge"][0] | fields)[1].projector_type == "eagle3"
    copied = {"layer_types": ["sliding_attention", "full_attention"] * 4, "sliding_window": 8}
    assert interpret(LAYOUTS["Automodel"][0] | copied)[1].projector_type == "eagle3"  # the target's
    assert (
        interpret(LAYOUTS["SpecForge"][0] | {"model_type": "qwen3", "sliding_window": 8})[1].projector_type == "eagle3"
    )


def test_a_target_too_small_for_the_layers_that_are_left_to_it(wide, deep, tmp_path):
    stored(tmp_path, "SpecForge", deep)
    with pytest.raises(ValueError, match=r"target_layer_ids must be .*3 .*got None"):
        generate(wide, DominoDraftModel.from_pretrained(tmp_path), PROMPTS[0][None])
