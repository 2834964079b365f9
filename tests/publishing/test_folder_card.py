"""The card of a folder comes from its rows; one that does not is found."""

from __future__ import annotations

from dataclasses import replace

import measured
import pytest
from huggingface_hub import EvalResult, ModelCard

from hf_domino import DominoConfig
from hf_domino._common.run_record import RUN_FILE, Run
from hf_domino.cards.sections import merge_card, read_sections
from hf_domino.cli import main as cli
from hf_domino.evaluation.benchmark.report import results_table
from hf_domino.evaluation.results import read_results, to_lines
from hf_domino.publishing.folder_card import card_for, results_section
from hf_domino.targets.identity import identify

ENTRY = {"step": 4, "base_loss": 1.25, "corrected_loss": 0.5, "hours": 0.125}


@pytest.fixture
def folder(tmp_path):
    """A drafter's folder with rows and the record of a training."""
    DominoConfig(target_name="org/target").save_pretrained(tmp_path)
    (tmp_path / "results.jsonl").write_text(to_lines(measured.rows()))
    Run(steps=4, log=[ENTRY]).save(tmp_path)
    return tmp_path


@pytest.fixture
def card(folder):
    """Its card, written by the command."""
    assert cli.main(["push", str(folder), "--card-only", "--license", "mit"]) == 0
    return folder / "README.md"


def test_a_card_names_no_folder_as_base_model_and_says_what_it_lacks(folder, tmp_path, capsys):
    target = tmp_path / "my" / "target"
    target.mkdir(parents=True)
    DominoConfig(target_name=str(target)).save_pretrained(folder)
    (folder / "README.md").write_text(f"---\nbase_model: {target}\n---\n# Mine\n")
    assert cli.main(["push", str(folder), "--card-only"]) == 0
    assert not ModelCard((folder / "README.md").read_text()).data.base_model
    said = capsys.readouterr().err
    assert "The card names no base model on the Hub: give --target OWNER/NAME." in said
    assert "The card names no licence: give --license, such as apache-2.0." in said
    assert cli.main(["push", str(folder), "--card-only", "--target", "org/target", "--license", "mit"]) == 0
    assert capsys.readouterr().err == ""


def test_results_by_position():
    assert "| Domino, full blocks, greedy | 1.00 | 0.67 | 0.33 |" in results_section(measured.rows())


def test_rows_that_measure_nothing_are_refused():
    with pytest.raises(ValueError, match="got 1 without any"):
        results_section(measured.rows()[:1])


def test_the_card_of_a_folder(folder, card):
    text = card.read_text()
    data = ModelCard(text).data
    assert (data.base_model, data.license) == ("org/target", "mit")
    sections = read_sections(text)
    assert results_table(read_results(folder / "results.jsonl")).strip() in sections["results"]
    assert "| 4 | 0.125 | 1.25 | 0.5 |" in sections["training"]
    assert card_for(folder) == text
    assert '"me/other"' in card_for(folder, name="me/other")


def test_the_hub_reads_the_results_and_those_of_other_people_stay(folder, card):
    other = EvalResult("text-generation", "me/data", "data", "accuracy", 0.5)
    head = ModelCard(card.read_text())
    assert head.data.eval_results is None  # full blocks are nobody's default
    head.data.model_name, head.data.eval_results = "mine", [other]
    card.write_text(str(head))
    for speed in (150, 250):
        measured_again = [measured.row("domino_adaptive", prompt, [speed] * 3, [4, 2, 3]) for prompt in (0, 1)]
        (folder / "results.jsonl").write_text(to_lines([*measured.rows(["greedy"]), *measured_again]))
        card.write_text(card_for(folder))
        head = ModelCard(card.read_text()).data
        found = [(result.metric_name, result.metric_value) for result in head.eval_results]
        assert (head.model_name, found[0]) == ("mine", (None, 0.5))
        assert found[1:] == [("speed up, greedy", speed / 100), ("acceptance length, greedy", 3.0)]
    assert merge_card(card.read_text(), card.read_text()) == card.read_text()


def test_results_of_another_drafter_are_refused(folder, tiny_drafter):
    """A drafter that was trained again after it was measured, in the same folder."""
    tiny_drafter.config.target_name = "org/target"
    tiny_drafter.save_pretrained(folder)
    models = {"target": {}, "drafter mine (Domino)": identify(tiny_drafter).known, "drafter other (DFlash)": {}}
    rows = [replace(row, settings={**row.settings, "models": models}) for row in measured.rows()]
    (folder / "results.jsonl").write_text(to_lines(rows))
    assert "## Results" in card_for(folder)
    tiny_drafter.fc.weight.data.mul_(2)
    tiny_drafter.save_pretrained(folder)
    with pytest.raises(ValueError, match=r"the drafter's weights_digest must be .*hf-domino bench --drafter .*"):
        card_for(folder)


def test_figures_that_are_not_of_the_rows_are_replaced(folder, card):
    text = card.read_text()
    card.write_text(text.replace("2.00 x", "9.00 x", 1))
    assert cli.main(["push", str(folder), "--card-only"]) == 0
    assert card.read_text() == text


def test_the_card_keeps_what_it_tells_of_the_training_if_there_is_no_record(folder, card):
    text = card.read_text()
    card.write_text(text.replace("| steps | 4 |", "| steps | 5 |"))
    assert card_for(folder) == text
    (folder / RUN_FILE).unlink()
    assert card_for(folder) == card.read_text()


@pytest.mark.parametrize("stored", ["{}", "[]", "{", '{"version": 2, "steps": 4}'])
def test_a_record_that_cannot_be_read_is_refused(stored, folder):
    (folder / RUN_FILE).write_text(stored)
    with pytest.raises(ValueError, match=r"run.json must be the .*record of a training"):
        card_for(folder)


def test_what_no_card_can_be_made_of_is_named(folder, card):
    (folder / "results.jsonl").unlink()
    with pytest.raises(ValueError, match=r"section 'results' of .* must be computed from .*results.jsonl"):
        card_for(folder)
    (folder / "results.jsonl").write_bytes(b'{"method": "\xe9"}')
    with pytest.raises(ValueError, match=r"results.jsonl, line 1"):
        card_for(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json must be a JSON file"):
        card_for(folder)


def test_what_is_no_drafter_or_names_no_target_is_refused(tmp_path, capsys):
    write = ["push", str(tmp_path), "--card-only"]
    assert cli.main(write) == 2
    assert "must be that of a drafter, with config.json" in capsys.readouterr().err
    DominoConfig().save_pretrained(tmp_path)
    assert cli.main(write) == 2
    assert "--target must be given" in capsys.readouterr().err
    assert cli.main([*write, "--target", "org/name"]) == 0
    assert cli.main(write[:2]) == 2
    assert "REPO must be given" in capsys.readouterr().err


def test_a_card_with_a_byte_order_mark_keeps_its_metadata(folder):
    (folder / "README.md").write_bytes(b"\xef\xbb\xbf---\nlicense: apache-2.0\n---\n# Mine\n")
    card = ModelCard(card_for(folder))
    assert card.data.license == "apache-2.0"
    assert card.text.startswith("# Mine")
