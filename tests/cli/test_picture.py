from __future__ import annotations

import io

import pytest
from rich.console import Console

from hf_domino.cli.picture import Origin, origins, picture, shows_colour


def test_origins_of_whole_rounds():
    assert origins(6, [2, 3]) == [
        Origin(None, False),
        Origin(0, False),
        Origin(0, True),
        Origin(1, False),
        Origin(1, False),
        Origin(1, True),
    ]


def test_a_round_that_is_still_written_has_no_end():
    assert origins(5, [2, 3])[-1] == Origin(1, False)


def test_more_tokens_than_rounds_is_an_error():
    with pytest.raises(ValueError, match="at most 6"):
        origins(7, [2, 3])


def test_plain_picture_marks_the_ends_of_rounds():
    assert picture(list("abcdef"), origins(6, [2, 3]), colour=False).plain == "abc|def|"


def test_coloured_picture_alternates_and_underlines():
    drawn = picture(list("abcdef"), origins(6, [2, 3]), colour=True)
    assert drawn.plain == "abcdef"
    styles = [str(span.style) for span in drawn.spans]
    assert styles[1] != styles[3]
    assert [("underline" in style) for style in styles] == [False, False, True, False, False, True]


def test_colour_needs_a_terminal(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert not shows_colour(Console(file=io.StringIO()))
    terminal = {"file": io.StringIO(), "force_terminal": True, "color_system": "truecolor"}
    assert shows_colour(Console(**terminal))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not shows_colour(Console(**terminal))
