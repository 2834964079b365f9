"""`hf-domino export`: write a drafter as a folder that SGLang, vLLM and other projects read."""

from __future__ import annotations

import argparse
from pathlib import Path

from hf_domino._common.atomic_writes import check_writable
from hf_domino.cli.flags import DTYPE, ENGINE_NAMES, FORMATS, TRUST_HELP, set_up

EXAMPLES = """\
  hf-domino export --drafter my-drafter --output my-drafter-sglang --engine sglang
  hf-domino export --drafter my-dflash --format speculators --output my-dflash-vllm --engine vllm
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hf-domino export`."""
    parser.add_argument("--drafter", required=True, help="folder or Hub name of the drafter")
    parser.add_argument(
        "--target",
        help="folder or Hub name of the target; speculators needs its lm_head for a drafter with a draft vocabulary",
    )
    parser.add_argument("--output", required=True, type=Path, help="folder to write")
    parser.add_argument(
        "--format", choices=FORMATS, default="specforge", help="layout of the folder; speculators has none for Domino"
    )
    parser.add_argument(
        "--engine", choices=ENGINE_NAMES, help="check the drafter for this engine, and refuse what it does not support"
    )
    parser.add_argument("--dtype", **DTYPE, default="bfloat16", help="dtype of the weights")
    parser.add_argument("--trust-remote-code", action="store_true", help=TRUST_HELP)
    parser.add_argument("--overwrite", action="store_true", help="replace the checkpoint in the output folder")


def run(options: argparse.Namespace) -> None:
    """Run `hf-domino export`."""
    from hf_domino.cards.render import is_hub_name
    from hf_domino.formats.engines import ENGINES
    from hf_domino.methods import DominoDraftModel
    from hf_domino.pair import find_drafter, find_target

    check_writable(options.output, "--output")
    set_up()
    drafter = DominoDraftModel.from_pretrained(find_drafter(options.drafter))
    given = {name: getattr(options, name) for name in ("format", "engine", "dtype", "overwrite")}
    target = None
    if options.target is not None:
        from hf_domino.targets.loading import AutoTarget, trusting

        trust = trusting(options.trust_remote_code)
        target = AutoTarget.from_pretrained(find_target(options.target), dtype="auto", **trust)
    config = drafter.config
    written = drafter.export(options.output, target=target, **given)
    print(f"{written.folder}: {', '.join(written.files)} ({written.format})")
    name_of_target = "TARGET"  # placeholder for a local folder, because its path is not recorded
    if is_hub_name(config.target_name):
        name_of_target = str(config.target_name)
    for name, reasons in written.refusals.items():
        if not reasons and options.engine in (None, name):
            engine = ENGINES[name]
            command = engine.command_for(config, str(written.folder), name_of_target)
            print("", command, f"  {engine.note}", sep="\n")
