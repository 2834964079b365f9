"""Check whether a drafter can be served with the settings of a server, and say why if it cannot.

The settings are those of `--speculative-config` and the numbers of devices. This module does not import vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from hf_domino._common.errors import invalid_argument
from hf_domino.formats.dflash_config import SECTION
from hf_domino.formats.engines import VLLM, unmet
from hf_domino.formats.fields import AROUND_LAYERS, StoredConfig
from hf_domino.formats.loading import interpret
from hf_domino.methods import DominoConfig
from hf_domino.targets.identity import config_digest, has_sizes_of

TESTED = ("0.32.0",)
READ = ("0.33.0",)
# Setting -> the only value that is supported, and the reason.
SETTINGS = {
    "draft_sample_method": (
        "'greedy'",
        "The head reads its likeliest tokens, so drafts that are drawn would not be those that it has read.",
    ),
    "use_local_argmax_reduction": ("False", "The head corrects whole rows of logits."),
    "use_heterogeneous_vocab": ("False", "Drafts are tokens of the target's vocabulary."),
    "num_speculative_tokens_per_batch_size": (
        "absent",
        "Blocks must have the same length while the server runs.",
    ),
}


def served_config(stored: StoredConfig) -> DominoConfig | None:
    """Read the configuration of a drafter that needs the plugin; return None if vLLM serves the drafter itself.

    The plugin serves Domino, and DFlash with features that vLLM's own model does not have.

    Example:
    ```python
    >>> from hf_domino import DominoConfig
    >>> from hf_domino.formats.exporting import stored_config
    >>> from hf_domino.serving.settings import served_config
    >>> served_config(stored_config(DominoConfig(block_size=8))).num_draft_tokens
    8
    >>> served_config(stored_config(DominoConfig(projector_type="dflash", shift_label=False))) is None
    True

    ```
    """
    section = stored.get(SECTION)
    if not isinstance(section, Mapping):
        return None
    method, *more = (section.get(name, stored.get(name)) for name in ("projector_type", "shift_label", *AROUND_LAYERS))
    if method != "domino" and not any(more):
        return None
    config = interpret(stored)[1]
    if found := unmet(stored, VLLM):  # the same errors as when you export for vLLM
        raise ValueError(" ".join(map(str, found)))
    return config if VLLM.plugin_for(config) else None


def check_settings(config: DominoConfig, settings: Mapping[str, Any]) -> None:
    """Raise a `ValueError` for settings with which the drafter would not draft the way it was trained."""
    for name, (expected, why) in SETTINGS.items():
        value = settings.get(name)
        if value and value != "greedy":
            raise invalid_argument(name, expected, value, f"{why} Leave it out of --speculative-config.")
    most = config.block_size - 1
    count = settings.get("num_speculative_tokens")
    if not isinstance(count, int) or not 1 <= count <= most:
        remedy = f"A block has the anchor and {most} proposals."
        raise invalid_argument(
            "num_speculative_tokens", f"in [1, {most}] (block_size={config.block_size})", count, remedy
        )
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        size = settings.get(name, 1)
        if size != 1:
            raise invalid_argument(
                name, 1, size, "The head's weights are not split. Serve on one device, or without it."
            )


def check_target(config: DominoConfig, target: PreTrainedConfig) -> None:
    """Raise a `ValueError` if the target's sizes or digest differ from those that the drafter was made for."""
    remedy = "Serve the drafter with the target that it was trained for."
    for name, ours in (("vocab_size",) * 2, ("num_hidden_layers", "num_target_layers"), ("hidden_size",) * 2):
        expected = getattr(config, ours)
        value = getattr(target, name)
        if expected not in (None, value):
            raise invalid_argument(f"the target's {name}", f"{expected} (the drafter's {ours})", value, remedy)
    recorded = config.target_config_digest
    found = config_digest(target)
    if recorded is not None and not has_sizes_of(recorded, found):
        raise invalid_argument(
            "the target's config_digest", f"{recorded!r} (the drafter's target_config_digest)", found, remedy
        )
    if target.model_type.startswith("gemma"):
        why = "Gemma scales its embeddings, which vLLM's drafters read unscaled. Generate with Transformers."
        raise invalid_argument("the target's model_type", "another than Gemma's", target.model_type, why)


def version_notice(version: str) -> str | None:
    """Return a notice about an untested version of vLLM, such as `"0.32.0+cpu"`; None for a tested version."""
    if version.partition("+")[0] in TESTED:
        return None
    tested = ", ".join(TESTED)
    read = ", ".join(READ)
    return (
        f"hf_domino's plugin was tested with vLLM {tested} and its interfaces were read in {read}; this is {version}. "
        "Compare the mean acceptance length that vLLM logs with that of `hf-domino bench` before you rely on it."
    )
