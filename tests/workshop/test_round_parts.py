"""The parts of a round: counts that do not depend on the machine, and bounds that a correction step must keep."""

from __future__ import annotations

import pytest

# Operations that a chain dispatches for one position more: the GRU's step, the correction and the choice.
MOST_A_POSITION = {"greedy": 20, "sampled": 22}
# What a reader of a steady greedy round goes through: the package's functions, and the files that they are in.
MOST_FUNCTIONS, MOST_FILES = 157, 32


@pytest.fixture
def parts(benchmark_module):
    """The module of the command."""
    return benchmark_module("round_parts")


@pytest.mark.parametrize("sampling", sorted(MOST_A_POSITION))
def test_a_position_of_a_chain_dispatches_few_operations(parts, sampling):
    corrections = []
    for block_size in (5, 9):
        phases, functions = parts.count(parts.parsed(["--block-size", str(block_size), "--num-tokens", "12"]), sampling)
        corrections.append(phases["correction"])
        assert ("decoding/loop.py", "Generation.run_round") in functions
    if sampling == "greedy":
        assert len(functions) <= MOST_FUNCTIONS
        assert len({file for file, _ in functions}) <= MOST_FILES
    assert (corrections[1] - corrections[0]) / 4 <= MOST_A_POSITION[sampling]


def test_the_table_names_all_phases(parts, capsys):
    assert parts.main(["--method", "recycling", "--tree-size", "8", "--functions", "--num-tokens", "12"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[2:] == [*parts.PHASES, "all", "functions", "files", "calls"]
    assert sum("Branches.advance" in line for line in lines) == 1
