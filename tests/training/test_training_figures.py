"""The picture of a training is drawn from its log alone, and the card shows it."""

from __future__ import annotations

import logging
import re
import sys
import xml.etree.ElementTree as ElementTree

import pytest
from transformers import TrainerState

from hf_domino.cards.training import MOST_LOG_ROWS, training_section
from hf_domino.training.evidence.figures import FIGURE, draw_training

pytest.importorskip("matplotlib")


def log(num_steps: int, has_head: bool = True) -> list[dict[str, float]]:
    """A log with an evaluation after every second step."""
    entries = []
    for step in range(1, num_steps + 1):
        entries.append({"step": step, "base_loss": 3 / step, "corrected_loss": 2 / step, "acceptance_length": 1 + step})
        if step % 2 == 0:
            shares = {f"eval_accept_at_{place}": 0.9 - place / 10 for place in (1, 2, 3)}
            shares |= {f"eval_base_accept_at_{place}": 0.5 - place / 10 for place in (1, 2)} if has_head else {}
            entries.append({"step": step, "eval_loss": 2.5 / step, "eval_walked_acceptance_length": 1 + step} | shares)
    return entries


def test_the_picture_follows_the_log_and_nothing_else(tmp_path):
    for name, entries in (("first", log(6)), ("again", log(6)), ("early", log(1))):
        assert draw_training(entries, tmp_path / name) == FIGURE
    first, again, early = (tmp_path / name / FIGURE for name in ("first", "again", "early"))
    assert first.read_bytes() == again.read_bytes()
    words = ["".join(ElementTree.parse(path).getroot().itertext()) for path in (first, early)]
    # The trained loss is another one, which has no place beside that of held-out text.
    assert ["loss of held-out text" in each for each in words] == [True, False]
    assert ["loss that is trained" in each for each in words] == [False, True]
    assert draw_training([{"step": 1, "eval_loss": 1.0}], tmp_path / "untrained") is None


def test_without_matplotlib_one_notice_and_no_picture(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    logging.Logger.warning_once.cache_clear()  # of other trainings without it
    assert [draw_training(log(4), tmp_path) for _ in range(2)] == [None, None]
    assert caplog.text.count("pip install matplotlib") == 1
    assert not list(tmp_path.iterdir())


def test_the_card_tells_evaluations_and_shows_the_picture():
    section = training_section(TrainerState(global_step=40, log_history=log(40)), figure=FIGURE)
    assert f"![Training]({FIGURE})" in section
    assert "| step | loss | walked_acceptance_length |" in section
    assert "| 40 | 0.0625 | 41 |" in section
    assert len(re.findall(r"^\| \d+ \|", section.partition("held-out")[0], re.MULTILINE)) == MOST_LOG_ROWS
    without = training_section(TrainerState(global_step=4, log_history=log(4, has_head=False)))
    assert "base_loss" not in without.partition("held-out")[2]
    assert "![" not in without
    assert "hours" not in without
