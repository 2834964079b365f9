"""Render the card of a drafter from its configuration, with one template."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from hf_domino._common.run_record import Run
from hf_domino.cards.methods import METHOD_TEXTS, MethodTexts
from hf_domino.cards.sections import mark
from hf_domino.cards.training import training_section
from hf_domino.configuration.domino_config import DominoConfig
from hf_domino.formats.engines import ENGINES
from hf_domino.formats.exporting import refusals, stored_config

TEMPLATE = Path(__file__).with_name("drafter.md.jinja")
PAPERS = Path(__file__).with_name("papers")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# The Hub does not know this library, so it shows no snippet. Cards do not set `pipeline_tag`, because with
# text-generation the Hub would offer the drafter to pipelines and servers as a model that generates by itself.
LIBRARY = "hf_domino"


def render_card(
    config: DominoConfig,
    *,
    name: str,
    target: str | None,
    run: Run | None = None,
    folder: Path | None = None,
    results: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    adapter: Mapping[str, Any] | None = None,
) -> str:
    r"""Write the card of a drafter as Markdown: what it is, how it was trained, and what was measured.

    Args:
        config (`DominoConfig`): Configuration of the drafter.
        name (`str`): The name with which others load the drafter.
        target (`str`, *optional*): The target's name.
        run (`Run`, *optional*): How it was trained.
        folder (`Path`, *optional*): Folder of the card, for the picture of the training.
        results (`str`, *optional*): The section with the measured results.
        metadata (`Mapping`, *optional*): Fields for the metadata block.
        adapter (`Mapping`, *optional*): The fields of adapter_config.json, for the card of an adapter.

    Example:
    ```python
    >>> from hf_domino import DominoConfig
    >>> from hf_domino.cards.render import render_card
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
    base = None
    if adapter:
        base = _shown(str(adapter["base_model_name_or_path"]))
        tags += ["peft", str(getattr(adapter["peft_type"], "value", adapter["peft_type"])).lower()]
    base_model = target if on_hub else None
    known: dict[str, Any] = {"base_model": base_model, "library_name": LIBRARY}
    sections = {}
    if run is not None:
        known["datasets"] = list(dict.fromkeys(text.dataset for text in run.texts.values() if text.dataset)) or None
        sections["training"] = training_section(run, folder)
    if results:
        sections["results"] = results
    known |= extra
    method = METHOD_TEXTS.get(config.projector_type, MethodTexts(config.title))
    card = ModelCard.from_template(
        ModelCardData(**known, tags=tags),
        template_path=str(TEMPLATE),
        config=config,
        method=method,
        base=base,
        title=name.rpartition("/")[2],
        name=name,
        target=_shown(target),
        on_hub=on_hub,
        engines=_engines(config),
        papers=[(PAPERS / f"{paper}.bib").read_text(encoding="utf-8").strip() for paper in method.papers],
        sections={section: mark(section, text) for section, text in sections.items()},
    )
    return f"{card}\n"


def is_hub_name(name: str | None) -> bool:
    """Return whether this can be the name of a model on the Hub and is not a local path."""
    return name is not None and HUB_NAME.fullmatch(name) is not None and not Path(name).exists()


def _shown(name: str | None) -> str | None:
    """Return the name of a model as the card shows it: a name on the Hub, or a folder without its path."""
    if name is None or is_hub_name(name):
        return name
    return Path(name).name


def _engines(config: DominoConfig) -> list[str]:
    """Write a line for each engine: does it accept an export of the drafter? Empty if the method has no export."""
    if "export" in config.lacks:
        return []
    try:
        found = refusals(stored_config(config), config)
    except ValueError as error:  # no engine has a format for it
        return [str(error)]
    lines = []
    for name, rules in found.items():
        verdict = "accepts its export"
        if plugin := ENGINES[name].plugin_for(config):
            verdict += f" with {plugin}"
        if rules:
            verdict = "does not accept it: " + "; ".join(f"{rule.field} must be {rule.expected}" for rule in rules)
        lines.append(f"{ENGINES[name].title} {verdict}.")
    return lines
