"""Every method that the package registers has a row in the table of methods."""

from __future__ import annotations

from method_table import EVERY, METHODS, RECYCLING

from hf_domino import DominoConfig
from hf_domino.configuration.registry import METHODS as REGISTERED


def test_the_table_has_every_method():
    assert {*METHODS, RECYCLING} == {name for name in REGISTERED if name != "toy"}


def test_a_row_makes_the_method_of_its_name():
    for name, fields in EVERY.items():
        assert DominoConfig(**fields).projector_type == name.split(",")[0].split(" ")[0]
