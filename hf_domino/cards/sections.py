"""Read and merge cards: our sections stand between markers, and everything else belongs to the user.

```md
<!-- hf_domino:begin results -->
...
<!-- hf_domino:end results -->
```
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard

from hf_domino._common.errors import invalid_argument
from hf_domino.configuration.registry import METHODS

CARD = "README.md"
SECTION = re.compile(r"<!-- hf_domino:begin ([\w-]+) -->\n?(.*?)<!-- hf_domino:end \1 -->", re.DOTALL)
MARKER = re.compile(r"<!-- hf_domino:\w+ [\w-]+ -->")
RESULTS = "results"
MEASURED_BY = "hf-domino bench"  # our results give this as their data set; results with another data set stay
OF_AN_ADAPTER = ("peft", "lora")  # tags of its card
OURS = ("library_name",)  # with another library, the Hub would show a snippet that loads a drafter as a model


def read_text(path: Path) -> str:
    """Read a card or another text; it is empty if there is no file."""
    if not path.is_file():
        return ""
    return path.read_text(encoding="utf-8-sig")  # editors on Windows write a byte order mark


def mark(name: str, text: str) -> str:
    """Put a section of a card between its markers."""
    return f"<!-- hf_domino:begin {name} -->\n{text.strip()}\n<!-- hf_domino:end {name} -->"


def read_sections(text: str) -> dict[str, str]:
    r"""Read our sections of a card by name, in the order of the card.

    Example:
    ```python
    >>> from hf_domino.cards.sections import read_sections
    >>> read_sections("# mine\n<!-- hf_domino:begin limits -->\nFew.\n<!-- hf_domino:end limits -->")
    {'limits': 'Few.'}

    ```
    """
    markers = MARKER.findall(text)
    sections = SECTION.findall(text)
    if len(markers) != 2 * len(sections) or len(sections) > len(dict(sections)):  # the user's text would be lost
        expected = "a begin and an end of each section, once each"
        raise invalid_argument(
            "the card's markers", expected, " ".join(markers), "Correct them, or delete the card's sections."
        )
    return {name: content.strip() for name, content in sections}


def read_card(text: str) -> ModelCard:
    """Read a card, and give it empty metadata if it has none, because `huggingface_hub` would warn."""
    if not text.lstrip().startswith("---"):
        text = f"---\n{{}}\n---\n{text}"
    try:
        return ModelCard(text)
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
        remedy = "Correct it in README.md."
        raise invalid_argument("the card's metadata", "YAML between two lines of ---", reason, remedy) from error


def merge_card(existing: str, new: str, wins: Collection[str] = ()) -> str:
    """Merge a new card into an existing one: the user's text and metadata stay, and our sections are replaced.

    New sections are added, and lists in the metadata are merged. `wins` names metadata fields whose new value replaces
    the old one. What the existing card says of an earlier drafter goes, even if the new card has nothing in its place:
    our measured results, and tags that name a method.
    """
    existing = existing.replace("\r\n", "\n")
    if not existing.strip():
        return new
    card = read_card(existing)
    fresh = read_card(new)
    old_data: Any = card.data
    new_data: Any = fresh.data
    known = [result for result in old_data.eval_results or () if result.dataset_type != MEASURED_BY]
    measured = [*known, *(result for result in new_data.eval_results or () if result not in known)]
    if measured:
        old_data.model_name = old_data.model_name or new_data.model_name
    elif old_data.eval_results:
        old_data.model_name = None  # it has no place without results
    old_data.eval_results = measured or None
    for key, value in new_data.to_dict().items():
        if key == "model-index":
            continue
        old = old_data.get(key)
        if isinstance(value, list) and old:
            olds = old if isinstance(old, list) else [old]
            if key == "tags":
                olds = [tag for tag in olds if tag in value or tag not in (*METHODS, *OF_AN_ADAPTER)]
            old_data[key] = list(dict.fromkeys([*olds, *value]))
        elif not old or key in (*OURS, *wins):
            old_data[key] = value
    if card.text.strip():
        card.text = _merge_sections(card.text, read_sections(fresh.text))
    else:
        card.text = fresh.text
    return str(card)


def _merge_sections(text: str, sections: dict[str, str]) -> str:
    known = read_sections(text)
    if RESULTS in known and RESULTS not in sections:
        before = next(found[0] for found in SECTION.finditer(text) if found[1] == RESULTS)
        text = re.sub(rf"\n*{re.escape(before)}\n*", "\n\n", text)
    after = ""  # a new section goes after the section before it, or to the end if it is the first
    for name, content in sections.items():
        section = mark(name, content)
        if name in known:
            before = next(found[0] for found in SECTION.finditer(text) if found[1] == name)
            text = text.replace(before, section)
        elif after:
            text = text.replace(after, f"{after}\n\n{section}")
        else:
            text = f"{text.rstrip()}\n\n{section}\n"
        after = f"<!-- hf_domino:end {name} -->"
    return text
