from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hf_domino.cli import main as cli
from hf_domino.evaluation.benchmark.rows import read_rows
from hf_domino.pair import BUNDLED
from hf_domino.planner import make_plan
from hf_domino.planner.measured import read_measured

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "model_cards" / f"{BUNDLED}-domino" / "results.jsonl"
BETWEEN_RUNS = 0.2  # the phases of a round are timed in another run than whole calls

NUMBERS = "--alpha 0.8 --t-draft 1.6 --t-rollout 2.3 --t-verify 12.9 --t-plain 10 --num-draft-tokens 8"
ROUNDS = [(4, [0.75, 0.5]), (12, [0.5, 0.25])]  # number, acceptance rates


def bench_rows(**changes):
    """Two prompts, plain at 10 ms a token, rounds of 2 proposals with 2 + 1 + 13 + 1 ms."""
    shared = {"mode": "greedy", "new_tokens": 30, "seconds": 0.33}
    plain = shared | {"method": "plain", "num_rounds": 0, "tpot_seconds": 0.01}
    rows = [plain, plain]
    for count, rates in ROUNDS:
        drafted = {
            "method": "domino",
            "num_rounds": count,
            "tpot_seconds": 0.005,
            "acceptance_length": 1 + sum(rates),
            "acceptance_rate_at": rates,
            "ms_per_round": {"draft": 2, "rollout": 1, "target_forward": 13, "rest": 1},
        }
        rows.append(shared | drafted | changes)
    return rows


@pytest.fixture
def rows_file(tmp_path):
    def write(rows):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


def plan(arguments, capsys):
    assert cli.main(["plan", *arguments.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(arguments, capsys):
    assert cli.main(["plan", *arguments.split()]) == cli.USER_ERROR
    return capsys.readouterr().err


def test_table_and_sentences(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert cli.main(["plan", *NUMBERS.split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    best = next(line for line in lines if "best:" in line)
    assert [cell.strip() for cell in best.strip("│ ").split("│")] == [
        "best: 5",
        "3.69",
        "26.00",
        "141.9",
        "1.42 x",
        "0.64",
    ]
    assert sum("│" in line for line in lines) == 9
    assert lines[-3:] == [
        "Best: 5 proposals per round, 1.42 x plain decoding.",
        "Break-even: with 5 proposals it pays from acceptance probability 0.64 on; here it is 0.80.",
        "Network: none; with drafter and target in separate pools it pays for round trips of up to 11.2 ms.",
    ]


def test_command_of_the_documentation(capsys):
    command = re.search(r"^hf-domino plan (.*)$", (ROOT / "docs/speed.md").read_text(), re.MULTILINE)[1]
    assert "Network: it leaves" in plan(command, capsys)["conclusions"][2]


def test_json_has_seconds(capsys):
    found = plan(NUMBERS, capsys)
    assert found["costs"]["verify"] == pytest.approx(0.0129)
    assert found["best_length"] == 5
    assert found["rounds"][5]["seconds"] == pytest.approx(0.026)
    assert found["rounds"][0]["break_even"] is None
    assert len(found["conclusions"]) == 3


@pytest.mark.parametrize(
    "acceptance",
    ["--alpha 0.5", "--alpha 0.5 0.5 0.5", "--acceptance-rate-at 0.5 0.25 0.125", "--acceptance-length 1.875"],
)
def test_acceptance_in_four_ways(acceptance, capsys):
    found = plan(f"{acceptance} --num-draft-tokens 3 --t-draft 1 --t-verify 12 --t-plain 10", capsys)
    assert [entry["tokens"] for entry in found["rounds"]] == pytest.approx([1, 1.5, 1.75, 1.875])


def test_verification_at_two_widths(capsys):
    found = plan("--alpha 0.5 --num-draft-tokens 4 --t-draft 0 --t-verify 10 14 --t-plain 10", capsys)
    assert [entry["seconds"] for entry in found["rounds"]] == pytest.approx([0.010, 0.011, 0.012, 0.013, 0.014])


def test_network_with_payload(capsys):
    """Per round 5 ms; at 1 Gbit/s a token's features take 1 ms, a proposal 2 ms."""
    payload = "--network 5 --bandwidth 1 --feature-bytes 125000 --proposal-bytes 250000"
    found = plan(f"--alpha 0.5 --num-draft-tokens 2 --t-draft 1 --t-verify 12 --t-plain 10 {payload}", capsys)
    seconds = 0.001 + 0.012 + 0.005 + 2 * 0.002 + 1.75 * 0.001
    assert found["rounds"][2]["seconds"] == pytest.approx(seconds)


def test_rows_of_a_run():
    measured = read_measured(bench_rows(), "domino", "greedy")
    assert measured.survival == pytest.approx([(4 * 0.75 + 12 * 0.5) / 16, (4 * 0.5 + 12 * 0.25) / 16])
    assert measured.costs.plain == measured.costs.verify == pytest.approx(0.010)
    assert measured.costs.by_length(measured.survival)[2] == pytest.approx(0.002 + 0.001 + 0.014)
    assert measured.costs.rollout == pytest.approx(0.0005)
    assert measured.speed_up == pytest.approx(2)


def test_verification_cheaper_than_a_plain_token_is_flat():
    measured = read_measured(bench_rows(ms_per_round={"draft": 2, "rollout": 1, "verify": 5}), "domino", "greedy")
    assert (measured.costs.verify, measured.costs.verify_slope) == (pytest.approx(0.005), pytest.approx(0))


def test_prompts_without_a_round_do_not_count():
    idle = bench_rows(num_rounds=0, acceptance_rate_at=[], ms_per_round=None, acceptance_length=None)[-1]
    rows = bench_rows()
    assert read_measured([*rows, idle], "domino", "greedy").survival == read_measured(rows, "domino", "greedy").survival


def test_texts_of_one_token_do_not_count():
    rows, short = bench_rows(), {"method": "plain", "mode": "greedy", "new_tokens": 1, "tpot_seconds": None}
    assert read_measured([*rows, short], "domino", "greedy") == read_measured(rows, "domino", "greedy")


def test_plan_from_rows(rows_file, capsys):
    found = plan(f"--rows {rows_file(bench_rows())}", capsys)
    assert len(found["rounds"]) == 3
    assert found["measured_speed_up"] == pytest.approx(2)
    assert found["conclusions"][-1] == "Measured: 2.00 x with 2 proposals, prefill aside."


@pytest.mark.skipif(not PUBLISHED.exists(), reason="no rows are published in this checkout")
@pytest.mark.parametrize("mode", ["greedy", "sample"])
def test_plan_of_the_published_rows_is_what_they_measured(mode):
    rows = read_rows(PUBLISHED)
    if "ms_per_round" not in rows[-1]:
        pytest.skip("the published rows are older than the times of a round")
    measured = read_measured(rows, "domino", mode)
    planned = make_plan(measured.survival, measured.costs).rounds[-1].speed_up
    assert planned == pytest.approx(measured.speed_up, rel=BETWEEN_RUNS)


def test_numbers_win_over_rows(rows_file, capsys):
    found = plan(f"--rows {rows_file(bench_rows())} --t-draft 7 --alpha 1 --num-draft-tokens 1 --network 3", capsys)
    assert (found["costs"]["draft"], found["costs"]["round_trip"]) == (0.007, 0.003)
    assert [entry["tokens"] for entry in found["rounds"]] == [1, 2]


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"acceptance_rate_at": None}, ["acceptance_rate_at (share"]),
        ({"ms_per_round": None}, ["ms_per_round (milliseconds of draft"]),
        ({"ms_per_round": None, "acceptance_rate_at": None}, ["acceptance_rate_at (", "ms_per_round ("]),
        ({"tpot_seconds": 0}, ["tpot_seconds (seconds per token after the first; domino)"]),
    ],
)
def test_rows_that_lack_fields_say_which_and_what_to_do(changes, missing, rows_file, capsys):
    message = refusal(f"--rows {rows_file(bench_rows(**changes))}", capsys)
    assert all(text in message for text in missing)
    assert "measure again with `hf-domino bench`" in message
    assert "--t-plain 11 --acceptance-length 1.88" in message


def test_rows_without_a_phase(rows_file, capsys):
    message = refusal(f"--rows {rows_file(bench_rows(ms_per_round={'draft': 2.0}))}", capsys)
    assert "ms_per_round must have draft and rollout, got draft" in message


def test_rows_without_rounds(rows_file, capsys):
    assert "method 'plain' has no rounds" in refusal(f"--rows {rows_file(bench_rows())} --method plain", capsys)


def test_rows_of_several_lengths(rows_file, capsys):
    rows = [*bench_rows(), *bench_rows(acceptance_rate_at=[0.5])]
    assert "must have one length in all rows, got [1, 2]" in refusal(f"--rows {rows_file(rows)}", capsys)


REFUSED = [
    (f"{NUMBERS} --alpha 1.2", r"alpha must be in [0, 1], got 1.2"),
    (f"{NUMBERS} --acceptance-rate-at 0.5", "acceptance must be given once, got --alpha and --acceptance-rate-at"),
    ("--t-plain 1", "acceptance must be given once, got none"),
    ("--acceptance-rate-at 0.5 0.6 --t-draft 1 --t-verify 1 --t-plain 1", "must not rise with the position, got 0.6"),
    ("--acceptance-length 18 --t-draft 1 --t-verify 1 --t-plain 1", "--acceptance-length must be in [1, 17]"),
    ("--acceptance-length 0.5 --t-draft 1 --t-verify 1 --t-plain 1", "--acceptance-length must be in [1, 17]"),
    ("--alpha 0.5", "--t-plain, --t-verify, --t-draft or --t-rollout must be given in ms"),
    ("--alpha 0.5 --t-plain 10 --t-verify 12", "--t-draft or --t-rollout must be given in ms"),
    (f"{NUMBERS} --t-plain 0", "--t-plain must be a finite number, above 0, got 0.0"),
    (f"{NUMBERS} --t-draft -1", "--t-draft must be a finite number, 0 or more, got -1.0"),
    (f"{NUMBERS} --network nan", "--network must be a finite number, 0 or more, got nan"),
    (f"{NUMBERS} --t-verify 12 10", "--t-verify must be one number, or two that do not fall (1 position, 9 positions)"),
    (f"{NUMBERS} --t-verify 1 2 3", "--t-verify must be one number, or two"),
    (f"{NUMBERS} --num-draft-tokens 0", "--num-draft-tokens must be in [1, 128], got 0"),
    (
        f"{NUMBERS} --alpha 0.5 0.5",
        "--num-draft-tokens must be in [1, 2], the positions whose acceptance is known, got 8",
    ),
    (f"{NUMBERS} --bandwidth 10", "must be given with --feature-bytes or --proposal-bytes, got --bandwidth alone"),
    (f"{NUMBERS} --feature-bytes 10", "--bandwidth must be given with"),
    ("--rows none.jsonl", "rows must be a JSONL file, got 'none.jsonl'"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_wrong_input_is_named(arguments, message, capsys):
    assert message in refusal(arguments, capsys)


@pytest.mark.parametrize("choice", ["--method dflash", "--mode sample"])
def test_rows_of_other_methods_and_modes(choice, rows_file, capsys):
    skipped = {"method": "native_dflash", "skipped": "there is no DFlash twin"}
    message = refusal(f"--rows {rows_file([skipped, *bench_rows()])} {choice}", capsys)
    assert "got domino (greedy), plain (greedy)" in message


@pytest.mark.parametrize("method", ["domino_adaptive", "domino_lookup"])
def test_rounds_of_different_lengths_are_refused(method, rows_file, capsys):
    rows = [row | {"method": method} if row["method"] == "domino" else row for row in bench_rows()]
    message = refusal(f"--rows {rows_file(rows)} --method {method}", capsys)
    assert "plan from --method domino." in message
