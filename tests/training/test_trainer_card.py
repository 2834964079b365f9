"""Cards tell what the trainer recorded, and nothing else."""

from __future__ import annotations

import json
import re
from dataclasses import replace

from huggingface_hub import ModelCard

from hf_domino import DominoConfig
from hf_domino._common.run_record import Run, Text
from hf_domino.cards.render import render_card
from hf_domino.cards.training import MOST_LOG_ROWS, draw_training, training_section
from hf_domino.data.records import from_table
from hf_domino.data.rows import load_rows
from hf_domino.training.evidence.record import text_of


def cells(card: str, first: str) -> list[str]:
    """The other cells of the row of a card's table that starts with `first`."""
    return re.search(rf"^\| {first} \| (.*) \|$", card, re.MULTILINE)[1].split(" | ")


def test_a_trained_drafters_card_comes_from_what_was_recorded(
    target, make_drafter, make_trainer, greedy_rows, tmp_path
):
    fields = {"save_strategy": "steps", "save_steps": 4, "logging_steps": 2, "max_steps": 4}
    make_trainer(make_drafter(target), greedy_rows, greedy_rows[:3], **fields).train()
    trainer = make_trainer(make_drafter(target), greedy_rows, greedy_rows[:3], **(fields | {"max_steps": 6}))
    trainer.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-4"))
    metrics = trainer.evaluate()
    trainer.save_state()
    (tmp_path / "run/README.md").write_text("# My drafter\n\nMy own words.\n")
    trainer.create_model_card(license="apache-2.0", dataset="me/data")
    recorded = json.loads((tmp_path / "run/trainer_state.json").read_text())
    card = (tmp_path / "run/README.md").read_text()

    # Batches of 4 of 8 rows: each pass over the rows takes two steps.
    num_tokens = 3 * sum(len(row["input_ids"]) for row in greedy_rows)
    assert recorded["num_input_tokens_seen"] == num_tokens
    assert cells(card, "steps") == ["6"]
    assert cells(card, "tokens read") == [f"{num_tokens:,}"]
    log = [entry for entry in recorded["log_history"] if "hours" in entry]
    hours = [entry["hours"] for entry in log]
    assert 0 < hours[0] < hours[1] < hours[2]
    assert cells(card, "hours") == [f"{hours[-1]:.4g}"]
    for entry in log:
        figures = [entry[name] for name in ("base_loss", "corrected_loss", "acceptance_length")]
        assert cells(card, entry["step"])[-3:] == [f"{value:.4g}" for value in figures]
    # Below the log, which has a line for step 6 too.
    figures = [metrics[f"eval_{name}"] for name in ("base_walked_acceptance_length", "walked_acceptance_length")]
    assert cells(card.partition("held-out")[2], "6")[-2:] == [f"{value:.4g}" for value in figures]
    assert cells(card, "train rows") == ["8"]
    assert cells(card, "train tokens") == [f"{num_tokens // 3:,}"]
    run = Run.load(tmp_path / "run")
    assert (run.steps, run.tokens, len(run.log)) == (6, num_tokens, len(recorded["log_history"]))
    data = ModelCard(card).data
    assert (data.license, data.datasets) == ("apache-2.0", ["me/data"])
    drawn = (tmp_path / "run/figures/training.svg").read_text()
    assert "(figures/training.svg)" in card
    assert all(
        words in drawn for words in ("position in the draft", "without correction", "as drafted", "held-out text")
    )
    assert card.count("My own words.") == card.count("## Training") == 1
    assert str(tmp_path) not in card


def test_a_picture_has_positions_in_order_and_gaps_where_none_was_counted(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("matplotlib.axes.Axes.plot", lambda axes, x, y, **_: drawn.append((list(x), list(y))))
    log = [{"step": 1, "base_loss": 2.0, "corrected_loss": 2.0}, {"step": 1, "eval_loss": 2.0}]
    log[1] |= {f"eval_accept_at_{place}": 1 / place for place in (1, 10, 11, 2, 4)}
    draw_training(Run(steps=1, log=log), tmp_path)
    assert drawn[-1] == ([1, 2, 4, 10, 11], [1 / place for place in (1, 2, 4, 10, 11)])


def test_long_logs_are_thinned():
    entries = []
    for step in range(1, 41):
        entries.append({"step": step, "base_loss": 3 / step, "corrected_loss": 2 / step})
        if step % 2 == 0:
            entries.append({"step": step, "eval_loss": 2.5 / step, "eval_walked_acceptance_length": 1 + step})
    section = training_section(Run(steps=40, log=entries))
    assert "| step | loss | walked_acceptance_length |" in section
    assert "| 40 | 0.0625 | 41 |" in section
    assert len(re.findall(r"^\| \d+ \|", section.partition("held-out")[0], re.MULTILINE)) == MOST_LOG_ROWS
    assert "hours" not in section


def test_a_data_set_of_the_hub_is_named_with_its_size():
    texts = {"train": Text(examples=1200, tokens=34567, dataset="me/data"), "eval": Text(examples=10)}
    card = render_card(DominoConfig(), name="mine", target=None, run=Run(steps=1, texts=texts))
    assert cells(card, "train data set") == ["me/data"]
    assert cells(card, "train rows") == ["1,200"]
    assert cells(card, "train tokens") == ["34,567"]
    assert ModelCard(card).data.datasets == ["me/data"]
    assert "eval data set" not in card


def test_the_name_of_a_data_set_reaches_the_record():
    def told(text) -> Text:
        return replace(text_of(text), digest=None)

    rows = [{"input_ids": [4, 5, 6, 7, 8], "loss_mask": [0, 1, 1, 1, 1]}]
    read = load_rows(replace(from_table(rows, "rows"), dataset="me/data"), max_length=8)
    assert told(read) == Text(examples=1, tokens=5, dataset="me/data")
    assert told(read.within(4)) == Text(examples=1, tokens=4, dataset="me/data")
    assert told({"one": read, "other": read}) == Text(examples=2, tokens=10, dataset="me/data")
    assert told(load_rows(from_table(rows, "rows"))) == Text(examples=1, tokens=5)
    assert text_of(row for row in rows) == Text()
    assert text_of(read).digest == text_of(load_rows(from_table(rows, "rows"))).digest != text_of(read.within(4)).digest
