"""The command `recipe`: make a target with its drafter from nothing, or train the bundled one for other text."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from hf_domino.cli.flags import positive_int

EXAMPLES = """\
  python model_cards/workshop recipe pair --work pair-work --output model_cards
  python model_cards/workshop recipe smollm2 --work smollm2-work --stage target
  python model_cards/workshop recipe gemma3 --work gemma3-work
  python model_cards/workshop recipe qwen-coder --work qwen-work --stage data
  python model_cards/workshop recipe adapter --work adapter-work --output adapter-work
"""
RECIPES = ("pair", "smollm2", "gemma3", "qwen-coder", "adapter")
STAGES = ("target", "data", "train", "measure", "card")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `python model_cards/workshop recipe`."""
    add = parser.add_argument
    add(
        "name",
        choices=RECIPES,
        help="a small target with drafters, a drafter for SmolLM2, Gemma 3 or Qwen2.5-Coder, or an adapter",
    )
    add("--work", type=Path, help="folder for intermediate results (default: NAME-work)")
    add("--processes", type=positive_int, default=os.cpu_count(), help="processes, one core each")
    add("--output", type=Path, help="folder of the pair, model_cards in a checkout, or of adapter.jsonl")
    add("--packages", type=Path, help="pair: folder with the corpus packages (default: install them)")
    add(
        "--stage", choices=STAGES, help="make this stage of a drafter's recipe only, and those before it (default: all)"
    )
    add("--text", type=Path, help="smollm2, qwen-coder: folder with train and evaluation text that it wrote before")
    add("--drafter", type=Path, help="qwen-coder: folder of a drafter to train further, instead of a new one")
    add("--target", help="qwen-coder: folder or Hub name of the original target (default: as packages hold it)")
    add("--questions", type=Path, help="qwen-coder: file with Spec-Bench's questions, to measure on these, too")
    add(
        "--execute",
        action="store_true",
        help="qwen-coder: run the code that it writes for HumanEval's problems, to count which answers pass. The "
        "code has no network if this system has namespaces (unshare), but it can read and delete your files",
    )


def run(options: argparse.Namespace) -> int:
    """Run `python model_cards/workshop recipe`: hours on a CPU; a stage whose result is there is not done again."""
    work = options.work or Path(f"{options.name}-work")
    if options.name in ("pair", "adapter") and options.output is None:
        raise ValueError("--output must be given: the folder that the pair is written to, model_cards in a checkout.")
    if options.name == "adapter":
        from recipes.adapter import compare_adapter

        return compare_adapter(work, options.output, options.processes)
    if options.name == "pair":
        from recipes.bundled import make_pair

        make_pair(work, options.output, options.packages, options.processes)
    elif options.name == "gemma3":
        from recipes.gemma3 import Gemma3Recipe

        Gemma3Recipe(work, options.processes).run(options.stage)
    elif options.name == "qwen-coder":
        from recipes.qwen_coder import QwenCoderRecipe

        given = (options.target, options.text, options.questions, options.execute, options.drafter)
        QwenCoderRecipe(work, options.processes, *given).run(options.stage)
    else:
        from recipes.smollm2 import SmolLM2Recipe

        SmolLM2Recipe(work, options.processes, options.text).run(options.stage)
    return 0
