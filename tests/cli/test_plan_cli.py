from __future__ import annotations

import re
from pathlib import Path

import measured
import pytest
from chats import write_lines

from hf_domino.cli import main as cli
from hf_domino.pair import BUNDLED

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "model_cards" / f"{BUNDLED}-domino" / "results.jsonl"
BETWEEN_RUNS = 0.2  # the phases of a round are timed in another run than whole calls

NUMBERS = "--alpha 0.8 --t-draft 1.6 --t-rollout 2.3 --t-verify 12.9 --t-plain 10 --num-draft-tokens 8"
PHASES = {"draft": 2, "rollout": 1, "target_forward": 13, "rest": 1}
PLAIN = measured.row("plain", 0, [100]) | {"tpot_seconds": 0.01}


def bench_rows(**changes):
    """Two prompts, plain at 10 ms a token, rounds of 2 proposals with 2 + 1 + 13 + 1 ms."""
    domino = PLAIN | {"method": "domino", "tpot_seconds": 0.005, "ms_per_round": PHASES}
    rounds = (4, [0.75, 0.5]), (12, [0.5, 0.25])
    drafted = [
        domino | {"num_rounds": count, "num_drafted": count, "acceptance_rate_at": rates} | changes
        for count, rates in rounds
    ]
    return [PLAIN, PLAIN, *drafted]


@pytest.fixture
def rows_file(tmp_path):
    return lambda rows: write_lines(tmp_path / "rows.jsonl", rows)


def plan(arguments, capsys):
    """The numbers of the table, a list a line of it, and the sentences below it."""
    assert cli.main(["plan", *arguments.split()]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    count = next(index for index, line in enumerate(lines) if line.startswith("Best: "))
    table = [[float(word) for word in re.findall(r"(?<!\S)[\d.]+", line)] for line in lines[:count]]
    return table, lines[count:]


def refusal(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:  # as argparse does
        raise SystemExit(cli.main(["plan", *arguments.split()]))
    assert exit_.value.code == cli.USER_ERROR
    return capsys.readouterr().err


def test_table_and_sentences(capsys):
    assert cli.main(["plan", *NUMBERS.split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    best = next(line for line in lines if "best:" in line)
    assert re.split(r"  +", best.strip()) == ["best: 5", "3.69", "26.00", "141.9", "1.42 x", "0.64"]
    assert len({len(line) for line in lines[:10]}) == 1
    assert lines[-2] == "Best: 5 proposals per round, 1.42 x plain decoding."


def test_command_of_the_documentation(capsys):
    command = re.search(r"^hf-domino plan (.*)$", (ROOT / "docs/speed.md").read_text(), re.MULTILINE)[1]
    assert "proposals it pays from acceptance probability 0." in plan(command, capsys)[1][1]


@pytest.mark.parametrize(
    ("flags", "ms"),
    [
        ("--alpha 0.5 --t-verify 12", [10, 13, 13, 13]),
        ("--alpha 0.5 0.5 0.5 --t-verify 9 12", [10, 11, 12, 13]),
        ("--alpha 0.5 --t-verify 12 --t-rollout 1", [10, 14, 15, 16]),
    ],
)
def test_acceptance_and_times_in_ms(flags, ms, capsys):
    table, _ = plan(f"{flags} --num-draft-tokens 3 --t-draft 1 --t-plain 10", capsys)
    assert [line[1:3] for line in table] == [list(pair) for pair in zip([1, 1.5, 1.75, 1.88], ms, strict=True)]


def test_plan_from_rows(rows_file, capsys):
    idle = bench_rows(num_rounds=0, acceptance_rate_at=[], ms_per_round=None)[-1]
    short = PLAIN | {"new_tokens": 1, "tpot_seconds": None}
    table, said = plan(f"--rows {rows_file([*bench_rows(), idle, short])}", capsys)
    one, both = 1 + (4 * 0.75 + 12 * 0.5) / 16, (4 * 0.5 + 12 * 0.25) / 16
    assert [line[1] for line in table[1:]] == pytest.approx([one, one + both], abs=0.01)
    assert [line[2] for line in table] == [10, 14.5, 17]  # 2 ms a further position, half a ms of rollout
    assert said[-1] == "Measured: 2.00 x with 2 proposals, prefill aside."
    cheap = bench_rows(ms_per_round={"draft": 2, "rollout": 1, "verify": 5})
    table, _ = plan(f"--rows {rows_file(cheap)}", capsys)
    assert [line[2] for line in table] == [10, 7.5, 8]  # one that is cheaper than a plain token is flat
    flags = "--t-draft 7 --alpha 1 --num-draft-tokens 1"
    table, _ = plan(f"--rows {rows_file(cheap)} {flags}", capsys)  # numbers win
    assert [line[1:3] for line in table] == [[1, 10], [2, 12.5]]


@pytest.mark.skipif(not PUBLISHED.exists(), reason="no rows are published in this checkout")
@pytest.mark.parametrize("mode", ["greedy", "sample"])
def test_plan_of_the_published_rows_is_what_they_measured(mode, capsys):
    table, said = plan(f"--rows {PUBLISHED} --mode {mode}", capsys)
    measured = float(re.match(r"Measured: ([\d.]+) x", said[-1])[1])
    assert table[-1][4] == pytest.approx(measured, rel=BETWEEN_RUNS)


@pytest.mark.parametrize(
    ("rows", "choice"),
    [
        (bench_rows(ms_per_round=None), ""),
        (bench_rows(ms_per_round={"verify": 2.0}), ""),
        ([*bench_rows(), *bench_rows(acceptance_rate_at=[0.5])], ""),
        (bench_rows(), "--method plain"),
        (bench_rows(), "--mode sample"),
        (bench_rows(method="domino_adaptive"), "--method domino_adaptive"),
        ([{"method": "dflash", "skipped": "there is no DFlash twin"}, *bench_rows()], "--method dflash"),
    ],
)
def test_rows_that_give_no_plan_are_refused(rows, choice, rows_file, capsys):
    message = refusal(f"--rows {rows_file(rows)} {choice}", capsys)
    assert "--rows must have plain generation and rounds of one length" in message
    assert "(greedy), plain (greedy)" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (f"{NUMBERS} --alpha 1.2", "alpha must be in [0, 1], got 1.2"),
        ("--t-plain 1", "--rows must be given, got none"),
        ("--alpha 0.5 --t-plain 10 --t-verify 12", "--t-draft or --t-rollout must be given in ms"),
        (f"{NUMBERS} --t-plain 0", "plain must be a finite time"),
        (f"{NUMBERS} --t-draft nan", "draft must be a finite time, 0 or more"),
        (f"{NUMBERS} --t-verify 12 10", "--t-verify must be one number, or two that do not fall"),
        (f"{NUMBERS} --num-draft-tokens 0", "--num-draft-tokens: must be a number of at least 1"),
        (f"{NUMBERS} --alpha 0.5 0.5", "--num-draft-tokens must be in [1, 2], the positions whose acceptance is known"),
        ("--rows none.jsonl", "rows must be a JSONL file, got 'none.jsonl'"),
    ],
)
def test_wrong_input_is_named(arguments, message, capsys):
    assert message in refusal(arguments, capsys)
