"""What the command trains of EAGLE-3, from states on disk, is used as other drafters are."""

from __future__ import annotations

import torch
from calls_of_methods import PROMPTS, generate

from hf_domino import DominoDraftModel, check_fit
from hf_domino.cli.main import main

CARD = (
    *("This is an [EAGLE-3](https://arxiv.org/abs/2503.01840) drafter", "@misc{eagle32025"),
    "tokens one after another with one layer, which reads what it has drafted so far.",
    "is not available for this drafter. Engines' layouts",
)
# Flags of a further training that it lacks, and what the error names.
LACKS = {
    ("--projector-type", "domino"): "the drafter of a new head",
    ("--train-only", "head"): "train_only",
    ("--gradient-checkpointing", "true"): "the drafter's method with gradient_checkpointing",
    ("--start-from-target", "true"): "start_from_target",
}


def test_it_is_trained_and_used_and_what_it_lacks_is_named(
    recipe, train, target, saved_pair, word_tokenizer, tmp_path, capsys
):
    fields = {name: value for name, value in recipe.items() if name not in ("num_hidden_layers", "shift_label")}
    fields["projector_type"] = "eagle3"
    assert train(fields, "--cache-hidden-states", str(tmp_path / "states"), "--distillation-weight", "1") == 0
    assert "eval_walked_acceptance_length" in capsys.readouterr().out
    run = str(tmp_path / "run")
    drafter, ids = DominoDraftModel.from_pretrained(run), PROMPTS[0][None]
    card = (tmp_path / "run" / "README.md").read_text()
    assert [words for words in CARD if words not in card] == []
    assert torch.equal(generate(target, drafter, ids), generate(target, None, ids))
    assert check_fit(drafter, target, word_tokenizer, ["t7 t8 t9"], max_new_tokens=24).modes
    pair = ["--target", str(saved_pair[0]), "--drafter", run]
    assert main(["generate", *pair, "--max-new-tokens", "8", "t7 t8"]) == 0
    assert main(["export", "--drafter", run, "--output", f"{run}-out"]) == 2
    assert "the drafter's method with export must be" in capsys.readouterr().err
    again = {name: value for name, value in fields.items() if name not in ("projector_type", "block_size")}
    new = fields | {"output_dir": str(tmp_path / "again")}
    again |= {"drafter": run, "output_dir": str(tmp_path / "again")}
    for flags, said in LACKS.items():
        assert train(new if said == "start_from_target" else again, *flags) == 2
        assert said in capsys.readouterr().err
    assert train(again, "--block-size", "3", "--max-steps", "1") == 0
    assert DominoDraftModel.from_pretrained(tmp_path / "again").config.num_draft_tokens == 3
