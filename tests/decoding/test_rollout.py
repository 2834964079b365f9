"""The rollout draws its proposals from the corrected distribution, of the whole vocabulary or of a pool."""

from functools import partial

import pytest
import torch
from builders import VOCAB_SIZE, build_drafter
from drafts import chain_of
from rederived import Rederived
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from hf_domino.decoding.candidates import pool_columns
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.sampling import TokenDistribution, choose
from hf_domino.decoding.scores import CandidateScores
from hf_domino.methods.input_table import InputTable
from hf_domino.targets.view import TargetModel

LAWS = {
    "nothing": [],
    "penalty": [RepetitionPenaltyLogitsProcessor(1.5)],
    "warpers": [TemperatureLogitsWarper(0.8), TopKLogitsWarper(30)],
}


@pytest.fixture(params=[{}, {"pure_draft_prefix_len": 2}, {"shift_label": False}], ids=["", "prefix", "unshifted"])
def block(request, tiny_qwen3):
    """A drafter with strong corrections, its target, random draft hidden states and prefixes of three rows."""
    drafter = build_drafter(tiny_qwen3, draft_pool_size=None, block_size=9, **request.param)
    torch.nn.init.normal_(drafter.embed_proj[2].weight, std=2.0)
    torch.manual_seed(5)
    hidden = 0.3 * torch.randn(3, drafter.config.num_draft_tokens, drafter.config.hidden_size)
    prefixes = Prefixes(torch.randint(4, VOCAB_SIZE, (3, 11)), [11, 11, 8], [0, 1, 2])
    return drafter, TargetModel(tiny_qwen3), hidden, prefixes


def exponential(block):
    """Noise to draw the proposals with, of a position more than there are."""
    return torch.empty(3, block[2].shape[1] + 1, VOCAB_SIZE).exponential_()


@torch.no_grad()
@pytest.mark.parametrize("shift_label", [True, False])
@pytest.mark.parametrize("prefix_len", [0, 3])
@pytest.mark.parametrize("pool_size", [None, 12])
def test_proposals_are_those_of_the_formulas(tiny_qwen3, shift_label, prefix_len, pool_size):
    """State and first corrected position go by the place in the block, of which an unshifted one drops the first."""
    fields = {"shift_label": shift_label, "pure_draft_prefix_len": prefix_len, "draft_pool_size": pool_size}
    drafter = build_drafter(tiny_qwen3, block_size=7, **fields)
    torch.nn.init.normal_(drafter.embed_proj[2].weight, std=2.0)
    hidden, target = 0.3 * torch.randn(2, 7, drafter.config.hidden_size), TargetModel(tiny_qwen3)
    prefixes, distribution = (
        Prefixes(torch.randint(4, VOCAB_SIZE, (2, 9)), [9, 6], [0, 1]),
        TokenDistribution(LogitsProcessorList()),
    )
    arguments = drafter, target, hidden[:, drafter.config.label_offset :], prefixes, distribution
    rederived, anchors = Rederived(drafter, tiny_qwen3), prefixes.last()[:, 0]
    pairs = zip(hidden, anchors, strict=True)
    expected = torch.stack([rederived.correct(states, anchor)[0] for states, anchor in pairs])
    for scorer in (None, drafter.scorer(target)):
        assert torch.equal(chain_of(*arguments, scorer=scorer), expected)


@torch.no_grad()
@pytest.mark.parametrize("distribution", LAWS)
@pytest.mark.parametrize("pool_size", [None, 20])
def test_rows_are_drafted_as_if_each_were_alone(block, distribution, pool_size):
    distribution = TokenDistribution(LogitsProcessorList(LAWS[distribution]))
    drafter, target, hidden, prefixes = block
    drafter.config.draft_pool_size = pool_size
    for noise in (None, exponential(block)):
        together = chain_of(*block, distribution, noise)
        for row in range(3):
            alone = Prefixes(prefixes.ids[row : row + 1], [prefixes.lengths[row]], [row])
            own = None if noise is None else noise[row : row + 1]
            chain = chain_of(drafter, target, hidden[row : row + 1], alone, distribution, own)
            assert torch.equal(chain[0], together[row])


@torch.no_grad()
@pytest.mark.parametrize("distribution", LAWS)
@pytest.mark.parametrize("pool_size", [None, 20])
def test_proposals_are_drawn_from_the_corrected_law(block, distribution, pool_size):
    drafter, target, hidden, prefixes = block
    drafter.config.draft_pool_size = pool_size
    distribution, noise = TokenDistribution(LogitsProcessorList(LAWS[distribution])), exponential(block)
    proposals = chain_of(*block, distribution, noise)
    drafter.config.draft_pool_size = None  # logits of all tokens follow
    rederived, anchors = Rederived(drafter, target.model), prefixes.last()[:, 0]
    skipped = torch.nn.functional.pad(hidden, (0, 0, drafter.config.label_offset, 0))
    rows = zip(skipped, anchors, proposals, strict=True)
    logits = torch.stack([rederived.correct(*row)[1] for row in rows])
    for index in range(hidden.shape[1]):
        if pool_size is None:
            seen = partial(prefixes.along, proposals[:, :index], 1)
            expected = distribution.scores(prefixes, logits[:, index : index + 1], seen)[:, 0]
            assert torch.equal(choose(expected, noise[:, index]), proposals[:, index])
        else:
            ids = pool_columns(drafter.logits(target, hidden), pool_size, distribution, prefixes, noise[:, :-1])[
                :, index
            ]
            candidates = partial(CandidateScores, vocab_size=VOCAB_SIZE, token_ids=ids)
            seen = prefixes.along(proposals[:, :index], 1)
            expected = distribution.process(logits[:, index].gather(1, ids), seen, candidates)
            chosen = choose(expected, noise[:, index].gather(1, ids))
            assert torch.equal(ids.gather(1, chosen[:, None])[:, 0], proposals[:, index])


@torch.no_grad()
@pytest.mark.parametrize(("pool_size", "max_bytes"), [(20, 30 * 192), (None, 2**20)], ids=["small", "large"])
def test_products_that_were_kept_change_nothing(block, pool_size, max_bytes):
    drafter, target, hidden, prefixes = block
    drafter.config.draft_pool_size = pool_size
    distribution, scorer = TokenDistribution(LogitsProcessorList()), drafter.scorer(target)
    scorer._table = table = InputTable(drafter.prefix_gru, target, max_bytes)
    for shift in range(3):  # rounds of one generation
        arguments = drafter, target, hidden.roll(shift, dims=1), prefixes, distribution
        assert torch.equal(chain_of(*arguments, scorer=scorer), chain_of(*arguments))
    many = list(range(40))  # more at once than the small one has room for
    expected = drafter.prefix_gru.project_inputs(target.embed(torch.tensor(many)))
    torch.testing.assert_close(table.rows(many), expected)
