from __future__ import annotations

import io
import os
import re
import shutil

import pytest
import torch
from chats import write_lines
from huggingface_hub.utils import are_progress_bars_disabled
from rich.console import Console

from hf_domino.cli import answers
from hf_domino.cli import main as cli
from hf_domino.cli.answers import RoundPrinter
from hf_domino.cli.exits import FAILED_CHECK
from hf_domino.evaluation.benchmark.timing import generate_timed
from hf_domino.pair import load_pair
from hf_domino.stats.decoding_stats import DecodingStats, Pause

FLAGS = ["--max-new-tokens", "24", "--threads", "1"]


def compare(folder, *flags):
    return cli.main(["generate", "--compare", "--target", str(folder), *flags])


def test_it_shows_the_prompt_before_it_generates_and_the_text_as_it_is_written(tiny_pair_folder, capsys, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("hf_domino._common.verdict.MIN_FORWARDS", 1)
    shown, copied = [], []

    def watched(target, inputs, streamer=None, **arguments):
        shown.append(capsys.readouterr().out)
        copied.append(arguments.get("prompt_lookup_num_tokens"))
        output = generate_timed(target, inputs, streamer=streamer, **arguments)
        shown.append(capsys.readouterr().out)
        assert bool(shown[-1].strip()) == (streamer is not None)
        if drafter := arguments.get("assistant_model"):
            drafter.stats.pauses, drafter.stats.num_paused = [Pause(1.25, 2.5, 3)], 14
        return output

    monkeypatch.setattr(answers, "generate_timed", watched)
    assert compare(tiny_pair_folder, *FLAGS, "--lookup-tokens", "4", "def f(x):") == 0
    assert "def f(x):" in shown[0]
    assert "|" in shown[3]
    assert "\x1b[" not in "".join(shown)
    assert copied == [None, 4] * 2
    last = capsys.readouterr().out
    assert "outputs: identical, token for token" in last
    assert (
        "drafting paused for 14 tokens: a round took as long as 2.50 plain decode steps and emitted 1.25 tokens\n"
        in last
    )
    assert re.search(r" plain: \d+\.\d\d x with the drafter, in this one text", last.splitlines()[-1])
    monkeypatch.setattr("hf_domino._common.verdict.MIN_FORWARDS", 99)
    assert compare(tiny_pair_folder, *FLAGS) == 0
    assert re.search(r"\d+ forwards with the drafter are too few to time", capsys.readouterr().out)
    monkeypatch.setattr(answers.Comparison, "equal", property(lambda self: False))
    assert compare(tiny_pair_folder, *FLAGS) == FAILED_CHECK
    assert "outputs: DIFFERENT (" in capsys.readouterr().out
    assert compare(tiny_pair_folder, *FLAGS, "--dtype", "bf16") == 0
    assert "outputs: DIFFERENT, which rounding explains" in capsys.readouterr().out


def test_comparison_is_repeatable_and_rounds_cover_the_text(tiny_pair_folder):
    pair, arguments = load_pair(tiny_pair_folder), {"max_new_tokens": 24, "do_sample": False}
    first, second = (answers.compare(pair, {"text": "def f(x):"}, arguments, 0, Console(quiet=True)) for _ in range(2))
    assert first.equal
    assert torch.equal(first.assisted, second.assisted)
    assert first.acceptance_lengths == second.acceptance_lengths
    assert len(first.assisted) == 1 + sum(first.acceptance_lengths)


@pytest.mark.parametrize("colour", [True, False])
def test_rounds_are_told_apart_by_colours_or_by_bars(tiny_pair_folder, colour, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = {"force_terminal": True, "color_system": "truecolor"} if colour else {}
    console, tokenizer = Console(file=io.StringIO(), width=200, **terminal), load_pair(tiny_pair_folder).tokenizer
    printer = RoundPrinter(tokenizer, console, shows_rounds=True)
    printer.stats = DecodingStats(3, rows=[[2, 3]])
    printer.put(torch.tensor([[5, 6]]))  # the prompt
    printer.put(torch.tensor(tokenizer.convert_tokens_to_ids(list("abcdefg"))))  # the last one of a round to come
    shown = console.file.getvalue()
    assert printer.text == "abcdefg"
    if colour:
        styles, letters = zip(*re.findall(r"\x1b\[([\d;]+)m(\w)", shown), strict=True)
        assert "".join(letters) == "abcdefg"
        assert len({styles[place] for place in (0, 1, 3)}) == 3  # the prefill's, and two rounds'
        assert [style.startswith("4;") for style in styles] == [letter in "cf" for letter in letters]
    else:
        assert shown == "abc|def|g"


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
    said = zip(("user", "assistant", "user"), ("def", "f", "x"), strict=True)
    turns = [{"role": role, "content": content} for role, content in said]
    write_lines(folder / "prompts.jsonl", [{"kind": "code", "messages": turns}])
    assert compare(folder, *FLAGS) == 0
    assert "user: def\nassistant: f\nuser: x\n" in capsys.readouterr().out
    assert compare(folder, *FLAGS, "return") == 0
    shown, pair = capsys.readouterr().out, load_pair(folder)
    assert "user: return" in shown
    ids = pair.tokenizer("<user>return<assistant>", return_tensors="pt")["input_ids"]
    answer = pair.target.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
    assert pair.tokenizer.decode(answer, skip_special_tokens=True).strip() in shown


def test_the_dtype_is_said(tiny_pair_folder, capsys, monkeypatch):
    monkeypatch.setattr("hf_domino._common.verdict.MIN_FORWARDS", 1)
    assert compare(tiny_pair_folder, *FLAGS, "--dtype", "bfloat16") == 0
    said = capsys.readouterr()
    assert "24 tokens, bf16, threads: 1" in said.out
    last = said.out.splitlines()[-1]
    assert ("try --dtype float32, and one text decides little: hf-domino bench" in last) == (
        not last.startswith("Faster")
    )
    assert f"loading {tiny_pair_folder} in bfloat16 on " in said.err
    assert not are_progress_bars_disabled()  # of what is downloaded


def test_a_busy_machine_is_said(tiny_pair_folder, capsys, monkeypatch):
    monkeypatch.setattr("os.getloadavg", lambda: (4.0 * os.cpu_count(), 0, 0))
    monkeypatch.setattr("hf_domino._common.verdict.MIN_FORWARDS", 1)
    generated = []

    def paused(target, inputs, **arguments):
        output = generate_timed(target, inputs, **arguments)
        if drafter := arguments.get("assistant_model"):
            drafter.stats.pauses, drafter.stats.num_paused = [Pause(1.25, 18.5, 3)], 46
        generated.append(output)
        return output

    monkeypatch.setattr(answers, "generate_timed", paused)
    assert compare(tiny_pair_folder, "--max-new-tokens", "60", "--threads", "1", "--drafter", "recycling") == 0
    said = capsys.readouterr()
    assert "--threads 1 can be" not in said.err  # they are one already
    assert re.search(r"measuring both again, about \d+ s", said.err)
    *_, pause, last = said.out.splitlines()
    busy = "other programs kept the machine busy (load 4.0 per core), so measure again when it is idle"
    assert pause == f"drafting paused for 46 tokens: {busy}"
    assert last.endswith(f" x with the drafter, in this one text; {busy}.")


def test_no_run_knows_the_text_from_an_earlier_run(tiny_pair_folder, monkeypatch):
    known = []

    def watched(target, inputs, **arguments):
        if drafter := arguments.get("assistant_model"):
            known.append(drafter.scores.isfinite().any().item())
        return generate_timed(target, inputs, **arguments)

    monkeypatch.setattr(answers, "generate_timed", watched)
    assert compare(tiny_pair_folder, *FLAGS, "--threads", "1", "--drafter", "recycling") == 0
    assert known == [False, False]


@pytest.mark.gpu
def test_it_on_a_gpu(tiny_pair_folder, capsys):
    assert compare(tiny_pair_folder, *FLAGS, "--device", "cuda") == 0
    assert "24 tokens, fp32, cuda:0" in capsys.readouterr().out
