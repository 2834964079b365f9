"""Plain DFlash (arXiv 2602.06036): the drafts of a block are used as they are, without a correction head."""

from __future__ import annotations

from huggingface_hub.dataclasses import strict

from hf_domino.methods.block import BlockModel
from hf_domino.methods.block_config import BlockConfig


@strict
class DFlashConfig(BlockConfig):
    """Configuration of a DFlash drafter; its fields are those of [`BlockConfig`]."""

    projector_type: str = "dflash"
    title = "DFlash"


class DFlashModel(BlockModel):
    """A DFlash drafter: a backbone whose base logits are used as they are."""

    config_class = DFlashConfig
