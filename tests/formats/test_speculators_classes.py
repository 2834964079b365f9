"""Exports are read by the classes of speculators, which score tokens as we do.

They are no requirement, and want an older Transformers than they need: `pip install --no-deps --target DIR
speculators==0.9.0 hs_connectors loguru openai pydantic-settings`, and DIR on PYTHONPATH.
"""

from __future__ import annotations

import pytest
import torch
from markov import build

from hf_domino.targets.view import TargetModel
from hf_domino.training.objective.forward import corrected_positions, draft_blocks, draft_logits

pytest.importorskip("speculators")
from speculators.model import SpeculatorModel

pytestmark = pytest.mark.transformers

ANCHOR, LENGTH = 9, 20
FP32_TOL = {"atol": 1e-5, "rtol": 1e-5}  # a few roundings of sums over a hundred products
KINDS = ("selector behind the anchor", "vanilla", "gated", "rnn", "gated behind the anchor")


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_scores_are_those_of_its_own_class(tiny_qwen3, tmp_path, kind):
    tiny_qwen3.save_pretrained(tmp_path / "target")
    fields = {} if "selector" in kind else {"enable_confidence_head": True}
    drafter = build(tiny_qwen3, kind, target_layer_ids=[0, 2], target_name=str(tmp_path / "target"), **fields).float()
    drafter.export(tmp_path / "drafter", "speculators", dtype="float32")
    loaded, info = SpeculatorModel.from_pretrained(tmp_path / "drafter", output_loading_info=True)
    assert not any(info.values())
    loaded.config.transformer_layer_config._attn_implementation = "eager"
    theirs = type(loaded)(loaded.config).eval()
    theirs.load_state_dict(loaded.state_dict(), strict=False)
    theirs.load_verifier_weights()

    view, config = TargetModel(tiny_qwen3, drafter.config.layer_ids(tiny_qwen3.config)), drafter.config
    ids = torch.randint(4, 64, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    outputs = tiny_qwen3(ids, **view.capture_kwargs(final=True))
    captured, mask = view.captured(outputs), torch.zeros_like(ids).index_fill(1, torch.tensor([ANCHOR]), 1)
    batch = {"input_ids": ids, "anchors": torch.tensor([[ANCHOR]])}
    hidden, states = draft_blocks(drafter, view, batch, drafter.fuse_context(captured)[:, :ANCHOR])
    base, corrected = draft_logits(drafter, view, hidden, states, corrected_positions(config, ids.device))
    # Of one block, so that all shapes are [1, K, ...].
    final, documents = outputs.hidden_states[-1], torch.zeros_like(ids)
    found, logits, *_, places = theirs._backbone_forward(
        torch.cat(captured, dim=-1), ids, mask, final, documents, max_anchors=1
    )
    first, tokens = config.label_offset, ids[:, places]
    torch.testing.assert_close(found[:, first:], hidden[0][:, first:], **FP32_TOL)
    torch.testing.assert_close(logits[:, first:], base[0][:, first:], **FP32_TOL)
    before = tokens if config.shift_label else torch.cat((tokens[:, :1], tokens[:, :-1]), dim=1)
    if "selector" in kind:
        candidates = logits.topk(config.selector_top_k, dim=-1).indices
        scores = theirs.candidate_selector.score_candidates(logits, found, before, candidates)
        expected = corrected[0].gather(-1, candidates)
    else:
        read = theirs.markov_head.prev_embeddings(before)
        scores = logits + theirs.markov_head.block_bias(prev_token_ids=before, hidden_states=found, prev_emb=read)
        expected = corrected[0]
    torch.testing.assert_close(scores[:, first:], expected[:, first:], **FP32_TOL)
