"""Our sections of a card stand between markers. Only they are compared and replaced; all else is the user's.

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

from hf_domino._common.refusal import refusal

CARD = "README.md"
SECTION = re.compile(r"<!-- hf_domino:begin ([\w-]+) -->\n?(.*?)<!-- hf_domino:end \1 -->", re.DOTALL)
MARKER = re.compile(r"<!-- hf_domino:\w+ [\w-]+ -->")
MEASURED_BY = "hf-domino bench"  # the data set that results of ours name: they are replaced, others stay
OURS = ("library_name",)  # another one would have the Hub show a snippet that loads a drafter as a model


def read_text(path: Path) -> str:
    """Read a card, or another text; empty if there is none."""
    return path.read_text(encoding="utf-8-sig") if path.is_file() else ""  # editors of Windows leave a mark


def mark(name: str, text: str) -> str:
    """Put a section of a card between its markers."""
    return f"<!-- hf_domino:begin {name} -->\n{text.strip()}\n<!-- hf_domino:end {name} -->"


def read_sections(text: str) -> dict[str, str]:
    r"""Read our sections of a card, by name, in its order.

    Example:
    ```python
    >>> from hf_domino.cards.sections import read_sections
    >>> read_sections("# mine\n<!-- hf_domino:begin limits -->\nFew.\n<!-- hf_domino:end limits -->")
    {'limits': 'Few.'}

    ```
    """
    markers, sections = MARKER.findall(text), SECTION.findall(text)
    if len(markers) != 2 * len(sections) or len(sections) > len(dict(sections)):  # the user's text would be lost
        expected = "a begin and an end of each section, once each"
        raise refusal("the card's markers", expected, " ".join(markers), "Mend them, or delete the card's sections.")
    return {name: content.strip() for name, content in sections}


def read_card(text: str) -> ModelCard:
    """Read a card by `huggingface_hub`, which warns of one without metadata."""
    try:
        return ModelCard(text if text.lstrip().startswith("---") else f"---\n{{}}\n---\n{text}")
    except (yaml.YAMLError, ValueError) as error:
        expected, reason = "YAML between two lines of ---", " ".join(str(error).split())
        raise refusal("the card's metadata", expected, reason, "Mend it in README.md.") from error


def merge_card(existing: str, new: str, wins: Collection[str] = ()) -> str:
    """Merge a new card into the one that is there: the user's text and metadata stay, our sections are replaced."""
    # New sections are added, and lists of metadata united. `wins` names metadata whose new value replaces the old one.
    existing = existing.replace("\r\n", "\n")
    if not existing.strip():
        return new
    card, fresh = read_card(existing), read_card(new)
    old_data: Any = card.data
    new_data: Any = fresh.data
    if new_data.eval_results:
        known = [result for result in old_data.eval_results or () if result.dataset_type != MEASURED_BY]
        old_data.eval_results = [*known, *(result for result in new_data.eval_results if result not in known)]
        old_data.model_name = old_data.model_name or new_data.model_name
    for key, value in fresh.data.to_dict().items():
        if key == "model-index":
            continue
        old = card.data.get(key)
        if isinstance(value, list) and old:
            card.data[key] = list(dict.fromkeys([*(old if isinstance(old, list) else [old]), *value]))
        elif not old or key in (*OURS, *wins):
            card.data[key] = value
    card.text = _merge_sections(card.text, read_sections(fresh.text)) if card.text.strip() else fresh.text
    return str(card)


def _merge_sections(text: str, sections: dict[str, str]) -> str:
    known, after = read_sections(text), ""  # a new section stands behind the one before it, the first at the end
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
