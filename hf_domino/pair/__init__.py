"""A target with its drafters: found by name or folder, and loaded."""

from hf_domino.pair.finding import (
    BUNDLED,
    PROMPTS,
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

__all__ = [
    "BUNDLED",
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
