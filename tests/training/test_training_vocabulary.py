"""Training of a draft vocabulary: what counts as a miss, and whole runs."""

from __future__ import annotations

import torch
from naive import naive_positions
from test_losses import SOME as IDS
from test_losses import make_batch
from transformers import AutoTokenizer

from hf_domino import DominoDraftModel
from hf_domino.data import load_rows
from hf_domino.data.token_counts import count_tokens, most_frequent
from hf_domino.formats.draft_vocabulary import d2t_of
from hf_domino.training.evidence.acceptance import simulate_acceptance
from hf_domino.training.parts import extend_drafter


def test_labels_that_are_not_drafted_are_misses(target, make_drafter, make_trainer, greedy_rows):
    drafter = make_drafter(target, projector_type="dflash").restricted(IDS)
    batch = make_batch()
    with torch.no_grad():
        training = make_trainer(drafter, greedy_rows).drafter_training
        training.label(batch, evaluating=True)
        scored = training(**batch)
        hits = {
            (block, k): IDS[int(base.argmax())] == label
            for block, k, base, _, _, label in naive_positions(drafter, target, batch, target.lm_head.weight[IDS])
        }
    outside = ((batch["weights"] > 0) & (batch["columns"] < 0)).flatten(0, 1)
    assert outside.any()
    assert not (scored.is_correct & outside).any()
    assert int((batch["weights"] > 0).sum()) == len(hits)
    assert int(scored.is_correct.sum()) == sum(hits.values())


def test_walked_rounds_are_those_of_generation(target, make_drafter):
    drafter, prompt = make_drafter(target).restricted(IDS), torch.arange(5, 13)[None]
    options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 2}
    text = target.generate(prompt, **options)[0].tolist()
    target.generate(prompt, assistant_model=drafter, **options)
    (walked,) = simulate_acceptance(drafter, target, [text], [8])
    assert walked == drafter.stats.rows[0][: len(walked)]
    assert len(walked) > 20


def test_a_head_for_a_restricted_dflash_drafter(target, make_drafter, make_trainer, greedy_rows):
    dflash = make_drafter(target, projector_type="dflash").restricted(IDS)
    drafter = extend_drafter(dflash, {"projector_type": "domino", "emb_dim": 8, "gru_hidden_dim": 8})
    assert drafter.vocabulary.token_ids.tolist() == IDS
    assert drafter.embed_proj[2].weight.shape == (len(IDS), 8)
    make_trainer(drafter, greedy_rows, train_only="head", max_steps=3).train()
    assert drafter.embed_proj[2].weight.any()


def test_the_command_counts_once_and_a_resumed_run_takes_what_is_stored(recipe, train, tmp_path, caplog):
    recipe["draft_vocab_size"] = 12
    assert train(recipe, "--max_steps", "2") == 0
    assert "the draft vocabulary: 12 of 64 tokens make up 100.00% of the training text" in caplog.text
    stored = DominoDraftModel.from_pretrained(tmp_path / "run").d2t
    rows = load_rows(recipe["train_file"], AutoTokenizer.from_pretrained(recipe["target"]))
    assert torch.equal(stored, d2t_of(most_frequent(count_tokens(rows, 64), 12), 64))
    caplog.clear()
    assert train(recipe) == 0
    assert "the draft vocabulary" not in caplog.text
    assert "The drafter only proposes the first" not in caplog.text
    assert torch.equal(DominoDraftModel.from_pretrained(tmp_path / "run").d2t, stored)


def test_the_first_tokens_are_taken_with_a_word(target, make_drafter, make_trainer, greedy_rows, caplog):
    make_trainer(make_drafter(target).restricted(IDS), greedy_rows, max_steps=1).train()
    assert "The drafter only proposes the first" not in caplog.text
    trainer = make_trainer(make_drafter(target, draft_vocab_size=20), greedy_rows, max_steps=1)
    trainer.train()
    assert "The drafter only proposes the first 20 tokens" in caplog.text
