from __future__ import annotations

import io
import json
import re
import shutil

import pytest
import torch
from huggingface_hub.utils import are_progress_bars_disabled
from rich.console import Console

from hf_domino.cli import comparison
from hf_domino.cli import main as cli
from hf_domino.cli.exits import FAILED_CHECK
from hf_domino.cli.streaming import RoundPrinter, round_of
from hf_domino.drafter.stats import DecodingStats, Pause
from hf_domino.evaluation.benchmark.timing import generate_timed
from hf_domino.pair import load_pair

FLAGS = ["--max-new-tokens", "24", "--threads", "1"]


def compare(folder, *flags):
    return cli.main(["generate", "--compare", "--target", str(folder), *flags])


def test_it_shows_both_outputs_and_the_rounds(tiny_pair_folder, capsys, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert compare(tiny_pair_folder, *FLAGS) == 0
    shown = capsys.readouterr().out
    assert "plain generate" in shown
    assert "outputs: identical, token for token" in shown
    assert "|" in shown
    assert "\x1b[" not in shown


def test_it_fails_where_outputs_differ(tiny_pair_folder, capsys, monkeypatch):
    monkeypatch.setattr(comparison.Comparison, "equal", property(lambda self: False))
    assert compare(tiny_pair_folder, *FLAGS) == FAILED_CHECK
    assert "outputs: DIFFERENT" in capsys.readouterr().out


def test_it_shows_the_prompt_before_it_generates_and_the_text_as_it_is_written(tiny_pair_folder, capsys, monkeypatch):
    shown = []

    def watched(target, inputs, streamer=None, **arguments):
        shown.append(capsys.readouterr().out)
        output = generate_timed(target, inputs, streamer=streamer, **arguments)
        assert bool(capsys.readouterr().out.strip()) == (streamer is not None)
        return output

    monkeypatch.setattr(comparison, "generate_timed", watched)
    assert compare(tiny_pair_folder, *FLAGS, "def f(x):") == 0
    assert "def f(x):" in shown[0]
    assert len(shown) == 4
    assert re.search(r" plain: \d+\.\d\d x with the drafter", capsys.readouterr().out.splitlines()[-1])


def test_it_says_why_drafting_paused_and_copies_from_the_text(tiny_pair_folder, capsys, monkeypatch):
    calls = []

    def watched(target, inputs, **arguments):
        calls.append(arguments.get("prompt_lookup_num_tokens"))
        output = generate_timed(target, inputs, **arguments)
        if drafter := arguments.get("assistant_model"):
            drafter.stats.pauses, drafter.stats.num_paused = [Pause(1.25, 2.5, 3)], 14
        return output

    monkeypatch.setattr(comparison, "generate_timed", watched)
    assert compare(tiny_pair_folder, *FLAGS, "--lookup-tokens", "4") == 0
    why = "drafting paused for 14 tokens: a round took the time of 2.50 single tokens, and brought 1.25\n"
    assert why in capsys.readouterr().out
    assert calls == [None, 4] * 2


def test_comparison_is_repeatable_and_rounds_cover_the_text(tiny_pair_folder):
    pair = load_pair(tiny_pair_folder)
    arguments = {"max_new_tokens": 24, "do_sample": False}
    first, second = (
        comparison.compare(pair, {"text": "def f(x):"}, arguments, 0, Console(quiet=True)) for _ in range(2)
    )
    assert first.equal
    assert torch.equal(first.assisted, second.assisted)
    assert first.acceptance_lengths == second.acceptance_lengths
    assert len(first.assisted) == 1 + sum(first.acceptance_lengths)


@pytest.mark.parametrize("colour", [True, False])
def test_rounds_are_told_apart_by_colours_or_by_bars(tiny_pair_folder, colour, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = {"force_terminal": True, "color_system": "truecolor"} if colour else {}
    console = Console(file=io.StringIO(), width=200, **terminal)
    printer = RoundPrinter(load_pair(tiny_pair_folder).tokenizer, console, shows_rounds=True)
    printer.stats = DecodingStats(3, rows=[[2, 3]])
    printer.put(torch.tensor([[5, 6]]))  # the prompt
    letters = [printer._tokenizer.token_to_id(letter) for letter in "abcdefg"]  # the last one of a round to come
    printer.put(torch.tensor(letters))
    shown = console.file.getvalue()
    assert printer.text == "abcdefg"
    if colour:
        styles = re.findall(r"\x1b\[([\d;]+)m(\w)", shown)
        assert [letter for _, letter in styles] == list("abcdefg")
        assert len({styles[place][0] for place in (0, 1, 3)}) == 3  # the prefill's, and two rounds'
        assert [style.startswith("4;") for style, _ in styles] == [letter in "cf" for letter in "abcdefg"]
    else:
        assert shown == "abc|def|g"


@pytest.mark.parametrize(
    ("position", "found"), [(0, (None, False)), (1, (0, False)), (2, (0, True)), (3, (1, False)), (5, (1, True))]
)
def test_every_token_has_its_round(position, found):
    assert round_of(position, [2, 3]) == found


def test_sampled_text_is_plain_generations(tiny_pair_folder, capsys):
    texts = set()
    for seed in ("3", "4"):
        flags = [*FLAGS, "--temperature", "0.9", "--seed", seed]
        assert compare(tiny_pair_folder, *flags) == 0
        shown = capsys.readouterr().out
        assert "outputs: identical, token for token (24 tokens, fp32" in shown
        texts.add(shown.partition("plain generate")[2].partition("with the drafter")[0])
    assert len(texts) == 2


def test_a_chat_model_answers(tiny_pair_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    folder = tmp_path / "chat"
    for ending in ("", "-domino", "-dflash"):
        shutil.copytree(f"{tiny_pair_folder}{ending}", f"{folder}{ending}")
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    (folder / "chat_template.jinja").write_text(template)
    turns = [
        {"role": "user", "content": "def"},
        {"role": "assistant", "content": "f"},
        {"role": "user", "content": "x"},
    ]
    (folder / "prompts.jsonl").write_text(json.dumps({"kind": "code", "messages": turns}) + "\n")
    assert compare(folder, *FLAGS, "--json") == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == turns
    assert compare(folder, *FLAGS, "return") == 0
    shown = capsys.readouterr().out
    assert "user: return" in shown
    asked = load_pair(folder)
    ids = asked.tokenizer("<user>return<assistant>", return_tensors="pt")["input_ids"]
    answer = asked.target.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
    assert asked.tokenizer.decode(answer, skip_special_tokens=True).strip() in shown


def test_the_dtype_is_said(tiny_pair_folder, capsys):
    assert compare(tiny_pair_folder, *FLAGS, "--dtype", "bfloat16") in (0, FAILED_CHECK)
    said = capsys.readouterr()
    assert "24 tokens, bf16, 1 threads" in said.out
    last = said.out.splitlines()[-1]
    assert ("try --dtype float32, generate without it here" in last) == (not last.startswith("Faster"))
    assert f"loading {tiny_pair_folder} in bfloat16 on " in said.err
    assert not are_progress_bars_disabled()  # of what is downloaded


@pytest.mark.parametrize("temperature", ["-1", "nan", "inf"])
def test_bad_temperature_is_named(tiny_pair_folder, temperature, capsys):
    assert compare(tiny_pair_folder, "--temperature", temperature) == cli.USER_ERROR
    assert "--temperature must be at least 0 and finite" in capsys.readouterr().err


def test_missing_pair(tmp_path, capsys):
    assert compare(tmp_path) == cli.USER_ERROR
    assert f"--drafter must be given: there is no {tmp_path}-domino" in capsys.readouterr().err


@pytest.mark.parametrize("count", ["0", "-1", "ten"])
def test_counts_must_be_positive(tiny_pair_folder, count, capsys):
    with pytest.raises(SystemExit) as exit_:
        compare(tiny_pair_folder, "--max-new-tokens", count)
    assert exit_.value.code == cli.USER_ERROR
    assert f"--max-new-tokens: must be a number of at least 1, got '{count}'" in capsys.readouterr().err


def test_a_device_that_is_not_there_is_named(tiny_pair_folder, capsys):
    assert compare(tiny_pair_folder, "--device", "nonsense") == cli.USER_ERROR
    assert "--device must be one that torch" in capsys.readouterr().err


def test_empty_prompt_is_refused(tiny_pair_folder, capsys):
    assert compare(tiny_pair_folder, "") == cli.USER_ERROR
    assert "PROMPT must be a text" in capsys.readouterr().err


@pytest.mark.gpu
def test_it_on_a_gpu(tiny_pair_folder, capsys):
    assert compare(tiny_pair_folder, *FLAGS, "--device", "cuda") == 0
    assert "24 tokens, fp32, cuda:0" in capsys.readouterr().out
