"""The card of a drafter, rendered from its configuration by one template."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from hf_domino.cards.sections import mark
from hf_domino.configuration import DominoConfig
from hf_domino.formats.engines import ENGINES
from hf_domino.formats.exporting import refusals, stored_config

TEMPLATE = Path(__file__).with_name("drafter.md.jinja")
PAPERS = Path(__file__).with_name("papers")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# The Hub knows no library of this name, so it shows no snippet for it. No `pipeline_tag`, either: those that say
# text-generation are offered to pipelines and servers as models of their own.
LIBRARY = "hf_domino"


def render_card(
    config: DominoConfig,
    *,
    name: str,
    target: str | None,
    training: str | None = None,
    results: str | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> str:
    r"""The card of a drafter as Markdown.

    Args:
        config (`DominoConfig`): The drafter's configuration.
        name (`str`): Name on the Hub, or of the folder, that it is loaded by.
        target (`str`, *optional*): Folder or Hub name of its target; of a folder only the last part is told.
        training (`str`, *optional*): From [`training_section`].
        results (`str`, *optional*): From `hf_domino.publishing.folder_card.results_section`.
        metadata (`Mapping`, *optional*): More fields for the head of the card, such as `license` and `datasets`.

    Example:
    ```python
    >>> from hf_domino import DominoConfig
    >>> from hf_domino.cards import render_card
    >>> text = render_card(DominoConfig(), name="me/mine", target="Qwen/Qwen3-8B", metadata={"license": "mit"})
    >>> print(*text.splitlines()[1:4], sep="\n")
    base_model: Qwen/Qwen3-8B
    library_name: hf_domino
    license: mit

    ```
    """
    on_hub = is_hub_name(target)
    extra = dict(metadata or {})
    tags = ["speculative-decoding", "draft-model", config.projector_type, *(extra.pop("tags", None) or ())]
    known = {"base_model": target if on_hub else None, "library_name": LIBRARY} | extra
    sections = {"training": training, "results": results}
    card = ModelCard.from_template(
        ModelCardData(**known, tags=tags),
        template_path=str(TEMPLATE),
        config=config,
        title=name.rpartition("/")[2],
        name=name,
        target=target if on_hub or target is None else Path(target).name,
        on_hub=on_hub,
        engines=_engines(config),
        papers=[(PAPERS / f"{name}.bib").read_text(encoding="utf-8").strip() for name in config.kind.papers],
        sections={section: mark(section, text) for section, text in sections.items() if text},
    )
    return f"{card}\n"


def is_hub_name(name: str | None) -> bool:
    """Whether this can be the name of a model on the Hub, and is no folder here."""
    return name is not None and HUB_NAME.fullmatch(name) is not None and not Path(name).exists()


def _engines(config: DominoConfig) -> list[str]:
    """What each serving engine makes of an export of the drafter, a line each; none where the kind has no export."""
    if "export" in config.kind.lacks:
        return []
    try:
        found = refusals(stored_config(config))
    except ValueError as error:  # no format of theirs can hold it
        return [str(error)]
    lines = {
        name: "; ".join(f"{rule.field} must be {rule.expected}" for rule in rules) for name, rules in found.items()
    }
    taken = {
        name: f"takes its export with {plugin}" if (plugin := engine.plugin_for(config)) else "takes its export"
        for name, engine in ENGINES.items()
    }
    return [
        f"{ENGINES[name].title} {f'does not take it: {line}' if line else taken[name]}." for name, line in lines.items()
    ]
