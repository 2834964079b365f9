"""`hf-domino export`: a drafter as a folder that SGLang, vLLM and other projects read."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_domino._common.whole_files import check_writable
from hf_domino.cli.flags import DTYPE, ENGINES, FORMATS, set_up

if TYPE_CHECKING:
    from hf_domino.formats.exporting import Export

EXAMPLES = """\
  hf-domino export --drafter my-drafter --output my-drafter-sglang --engine sglang
  hf-domino export --drafter my-dflash --format speculators --output my-dflash-vllm --engine vllm --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hf-domino export`."""
    parser.add_argument("--drafter", required=True, help="folder or Hub name of the drafter")
    parser.add_argument("--target", help="its target, whose rows of lm_head speculators stores with a draft vocabulary")
    parser.add_argument("--output", required=True, type=Path, help="folder to write")
    parser.add_argument(
        "--format", choices=FORMATS, default="specforge", help="layout of the folder; speculators holds no Domino"
    )
    parser.add_argument("--engine", choices=ENGINES, help="write only what this engine takes")
    parser.add_argument("--dtype", **DTYPE, default="bfloat16", help="dtype of the weights")
    parser.add_argument("--overwrite", action="store_true", help="replace a checkpoint in the output folder")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> None:
    """Run `hf-domino export`."""
    from hf_domino.drafter.modeling import DominoDraftModel
    from hf_domino.pair import find_drafter, find_target

    check_writable(options.output, "--output")
    set_up()
    drafter = DominoDraftModel.from_pretrained(find_drafter(options.drafter))
    given = {name: getattr(options, name) for name in ("format", "engine", "dtype", "overwrite")}
    target = None
    if options.target is not None:
        from hf_domino.target.loading import AutoTarget

        target = AutoTarget.from_pretrained(find_target(options.target), dtype="auto")
    found = summary(drafter.export(options.output, target=target, **given), drafter.config)
    print(json.dumps(found) if options.json else _lines(found))


def summary(export: Export, config: Any) -> dict[str, Any]:
    """Say for JSON what was written, and how each engine that takes it is started.

    Args:
        export (`Export`): What was written.
        config (`DominoConfig`): The drafter's.
    """
    from hf_domino.cards.render import is_hub_name
    from hf_domino.formats.engines import ENGINES

    is_dspark = config.projector_type == "dspark"
    method = "dspark" if is_dspark else "dflash"  # as which engines run Domino and DFlash 2, too
    names = {
        "method": method,
        "METHOD": method.upper(),
        "target": name if is_hub_name(name := config.target_name) else "TARGET",  # of a folder no path is recorded
        "drafter": str(export.folder),
        "num_draft_tokens": config.num_draft_tokens if is_dspark else config.block_size - 1,
    }
    engines = {
        name: {
            "takes": not reasons,
            "unmet": [str(reason) for reason in reasons],
            "command": None if reasons else ENGINES[name].command.substitute(names),
            "note": ENGINES[name].note,
        }
        for name, reasons in export.refusals.items()
    }
    return {"folder": str(export.folder), "format": export.format, "files": list(export.files), "engines": engines} | (
        {"notes": list(export.notes)} if export.notes else {}
    )


def _lines(found: dict[str, Any]) -> str:
    """Say the same for the terminal, without the engines that do not take it."""
    lines = [f"{found['folder']}: {', '.join(found['files'])} ({found['format']})"]
    for engine in found["engines"].values():
        lines += ["", engine["command"], f"  {engine['note']}"] if engine["takes"] else []
    return "\n".join(lines)
