"""The card that goes with a drafter when it is pushed by Transformers' own means.

Transformers writes a generic card, whose library is `transformers`: the Hub would say how to load a drafter as a model.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers.utils import PushToHubMixin

from hf_domino.cards.render import render_card
from hf_domino.cards.sections import CARD, drop_section, merge_card, read_card, read_sections, read_text
from hf_domino.configuration import DominoConfig

GENERIC = "This model card has been automatically generated."
OF_WEIGHTS = ("training", "results")  # sections that tell of the weights they were written for


class _FilesBefore(dict[str, float]):
    """Files of a folder and their times before a drafter is saved there, and the card among them."""

    card = ""


class PushesItsCard(PushToHubMixin):
    """Has `push_to_hub`, and `save_pretrained` with `push_to_hub=True`, write the drafter's card.

    The card of the repository is merged with the one in the folder that is saved to or was loaded from. What is said of
    training and results is that folder's, as it belongs to the weights.
    """

    config: Any
    name_or_path: str

    def _get_files_timestamps(self, working_dir: str | os.PathLike) -> dict[str, float]:
        before = _FilesBefore(super()._get_files_timestamps(working_dir))
        before.card = read_text(Path(working_dir) / CARD)
        return before

    def _upload_modified_files(
        self,
        working_dir: str | os.PathLike,
        repo_id: str,
        files_timestamps: dict[str, float],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        path = Path(working_dir) / CARD
        source = self.name_or_path  # empty for a drafter that was not loaded
        beside = getattr(files_timestamps, "card", "") or (read_text(Path(source) / CARD) if source else "")
        path.write_text(_pushed_card(self.config, repo_id, read_text(path), beside), encoding="utf-8")
        return super()._upload_modified_files(working_dir, repo_id, files_timestamps, *args, **kwargs)


def _pushed_card(config: DominoConfig, repo_id: str, uploaded: str, beside: str) -> str:
    """The card for a repository, from the one Transformers would upload and the one that lies beside the weights."""
    card = read_card(uploaded)
    if GENERIC in card.text:
        card.text = ""
        card.data.pop("library_name")
    text = str(card)
    for section in OF_WEIGHTS:
        if section not in read_sections(beside):
            text = drop_section(text, section)
    if beside:
        text = merge_card(text, beside)
    base = read_card(text).data.get("base_model")
    target = base if isinstance(base, str) else config.target_name
    return merge_card(text, render_card(config, name=repo_id, target=target))
