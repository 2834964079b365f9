"""A round that is opened is the round that `generate` runs."""

from __future__ import annotations

import pytest
import torch
from families import build

from hf_domino import explain_round
from hf_domino.decoding.branches import SHARPNESS
from hf_domino.decoding.runner import TargetRunner
from hf_domino.pair import read_prompts

PROMPT = torch.tensor([[5, 9, 33, 20, 7, 41]])
ARGUMENTS = {"do_sample": False, "repetition_penalty": 1.3, "eos_token_id": -1}


@pytest.fixture
def real_rounds(monkeypatch):
    """The trees that the rounds of the calls to come propose."""
    rounds, forward_block = [], TargetRunner.forward_block

    def noted(self, anchors, proposed):
        rounds.append(proposed)
        return forward_block(self, anchors, proposed)

    monkeypatch.setattr(TargetRunner, "forward_block", noted)
    return rounds


SHAPES = [
    *({}, {"shift_label": False}, {"projector_type": "dflash"}, {"draft_tree_size": 11}),
    {"projector_type": "dspark", "markov_head_type": "rnn", "draft_tree_size": 11},
    {"projector_type": "dflash2", "draft_tree_size": 11},
    {"projector_type": "dfly", "draft_tree_size": 11},
    *({"projector_type": "xpress"} | fields for fields in ({}, {"draft_tree_size": 11})),
]


@pytest.mark.parametrize("fields", SHAPES, ids=str)
def test_it_is_the_round_that_generate_runs(tiny_qwen3, make_drafter, real_rounds, fields):
    drafter = make_drafter(tiny_qwen3, **fields)
    text = tiny_qwen3.generate(
        PROMPT, assistant_model=drafter, max_new_tokens=12, num_assistant_tokens=100, **ARGUMENTS
    )
    lengths, rounds, start = drafter.stats.acceptance_lengths, list(real_rounds), PROMPT.shape[1] + 1
    assert len(lengths) == len(rounds) > 3
    for proposed, length in zip(rounds, lengths, strict=True):
        opened = explain_round(drafter, tiny_qwen3, text[:, :start], **ARGUMENTS)
        assert opened.anchor == text[0, start - 1]
        assert torch.equal(opened.proposals, proposed.tokens[0])
        if "draft_tree_size" in fields:
            assert torch.equal(opened.parents, proposed.parents[0])
        assert min(opened.num_accepted + 1, text.shape[1] - start) == length
        assert torch.equal(opened.committed[: text.shape[1] - start], text[0, start : start + length])
        start += length


def test_each_node_has_the_laws_of_its_own_path(tiny_qwen3, make_drafter):
    """Of a tree, what chains along each of its paths have."""
    drafter = make_drafter(tiny_qwen3, draft_tree_size=11, draft_pool_size=None)
    opened = explain_round(drafter, tiny_qwen3, PROMPT, **ARGUMENTS)
    assert len(set(opened.parents.tolist())) < len(opened.proposals) == 11  # it branches
    paths, chances = [[]], [1.0]
    for node, (token, parent) in enumerate(zip(opened.proposals.tolist(), opened.parents.tolist(), strict=True)):
        distribution = opened.corrected_probs[node].pow(SHARPNESS)
        chances.append(chances[parent] * float(distribution[token] / distribution.sum()))
        paths.append([*paths[parent], token])
    assert opened.chances.tolist() == pytest.approx(chances[1:], rel=1e-3)
    for position, path in enumerate(paths):
        text = torch.cat((PROMPT, torch.tensor([path], dtype=torch.long)), dim=1)
        output = tiny_qwen3.generate(
            text, max_new_tokens=1, output_scores=True, return_dict_in_generate=True, **ARGUMENTS
        )
        torch.testing.assert_close(opened.target_probs[position], output.scores[0][0].softmax(dim=0), atol=1e-4, rtol=0)


@pytest.mark.parametrize("tree_size", [None, 11])
def test_the_text_shows_proposals_chances_choices_and_the_path(tiny_qwen3, make_drafter, tree_size):
    opened = explain_round(make_drafter(tiny_qwen3, draft_tree_size=tree_size), tiny_qwen3, PROMPT)
    opened.target_probs[0, opened.proposals[0]] = 2.0  # the target's own choice
    lines = opened.text(lambda token: f"<{token}>").splitlines()
    assert [line[0] for line in lines].count("*") == len(opened.path) > 1
    for token, choice in zip([41, *opened.proposals.tolist()], opened.choices.tolist(), strict=True):
        assert any(line.endswith(f"<{token}> -> <{choice}>") for line in lines)
    for chance in [] if tree_size is None else opened.chances.tolist():
        assert any(f" {chance:.0%} " in line for line in lines)


def test_proposals_are_chosen_from_the_corrected_law(tiny_qwen3, make_drafter):
    drafter = make_drafter(tiny_qwen3, draft_pool_size=None, pure_draft_prefix_len=2)
    opened = explain_round(drafter, tiny_qwen3, PROMPT)
    assert torch.equal(opened.proposals, opened.corrected_probs.argmax(dim=-1))
    assert not torch.equal(opened.corrected_probs.argmax(dim=-1), opened.base_probs.argmax(dim=-1))
    assert torch.equal(opened.corrected_probs[:2], opened.base_probs[:2])
    torch.testing.assert_close(opened.target_probs.sum(dim=-1), torch.ones(drafter.config.num_draft_tokens + 1))


def test_without_the_head_base_and_corrected_are_one(tiny_qwen3, tiny_drafter):
    with_head = explain_round(tiny_drafter, tiny_qwen3, PROMPT)
    without = explain_round(tiny_drafter.view(projector_type="dflash"), tiny_qwen3, PROMPT)
    assert torch.equal(without.base_probs, without.corrected_probs)
    assert torch.equal(without.base_probs[0], with_head.base_probs[0])


@pytest.mark.parametrize("ids", [PROMPT[0], PROMPT[:, :1], PROMPT.expand(2, -1)], ids=lambda ids: str(list(ids.shape)))
def test_other_shapes_are_refused(tiny_qwen3, tiny_drafter, ids):
    with pytest.raises(ValueError, match=r"shape of input_ids must be \[1, T\] with T at least 2"):
        explain_round(tiny_drafter, tiny_qwen3, ids)


def test_the_target_runs_as_generate_runs_it(make_drafter):
    """RoBERTa counts its positions from 2 on where it is not told them; Mamba's state cannot be rewound."""
    roberta, mamba = build("roberta"), build("mamba")
    opened = explain_round(make_drafter(roberta), roberta, PROMPT)
    plain = roberta.generate(PROMPT, max_new_tokens=1, output_logits=True, return_dict_in_generate=True)
    torch.testing.assert_close(opened.target_probs[0], plain.logits[0][0].softmax(dim=0))
    with pytest.raises(ValueError, match="cache must be a DynamicCache, got None"):
        explain_round(make_drafter(mamba), mamba, PROMPT)


@pytest.mark.parametrize("tree_size", [None, 12])
def test_rounds_of_the_bundled_pair_end_where_it_says(pair, tree_size):
    """Where drafts are accepted: the whole text, told by opening one round after another."""
    drafter = pair.drafter.view(draft_length="full", draft_tree_size=tree_size)
    prompt = pair.tokenizer(read_prompts(pair.folder / "prompts.jsonl")[5]["text"], return_tensors="pt")["input_ids"]
    text = pair.target.generate(prompt, assistant_model=drafter, max_new_tokens=33, do_sample=False)
    told = text[:, : prompt.shape[1] + 1]
    lengths = []
    while told.shape[1] < text.shape[1]:
        opened = explain_round(drafter, pair.target, told)
        lengths.append(opened.num_accepted + 1)
        told = torch.cat((told, opened.committed[None]), dim=1)
    assert lengths == drafter.stats.acceptance_lengths
    assert max(lengths) > 2
    assert torch.equal(told[:, : text.shape[1]], text)
