"""`hf-domino env`: print what a bug report needs: `transformers env` and what that leaves out, but nothing private."""

from __future__ import annotations

import argparse
import os
from contextlib import redirect_stdout
from importlib import metadata
from io import StringIO
from typing import Any

EXAMPLES = "  hf-domino env"
PACKAGES = ("hf-domino", "tokenizers", "numpy", "triton", "kernels", "peft")
SETTINGS = ("HF_DOMINO_NO_PATCH", "HF_DOMINO_PACKED", "DOMINO_KERNELS_BACKEND", "TRITON_INTERPRET")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no flags, because `hf-domino env` has none."""


def run(options: argparse.Namespace) -> None:
    """Run `hf-domino env`."""
    print("\n".join(f"- {name}: {value}" for name, value in environment().items()))


def environment() -> dict[str, Any]:
    """Collect versions, hardware and the settings of this package."""
    from transformers.cli.system import env

    from hf_domino._common.provenance import provenance

    with redirect_stdout(StringIO()):  # `env` also prints everything, with lines to fill in
        theirs = {name: value for name, value in env().items() if value != "<fill in>"}
    theirs.pop("Accelerate config", None)  # can contain paths and names of machines
    origin = provenance()
    return {
        **theirs,
        **{package: _version(package) for package in PACKAGES},
        "commit": origin["commit"],
        "CPU": f"{origin['hardware']}, {origin['cores']} cores, {origin['threads']} threads",
        **{name: os.environ.get(name, "not set") for name in SETTINGS},
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
