"""`hf-domino env`: what a bug report needs, and nothing private: no paths, names or settings of other programs."""

from __future__ import annotations

import argparse
import json
import os
import platform
from importlib import metadata
from typing import Any

EXAMPLES = """\
  hf-domino env
  hf-domino env --json
"""
PACKAGES = (
    "hf-domino", "torch", "transformers", "tokenizers", "accelerate", "huggingface_hub", "safetensors", "numpy",
    "triton", "kernels", "peft",
)  # fmt: skip
SETTINGS = ("HF_DOMINO_NO_PATCH", "DOMINO_KERNELS_BACKEND", "TRITON_INTERPRET")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hf-domino env`."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> None:
    """Run `hf-domino env`."""
    found = environment()
    if options.json:
        print(json.dumps(found))
    else:
        print("\n".join(f"{name:<24}{value}" for name, value in found.items()))


def environment() -> dict[str, Any]:
    """Versions, hardware and the settings of this package."""
    import torch

    from hf_domino._common.provenance import provenance

    origin = provenance()
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        **{package: _version(package) for package in PACKAGES},
        "torch": origin["torch"],  # with its build, which a wheel's own version need not name
        "commit": origin["commit"],
        "python": origin["python"],
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": f"{origin['hardware']}, {origin['cores']} cores, {origin['threads']} threads",
        "gpu": ", ".join(f"{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB)" for gpu in gpus) or "none",
        "cuda": torch.version.cuda or "none",
        **{name: os.environ.get(name, "not set") for name in SETTINGS},
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
