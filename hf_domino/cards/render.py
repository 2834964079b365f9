"""The card of a drafter, rendered from its configuration by one template; and sent along by `push_to_hub`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from transformers.utils import PushToHubMixin

from hf_domino.cards.sections import CARD, mark, merge_card, read_card, read_text
from hf_domino.configuration import DominoConfig
from hf_domino.formats.engines import ENGINES
from hf_domino.formats.exporting import refusals, stored_config

TEMPLATE = Path(__file__).with_name("drafter.md.jinja")
PAPERS = Path(__file__).with_name("papers")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# The Hub knows no library of this name, so it shows no snippet for it. No `pipeline_tag`, either: those that say
# text-generation are offered to pipelines and servers as models of their own.
LIBRARY = "hf_domino"
GENERIC = "This model card has been automatically generated."
OF_WEIGHTS = re.compile(r"\s*<!-- hf_domino:begin (training|results) -->.*?<!-- hf_domino:end \1 -->", re.DOTALL)


def render_card(
    config: DominoConfig,
    *,
    name: str,
    target: str | None,
    training: str | None = None,
    results: str | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> str:
    r"""Write the card of a drafter as Markdown, with sections of training and results as given.

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
    on_hub, extra = is_hub_name(target), dict(metadata or {})
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
        papers=[(PAPERS / f"{paper}.bib").read_text(encoding="utf-8").strip() for paper in config.kind.papers],
        sections={section: mark(section, text) for section, text in sections.items() if text},
    )
    return f"{card}\n"


def is_hub_name(name: str | None) -> bool:
    """Tell whether this can be the name of a model on the Hub, and is not a folder here."""
    return name is not None and HUB_NAME.fullmatch(name) is not None and not Path(name).exists()


def _engines(config: DominoConfig) -> list[str]:
    """Say in a line for each engine whether it accepts an export of the drafter; none if the kind has no export."""
    if "export" in config.kind.lacks:
        return []
    try:
        found = refusals(stored_config(config))
    except ValueError as error:  # no format of theirs can hold it
        return [str(error)]
    lines = []
    for name, rules in found.items():
        plugin = ENGINES[name].plugin_for(config)
        verdict = f"takes its export with {plugin}" if plugin else "takes its export"
        if rules:
            verdict = "does not take it: " + "; ".join(f"{rule.field} must be {rule.expected}" for rule in rules)
        lines.append(f"{ENGINES[name].title} {verdict}.")
    return lines


class PushesItsCard(PushToHubMixin):
    """Make `push_to_hub`, and `save_pretrained` with `push_to_hub=True`, send the drafter's card, not a generic one."""

    # The repository's card is merged with that of the folder that is saved to or was loaded from. Training and results
    # are taken from that folder, as they belong to the weights.

    config: Any
    name_or_path: str
    _card_before = ""  # of the folder that is saved to, over which Transformers writes the repository's

    def _get_files_timestamps(self, working_dir: str | os.PathLike) -> dict[str, float]:
        self._card_before = read_text(Path(working_dir) / CARD)
        return super()._get_files_timestamps(working_dir)

    def _upload_modified_files(
        self, working_dir: str | os.PathLike, repo_id: str, files_timestamps: dict[str, float], **kwargs: Any
    ) -> Any:
        path, source = Path(working_dir) / CARD, self.name_or_path  # empty for a drafter that was not loaded
        beside = self._card_before or (read_text(Path(source) / CARD) if source else "")
        self._card_before = ""
        card = read_card(read_text(path))
        if GENERIC in card.text:
            card.text = ""
            card.data.pop("library_name")
        text = OF_WEIGHTS.sub("", str(card))  # they tell of the weights that are there
        text = merge_card(text, beside) if beside else text
        base = read_card(text).data.get("base_model")
        new = render_card(self.config, name=repo_id, target=base if isinstance(base, str) else self.config.target_name)
        path.write_text(merge_card(text, new), encoding="utf-8")
        return super()._upload_modified_files(working_dir, repo_id, files_timestamps, **kwargs)
