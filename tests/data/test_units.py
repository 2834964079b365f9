"""Units of work: each done once, whoever does it, and whole or not at all."""

from __future__ import annotations

import pytest

from hf_domino.data.units import Workplace


class Worker:
    def __init__(self, stop_at=None):
        self.did, self.stop_at = [], stop_at

    def __call__(self, unit):
        if unit == self.stop_at:
            raise KeyboardInterrupt
        self.did.append(unit)
        return [{"unit": unit}], 10


EXPECTED = [[{"unit": unit}] for unit in range(5)]


def test_a_process_does_its_share_first_and_then_what_others_left(tmp_path):
    place, worker = Workplace(tmp_path, (1, 2), progress=False), Worker()
    assert place.do("text", 5, worker) == EXPECTED
    assert worker.did == [1, 3, 4, 2, 0]
    assert place.work_done()[0] == 50


def test_what_is_there_is_not_done_again_with_another_number_of_processes(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        Workplace(tmp_path, (0, 2), progress=False).do("text", 5, Worker(stop_at=4))
    rest = Worker()
    assert Workplace(tmp_path, (2, 3), progress=False).do("text", 5, rest) == EXPECTED
    assert rest.did == [4, 3, 1]
    idle = Worker()
    assert Workplace(tmp_path, progress=False).do("text", 5, idle) == EXPECTED
    assert idle.did == []


def test_stages_do_not_meet(tmp_path):
    place = Workplace(tmp_path, progress=False)
    place.do("prompts", 2, Worker())
    worker = Worker()
    place.do("answers", 1, worker)
    assert worker.did == [0]


def test_a_unit_cut_while_it_is_written_is_none(tmp_path, monkeypatch):
    def cut(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", cut)
        with pytest.raises(KeyboardInterrupt):
            Workplace(tmp_path, progress=False).do("text", 1, Worker())
    worker = Worker()
    Workplace(tmp_path, progress=False).do("text", 1, worker)
    assert worker.did == [0]
