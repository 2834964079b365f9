"""What DSpark proposes is what its formulas say (arXiv 2607.05147), in chains and trees; and what is refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from builders import MASK, build_drafter
from calls_of_methods import NEW_TOKENS, PROMPTS, SAMPLED, calls, generate, noise_of
from formulas import PATHS_TOL, steps_of
from markov import HEADS, Markov, build
from oracle import faults

from hf_domino import DominoConfig, DominoDraftModel, check_fit, explain_round


@pytest.mark.parametrize(("batch_size", "do_sample"), [(1, False), (3, True)])
@pytest.mark.parametrize("name", HEADS)
def test_a_chain(wide, rounds, name, batch_size, do_sample):
    drafter, (ids, options) = build(wide, name, draft_tree_size=None), calls(batch_size)
    options |= SAMPLED if do_sample else {}
    noise = noise_of(batch_size, wide.config.vocab_size) if do_sample else None
    plain = generate(wide, None, ids, **options)
    with faults(plain.tolist(), wide.config.vocab_size):
        assert torch.equal(generate(wide, drafter, ids, **options), plain)
    reference = Markov(drafter, wide)
    for row, text, proposals, _ in rounds[:: 1 + batch_size]:
        expected = reference.chain(text, steps_of(noise, row, text), len(proposals))
        assert proposals == expected
    assert len(rounds) > 8


@pytest.mark.parametrize(
    ("name", "batch_size", "do_sample"),
    [(name, *call) for name, call in zip(HEADS, itertools.cycle(((1, False), (3, True))), strict=False)],
)
def test_a_tree_is_the_likeliest_paths(wide, rounds, name, batch_size, do_sample):
    drafter, (ids, options) = build(wide, name, draft_tree_size=7), calls(batch_size)
    options |= SAMPLED if do_sample else {}
    noise, num_whole = noise_of(batch_size, wide.config.vocab_size) if do_sample else None, 0
    assert torch.equal(generate(wide, drafter, ids, **options), generate(wide, None, ids, **options))
    reference = Markov(drafter, wide)
    for row, text, paths, alpha in rounds[:: 2 + batch_size]:
        if len(paths) < 7 or len(text) + 4 > len(PROMPTS[row]) + NEW_TOKENS:
            continue  # near its end a row has fewer nodes, as has one whose branches would not pay
        expected = reference.likeliest(text, alpha, steps_of(noise, row, text), 7)
        assert paths == {path: pytest.approx(chance, rel=PATHS_TOL) for path, chance in expected.items()}
        num_whole += 1
    assert num_whole > 2


def test_other_ways_to_draft_write_plain_text(wide):
    for name, fields in (("rnn", {}), ("gated", {"draft_length": "adaptive"})):
        for ids, more in (calls(1), calls(3)):
            drafter = build(wide, name, draft_pool_size=8, **fields)
            assert torch.equal(generate(wide, drafter, ids, **more), generate(wide, None, ids, **more))
    first = generate(wide, drafter, PROMPTS[0][None], return_dict_in_generate=True)
    ids = torch.cat((first.sequences, PROMPTS[1][None]), dim=1)
    assert torch.equal(generate(wide, drafter, ids, past_key_values=first.past_key_values), generate(wide, None, ids))


RANKS = {"dspark": "markov_rank", "dflash2": "selector_rank", "xpress": "xpress_rank", "dfly": None}


@pytest.mark.parametrize("kind", RANKS)
def test_a_fresh_one_drafts_as_dflash_does(tiny_qwen3, kind):
    config = DominoConfig.for_target(tiny_qwen3.config, projector_type=kind, mask_token_id=MASK)
    drafter = DominoDraftModel(config).eval()
    assert getattr(config, RANKS[kind] or "", 16) == 16
    assert config.layer_fusion == (kind == "dfly")
    plain = drafter.view(projector_type="dflash", conv_kernel_size=None)
    rounds = [explain_round(one, tiny_qwen3, PROMPTS[0][None]) for one in (drafter, plain)]
    assert torch.equal(rounds[0].proposals, rounds[1].proposals)
    assert torch.equal(rounds[0].base_probs, rounds[1].base_probs)
    kept = rounds[0].corrected_probs > 0
    assert set(kept.sum(dim=-1).tolist()) == {16 if kind == "dflash2" else 64}
    distribution = rounds[0].base_probs * kept
    torch.testing.assert_close(rounds[0].corrected_probs, distribution / distribution.sum(dim=-1, keepdim=True))
    assert rounds[0].confidences is None


@pytest.mark.parametrize("with_markov", [True, False])
@pytest.mark.parametrize("fields", [{}, {"draft_tree_size": 7}])
def test_a_confidence_is_the_formulas(wide, fields, with_markov):
    fields |= {"enable_confidence_head": True, "confidence_head_with_markov": with_markov}
    drafter = build(wide, "gated", **fields)
    opened, weights = explain_round(drafter, wide, PROMPTS[0][None]), drafter.state_dict()
    hidden, _ = Markov(drafter, wide).draft(PROMPTS[0])
    tokens, depths = [int(PROMPTS[0][-1]), *opened.proposals.tolist()], [0]
    assert len(opened.confidences) == len(opened.proposals)
    for parent, confidence in zip(opened.parents.tolist(), opened.confidences.tolist(), strict=True):
        read = hidden[depths[parent]]
        if with_markov:
            read = torch.cat((read, weights["markov_head.markov_w1.weight"][tokens[parent]]))
        logit = weights["confidence_head.proj.weight"][0] @ read + weights["confidence_head.proj.bias"][0]
        assert confidence == pytest.approx(float(logit.sigmoid()), rel=1e-4)
        depths.append(depths[parent] + 1)


@pytest.mark.parametrize("name", ["vanilla", "gated", "rnn"])
def test_a_draft_vocabulary_and_our_own_format(wide, rounds, tmp_path, name):
    drafter = build(wide, name, draft_tree_size=None, enable_confidence_head=True)
    small = drafter.restricted(range(3, 40))
    small.save_pretrained(tmp_path)
    loaded = DominoDraftModel.from_pretrained(tmp_path, dtype=torch.float64)
    assert loaded.config.markov_head_type == name
    assert all(torch.equal(tensor, loaded.state_dict()[key]) for key, tensor in small.state_dict().items())
    assert torch.equal(loaded.markov_head.markov_w2.weight, drafter.markov_head.markov_w2.weight[3:40])
    assert torch.equal(generate(wide, loaded, PROMPTS[0][None]), generate(wide, None, PROMPTS[0][None]))
    for _, text, proposals, _ in rounds[::4]:
        assert proposals == Markov(loaded, wide, small.state_dict()).chain(text, None, len(proposals))


@pytest.mark.parametrize("title", ["DFly", "XPress"])
def test_what_no_engine_runs_is_not_exported(wide, tmp_path, title):
    said = rf"method with export must be Domino.* got '{title}'. No released engine runs"
    with pytest.raises(ValueError, match=said):
        build(wide, title.lower()).export(tmp_path / "out")
    fused = build(wide, "vanilla", layer_fusion=True)
    with pytest.raises(
        ValueError, match=r"SGLang .* will not take this drafter: layer_fusion must be absent, got True"
    ):
        fused.export(tmp_path / "out", engine="sglang")


def test_what_it_cannot_do_is_refused_by_name(wide, tmp_path):
    drafter = build(wide)
    for fields, said in (
        ({"conv_kernel_size": 17}, r"conv_kernel_size must be in \[1, 16\]"),
        ({"conv_kernel_size": 2, "conv_group_size": 24}, "conv_group_size must be a divisor of 4096, got 24"),
        ({"markov_head_type": "other"}, "markov_head_type must be one of"),
        ({"markov_rank": 0}, "markov_rank must be in"),
        ({"pure_draft_prefix_len": 1}, "pure_draft_prefix_len of a DSpark drafter must be 0"),
    ):
        with pytest.raises(ValueError, match=said):
            DominoConfig(projector_type="dspark", **fields)
    drafter.save_pretrained(tmp_path)
    for kind in ("dflash", "domino"):
        with pytest.raises(ValueError, match="projector_type must be 'dspark' for this checkpoint"):
            DominoDraftModel.from_pretrained(tmp_path, projector_type=kind)


def test_it_is_trained_and_used(recipe, train, target, word_tokenizer, tmp_path, capsys):
    fields = recipe | {"projector_type": "dspark", "shift_label": True, "markov_rank": 8, "markov_head_type": "gated"}
    assert train(fields) == 0
    drafter, ids = DominoDraftModel.from_pretrained(tmp_path / "run"), PROMPTS[0][None]
    assert drafter.markov_head.markov_w2.weight.any()
    assert "is a [DSpark](https://arxiv.org/abs/2607.05147) drafter" in (tmp_path / "run" / "README.md").read_text()
    assert torch.equal(generate(target, drafter, ids), generate(target, None, ids))
    assert check_fit(drafter, target, word_tokenizer, ["t7 t8 t9"], max_new_tokens=24).modes
    shape = ("num_hidden_layers", "block_size", "shift_label", "projector_type", "markov_rank", "markov_head_type")
    again = {name: value for name, value in fields.items() if name not in shape}
    again |= {"drafter": str(tmp_path / "run"), "output_dir": str(tmp_path / "again")}
    assert train(again, "--train-only", "head") == 0
    after = DominoDraftModel.from_pretrained(tmp_path / "again").state_dict()
    changed_parts = {
        name.split(".")[0] for name, was in drafter.state_dict().items() if not torch.equal(was, after[name])
    }
    assert changed_parts == {"markov_head"}


@pytest.mark.parametrize("name", ["dfly behind the anchor", "xpress", "vanilla"])
def test_what_a_position_must_not_be_is_not_drafted(wide, rounds, name):
    drafter = build(wide, name, draft_tree_size=None)
    likely = generate(wide, drafter, PROMPTS[0][None], do_sample=False)[0, -NEW_TOKENS:].unique().tolist()
    options = {"min_new_tokens": NEW_TOKENS, "eos_token_id": likely}
    rounds.clear()
    assert torch.equal(
        generate(wide, drafter, PROMPTS[0][None], **options), generate(wide, None, PROMPTS[0][None], **options)
    )
    proposed = {token for _, text, proposals, _ in rounds for token in proposals if len(text) + 4 < 40}
    assert proposed
    assert proposed.isdisjoint(likely)


@pytest.mark.parametrize("kind", ["dfly", "xpress"])
def test_a_head_that_is_trained_alone_changes_nothing_at_first(recipe, train, target, tmp_path, capsys, kind):
    before = build_drafter(target, projector_type="dflash")
    before.save_pretrained(tmp_path / "dflash")
    shape = ("num_hidden_layers", "block_size", "shift_label")
    fields = {name: value for name, value in recipe.items() if name not in shape}
    fields |= {"drafter": str(tmp_path / "dflash"), "projector_type": kind}
    assert train(fields, "--train-only", "head") == 0
    drafter = DominoDraftModel.from_pretrained(tmp_path / "run")
    assert (drafter.config.projector_type, drafter.config.layer_fusion) == (kind, False)
    assert all(torch.equal(tensor, drafter.state_dict()[name]) for name, tensor in before.state_dict().items())
    assert drafter.head.up.weight.any()
    kept = {name: value for name, value in fields.items() if name != "projector_type"}
    kept |= {"drafter": str(tmp_path / "run"), "output_dir": str(tmp_path / "again")}
    assert train(kept, "--block-size", "3", "--max-steps", "1") == (2 if kind == "xpress" else 0)
    assert ("block_size of the drafter must be left out" in capsys.readouterr().err) == (kind == "xpress")


def test_a_dflash_drafter_is_given_a_head(recipe, train, target, tmp_path):
    build_drafter(target, projector_type="dflash").save_pretrained(tmp_path / "dflash")
    shape = ("num_hidden_layers", "block_size", "shift_label")
    fields = {name: value for name, value in recipe.items() if name not in shape} | {
        "drafter": str(tmp_path / "dflash")
    }
    assert train(fields, "--projector-type", "dspark", "--markov-rank", "8", "--train-only", "head") == 0
    drafter = DominoDraftModel.from_pretrained(tmp_path / "run")
    assert (drafter.config.projector_type, drafter.config.markov_rank) == ("dspark", 8)
    assert drafter.markov_head.markov_w2.weight.any()
