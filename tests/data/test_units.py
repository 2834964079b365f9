"""Units of work: each done once, whoever does it, and whole or not at all."""

from __future__ import annotations

import pytest

from hf_domino.data.units import run_units

pytestmark = pytest.mark.transformers

EXPECTED = [{"unit": unit} for unit in range(5)]


@pytest.fixture
def do(tmp_path):
    """A function that does five units as one process of several, and returns their rows and those it did itself."""

    def run(shard=(0, 1), stop_at=None, name="text", count=5):
        did = []

        def make(unit):
            if unit == stop_at:
                raise KeyboardInterrupt
            did.append(unit)
            return [{"unit": unit}]

        return run_units(tmp_path, shard, False, name, count, make), did

    return run


def test_a_process_does_its_share_first_and_then_what_others_left(do):
    assert do((1, 2)) == (EXPECTED, [1, 3, 4, 2, 0])
    assert do(name="answers", count=1)[1] == [0]


def test_what_is_there_is_not_done_again_with_another_number_of_processes(do):
    with pytest.raises(KeyboardInterrupt):
        do((0, 2), stop_at=4)
    assert do((2, 3)) == (EXPECTED, [4, 3, 1])
    assert do() == (EXPECTED, [])


def test_a_unit_cut_while_it_is_written_is_none(do, monkeypatch):
    def cut(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", cut)
        with pytest.raises(KeyboardInterrupt):
            do(count=1)
    assert do(count=1)[1] == [0]
