"""Files whose rotary positions turn neighbours of a head together: the same drafter, its numbers in another order."""

from __future__ import annotations

import pytest
import torch
from builders import MASK
from markov import build
from oracle import proposed
from released import write_checkpoint
from test_dspark_files import DEEPSPEC, GREEDY, PROMPT, SPECFORGE, SPECULATORS, written

from hf_domino import DominoConfig, DominoDraftModel
from hf_domino.formats.loading import interpret
from hf_domino.targets.view import TargetModel

pytestmark = pytest.mark.transformers

# As LiquidAI's files are: what is of the drafter nested, the rotary base alone, 9 proposals of a block of 9.
LIQUID = {
    name: value for name, value in DEEPSPEC.items() if not name.startswith(("mask_", "target_", "num_t", "rope_"))
}
LIQUID |= {
    "architectures": ["Lfm2DSparkDraftModel"],
    "rope_theta": 10000.0,
    "block_size": 9,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2], "num_target_layers": 4},
}
NEOX, INTERLEAVED = {"rope_is_neox_style": False}, {"rope_interleaved": True}
ROPE = DEEPSPEC["rope_parameters"]
# Of each way to say it: the layout, and what its configuration says.
SAID = {
    "DeepSpec": ("deepspec", DEEPSPEC | NEOX),
    "is_neox_style": ("deepspec", DEEPSPEC | {"is_neox_style": False}),
    "rope_interleave": ("deepspec", DEEPSPEC | {"rope_interleave": True}),
    "in rope_parameters": ("deepspec", DEEPSPEC | {"rope_parameters": ROPE | INTERLEAVED}),
    "in dflash_config": ("specforge", SPECFORGE | {"dflash_config": SPECFORGE["dflash_config"] | NEOX}),
    "in transformer_layer_config": (
        "speculators",
        SPECULATORS | {"transformer_layer_config": SPECULATORS["transformer_layer_config"] | NEOX},
    ),
    "LiquidAI": ("deepspec", LIQUID | NEOX),
    "LiquidAI's class alone": ("deepspec", LIQUID),
}
WHOLE = {"draft_length": "full", "draft_tree_size": None, "draft_pool_size": None}


def interleaved(tensors, head_dim=8):
    """Tensors of a drafter whose heads' halves become neighbours."""
    found = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight")):
            halves = tensor.unflatten(0, (-1, 2, head_dim // 2))
            found[name] = halves.transpose(1, 2).flatten(0, 2).contiguous()
    return found


def drafted(target, drafter, **options):
    with proposed() as rounds:
        text = target.generate(PROMPT, assistant_model=drafter, **GREEDY, **options)
    assert torch.equal(text, target.generate(PROMPT, **GREEDY))
    return [(ids, proposals) for _, ids, proposals in rounds]


@pytest.mark.parametrize("name", SAID)
def test_interleaved_rotary_positions_draft_the_same_tokens(tiny_qwen3, tmp_path, name):
    layout, stored = SAID[name]
    tensors, beside = written(tiny_qwen3, layout, "vanilla")
    plain = SPECULATORS if layout == "speculators" else DEEPSPEC | {"block_size": stored["block_size"]}
    plain = plain | {"rope_theta": None} if "rope_theta" not in stored else plain
    if layout == "specforge":
        plain = SPECFORGE
    write_checkpoint(
        tmp_path / "plain", {key: value for key, value in plain.items() if value is not None}, tensors | beside
    )
    write_checkpoint(tmp_path / "interleaved", stored, interleaved(tensors) | beside)
    known, found = (
        DominoDraftModel.from_pretrained(tmp_path / place, dtype=torch.float32, **WHOLE)
        for place in ("plain", "interleaved")
    )
    assert (found.config.rope_interleaved, known.config.rope_interleaved) == (True, False)
    assert found.config.num_draft_tokens == stored["block_size"]
    rounds = drafted(tiny_qwen3, known)
    assert len(rounds) > 8
    assert drafted(tiny_qwen3, found) == rounds
    assert drafted(tiny_qwen3, found, cache_implementation="static") == rounds
    options = {"rope_interleaved": False, "dtype": torch.float32}
    wrong = DominoDraftModel.from_pretrained(tmp_path / "interleaved", **options, **WHOLE)
    assert drafted(tiny_qwen3, wrong) != rounds
    view, ids = TargetModel(tiny_qwen3, known.config.layer_ids(tiny_qwen3.config)), torch.arange(9, 24)[None]
    states = view.captured(tiny_qwen3(ids, **view.capture_kwargs()))
    anchors = torch.tensor([[5, 8]])
    blocks = [one.draft_blocks(view, ids, one.fuse_context(states), anchors) for one in (known, found)]
    torch.testing.assert_close(*blocks, rtol=1e-4, atol=1e-5)  # sums of products in another order
    found.save_pretrained(tmp_path / "ours")
    assert drafted(tiny_qwen3, DominoDraftModel.from_pretrained(tmp_path / "ours")) == rounds


@pytest.mark.parametrize("word", [NEOX, {"rope_interleave": True}, {"rotary_interleaved": True}])
@pytest.mark.parametrize("place", ["", "rope_parameters"])
def test_our_own_files_with_a_word_of_others_draft_as_they_say(word, place):
    stored = DominoConfig(projector_type="dflash").to_dict()
    del stored["rope_interleaved"]
    said = stored | ({place: stored[place] | word} if place else word)
    found, config = interpret(said)
    assert (config.rope_interleaved, interpret(stored)[1].rope_interleaved) == (True, False)
    assert found.unread(said) == []
    assert config.rope_parameters == stored["rope_parameters"]
    with pytest.raises(ValueError, match="must be a field of DominoConfig"):  # which knows no layouts
        DominoConfig(**{name: said[name] for name in said if said[name] != stored.get(name)})


@pytest.mark.parametrize("layout", ["specforge", "speculators"])
def test_exported_they_are_in_the_order_that_engines_read(tiny_qwen3, tmp_path, layout):
    fields = {"target_layer_ids": [0, 2], "draft_tree_size": None, "draft_length": "full"}
    ours = build(tiny_qwen3, **fields).float()
    found = build(tiny_qwen3, rope_interleaved=True, **fields).float()
    rounds = drafted(tiny_qwen3, found)
    found.export(tmp_path, layout, dtype="float32")
    again = DominoDraftModel.from_pretrained(tmp_path, **WHOLE)
    assert not again.config.rope_interleaved
    assert drafted(tiny_qwen3, again) == rounds
    assert drafted(tiny_qwen3, ours) != rounds


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (NEOX | {"rope_interleave": False}, "rope_is_neox_style .* must be True as rope_interleave=False says"),
        (
            NEOX | {"dflash_config": {"is_neox_style": True}},
            "is_neox_style .* must be False as rope_is_neox_style=False",
        ),
        ({"rope_interleaved": "true"}, "rope_interleaved .* must be true or false, got 'true'"),
    ],
)
def test_words_for_it_that_contradict_each_other_are_named(said, message):
    with pytest.raises(ValueError, match=message):
        interpret(DEEPSPEC | said)
