"""The formats that load, in the order in which they are tried."""

from __future__ import annotations

from hf_domino.configuration import DominoConfig
from hf_domino.configuration.domino_config import OF_TRANSFORMERS
from hf_domino.formats.dflash_config import DFLASH_CONFIG
from hf_domino.formats.eagle3 import EAGLE3
from hf_domino.formats.format import Format, StoredConfig
from hf_domino.formats.muse_glimmer import MUSE_GLIMMER
from hf_domino.formats.speculators import SPECULATORS

ALWAYS_OURS = "acceptance_rule"  # stands in every file that we wrote, and in no other project's


def _is_ours(stored: StoredConfig) -> bool:
    """Whether it is ours: another project's Domino has the same `model_type`, and fields of its own."""
    names = {name for name, value in stored.items() if value not in (None, False)}
    has_ours_alone = names <= DominoConfig.__dataclass_fields__.keys() | OF_TRANSFORMERS
    return stored.get("model_type") == DominoConfig.model_type and (ALWAYS_OURS in stored or has_ours_alone)


OURS = Format(DominoConfig.model_type, _is_ours, dict)
FORMATS = (OURS, EAGLE3, SPECULATORS, MUSE_GLIMMER, DFLASH_CONFIG)


def format_of(stored: StoredConfig) -> Format | None:
    """Which format a drafter's configuration is of, [`OURS`] among them; None for what is no drafter that we know.

    Args:
        stored (`Mapping`): A checkpoint's config.json.

    Example:
    ```python
    >>> from hf_domino.formats.registry import format_of
    >>> format_of({"model_type": "qwen3", "dflash_config": {"target_layer_ids": [1, 9, 17]}}).name
    'DFlash configuration (z-lab, SpecForge, Model-Optimizer)'

    ```
    """
    return next((found for found in FORMATS if found.matches(stored)), None)
