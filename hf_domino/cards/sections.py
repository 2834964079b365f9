"""Our sections of a card stand between markers. Only they are compared and replaced; all else is the user's.

```md
<!-- hf_domino:begin results -->
...
<!-- hf_domino:end results -->
```
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import CardData, ModelCard
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from hf_domino._common.refusal import refusal

CARD = "README.md"
MARKER = re.compile(r"<!-- hf_domino:(begin|end) ([\w-]+) -->")
OURS = ("library_name",)  # another one would have the Hub show a snippet that loads a drafter as a model
REMEDY = "Write it again: hf-domino card FOLDER."
SHOWN = 60  # characters of a line in an error


class UnfitCard(ValueError):
    """A card says what its rows do not."""


def read_text(path: Path) -> str:
    """A card, or another text; empty where there is none.

    Raises:
        ValueError: If it is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig") if path.is_file() else ""  # editors of Windows leave a mark
    except UnicodeDecodeError as error:
        raise refusal(str(path), "a text in UTF-8", str(error), "Save it as UTF-8.") from error


def mark(name: str, text: str) -> str:
    """A section of a card with its markers."""
    return f"<!-- hf_domino:begin {name} -->\n{text.strip()}\n<!-- hf_domino:end {name} -->"


def read_sections(text: str) -> dict[str, str]:
    r"""Our sections of a card, by name, in its order.

    Raises:
        ValueError: If a marker has no partner, or a section is there twice.

    Example:
    ```python
    >>> from hf_domino.cards import read_sections
    >>> read_sections("# mine\n<!-- hf_domino:begin limits -->\nFew.\n<!-- hf_domino:end limits -->")
    {'limits': 'Few.'}

    ```
    """
    return {name: text[start:end].strip() for name, (start, end) in _places(text).items()}


def _places(text: str) -> dict[str, tuple[int, int]]:
    """Where the text between the markers of each section begins and ends."""
    places: dict[str, tuple[int, int]] = {}
    markers = list(MARKER.finditer(text))
    for begin, end in zip_longest(markers[::2], markers[1::2]):
        pair = [found and found.groups() for found in (begin, end)]
        if pair != [("begin", begin[2]), ("end", begin[2])] or begin[2] in places:
            expected = "followed by the end of its section, once each"
            raise refusal("the card's marker", expected, begin[0], "Mend the markers, or delete the card's sections.")
        places[begin[2]] = begin.end(), end.start()
    return places


def drop_section(text: str, name: str) -> str:
    """A card without one of our sections."""
    if name not in (places := _places(text)):
        return text
    start, end = places[name]
    before, after = text[:start].rpartition("<!--")[0], text[end:].partition("-->")[2]
    return before.rstrip() + "\n\n" + after.lstrip()


def merge_card(existing: str, new: str, wins: Collection[str] = ()) -> str:
    """Put what is new into the card that is there.

    The user's text and metadata stay. Our sections are replaced, those that are not there yet are added; lists of
    metadata are united.

    Args:
        existing (`str`): The card that is there; may be empty.
        new (`str`): From [`render_card`].
        wins (`Collection[str]`, *optional*): Metadata whose new value takes the place of another one.

    Raises:
        ValueError: If metadata or markers of the existing card cannot be read.
    """
    existing = existing.replace("\r\n", "\n")
    if not existing.strip():
        return new
    card, fresh = read_card(existing), read_card(new)
    _unite(card.data, fresh.data, {*OURS, *wins})
    card.text = _replace_sections(card.text, fresh.text) if card.text.strip() else fresh.text
    return str(card)


def read_card(text: str) -> ModelCard:
    """A card as `huggingface_hub` reads it; one without metadata has none.

    Raises:
        ValueError: If its metadata cannot be read.
    """
    try:
        return ModelCard(text if REGEX_YAML_BLOCK.search(text) else f"---\n{{}}\n---\n{text}")
    except (yaml.YAMLError, ValueError) as error:
        expected, reason = "YAML between two lines of ---", " ".join(str(error).split())
        raise refusal("the card's metadata", expected, reason, "Mend it in README.md.") from error


def _unite(data: CardData, new: CardData, wins: Collection[str]) -> None:
    for key, value in new.to_dict().items():
        old = data.get(key)
        if key != "base_model" and list in (type(old), type(value)) and old:  # two bases would be a merge
            data[key] = list(dict.fromkeys([*_as_list(old), *_as_list(value)]))
        elif not old or key in wins:
            data[key] = value


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _replace_sections(text: str, new: str) -> str:
    last = None
    for name, content in read_sections(new).items():
        places = _places(text)
        if name in places:
            start, end = places[name]
            text = f"{text[:start]}\n{content}\n{text[end:]}"
        elif last is None:
            text = f"{text.rstrip()}\n\n{mark(name, content)}\n"
        else:
            end = text.index("-->", places[last][1]) + len("-->")
            text = f"{text[:end]}\n\n{mark(name, content)}{text[end:]}"
        last = name
    return text


def check_card(text: str, sections: Mapping[str, str], where: str = "the card", remedy: str = REMEDY) -> None:
    """Refuse a card that does not say what was computed.

    Raises:
        UnfitCard: Naming the first section and the first word or number in it that differs.
    """
    found = read_sections(text.replace("\r\n", "\n"))
    for name, expected in sections.items():
        if name not in found:
            raise UnfitCard(f"{where} must have a section {name!r}, got none. {remedy}")
        for line, wanted in zip_longest(found[name].splitlines(), expected.strip().splitlines(), fillvalue=""):
            for value, right in zip_longest(line.split(), wanted.split(), fillvalue=""):
                if value != right:
                    place = f"section {name!r} of {where}, in «{(wanted or line)[:SHOWN]}»,"
                    raise UnfitCard(str(refusal(place, repr(right), value, remedy)))
