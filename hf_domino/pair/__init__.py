"""A target with its drafters: found by name or folder, fetched where it is not ours to publish, loaded."""

from hf_domino.pair.finding import (
    BUNDLED,
    FETCHED,
    Pair,
    check_device,
    dflash_folder,
    domino_folder,
    find_drafter,
    find_pair,
    find_target,
    load_pair,
    read_prompts,
)
from hf_domino.pair.smollm2 import PROMPTS

__all__ = [
    "BUNDLED",
    "FETCHED",
    "PROMPTS",
    "Pair",
    "check_device",
    "dflash_folder",
    "domino_folder",
    "find_drafter",
    "find_pair",
    "find_target",
    "load_pair",
    "read_prompts",
]
