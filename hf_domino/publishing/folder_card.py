"""Write the card of a drafter's folder, with the measured results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult

from hf_domino._common.errors import invalid_argument
from hf_domino._common.run_record import Run
from hf_domino.cards.render import is_hub_name, render_card
from hf_domino.cards.sections import CARD, MEASURED_BY, merge_card, read_card, read_sections, read_text
from hf_domino.evaluation.benchmark.options import METHODS
from hf_domino.evaluation.benchmark.report import (
    label,
    markdown_table,
    methods_of,
    modes_of,
    number,
    results_table,
)
from hf_domino.evaluation.benchmark.summary import summarize
from hf_domino.evaluation.results import Result, measured, read_results
from hf_domino.formats.adapters import drafter_config
from hf_domino.formats.source import ADAPTER_CONFIG, CONFIG, read_object
from hf_domino.methods import DominoDraftModel
from hf_domino.targets.identity import TargetIdentity, check_same, identify

ROWS = "results.jsonl"


def results_section(rows: Sequence[Result]) -> str:
    """Write the section of a card with the tables of results."""
    if not measured(rows):
        raise ValueError(f"rows must have measurements, got {len(rows)} without any: run `hf-domino bench`.")
    commits = {model: measured(rows)[0].get(f"{model}_commit") for model in ("target", "drafter")}
    loaded = ", ".join(f"{model} at commit `{commit}`" for model, commit in commits.items() if commit)
    parts = ["## Results", results_table(rows)]
    if loaded:
        parts.append(f"Loaded from the Hub: {loaded}.")
    parts += [_by_position(rows), f"All numbers are computed from `{ROWS}` by `hf-domino push . --card-only`."]
    return "\n\n".join(part.strip() for part in parts if part)


def eval_results(rows: Sequence[Result]) -> list[EvalResult]:
    """List the drafter's speed-up and acceptance length in each mode, in the form that the Hub reads from a card.

    They come from `domino_adaptive` or, if that was not measured, from the first drafter that was compared. The list is
    empty if there is neither.
    """
    own = [method for method in methods_of(rows) if method == "domino_adaptive" or method not in METHODS]
    if not own:
        return []
    results = []
    for mode, name in modes_of(rows).items():
        summary = summarize(rows, own[0], mode)
        for field in ("speed_up", "acceptance_length"):
            value = getattr(summary, field)
            if value is None:
                continue
            result = EvalResult(
                task_type="text-generation",
                dataset_type=MEASURED_BY,
                dataset_name=f"prompts of {MEASURED_BY}",
                metric_type=field,
                metric_name=f"{field.replace('_', ' ')}, {name}",
                metric_value=round(value, 2),
            )
            results.append(result)
    return results


def _by_position(rows: Sequence[Result]) -> str:
    """Make a table of the share of rounds that accepted each proposal; empty if no method has rounds."""
    rates = {
        f"{label(method)}, {name}": summarize(rows, method, mode).acceptance_rate_at
        for method in methods_of(rows)
        for mode, name in modes_of(rows).items()
    }
    depth = max(map(len, rates.values()))
    body = [[name, *map(number, found), *[""] * (depth - len(found))] for name, found in rates.items() if found]
    if not body:
        return ""
    title = "How often proposal k was accepted, as a share of the rounds that drafted:"
    return f"{title}\n\n{markdown_table([str(k + 1) for k in range(depth)], body)}"


def card_for(
    folder: Path, *, name: str | None = None, target: str | None = None, metadata: Mapping[str, Any] | None = None
) -> str:
    """Return the card of a drafter's folder, merged into the folder's existing card.

    The card describes run.json, the record of the training, and results.jsonl if the folder has them. `name` is the
    name with which others load the drafter; it defaults to the name of the folder. `target` defaults to the card's
    base_model, or else to the configuration's target_name. `metadata`, such as a license, goes into the card's metadata
    block, where lists are merged with existing ones.
    """
    is_adapter = not (folder / CONFIG).is_file()
    if is_adapter and not (folder / ADAPTER_CONFIG).is_file():
        remedy = "Save a drafter or its adapter there with save_pretrained(folder)."
        raise invalid_argument("FOLDER", f"that of a drafter, with {CONFIG} or {ADAPTER_CONFIG}", str(folder), remedy)
    config = drafter_config(folder)
    existing = read_text(folder / CARD)
    sections = read_sections(existing)
    rows = folder / ROWS
    results = None
    name = name or folder.resolve().name
    base = read_card(existing).data.get("base_model")
    recorded = base if isinstance(base, str) and is_hub_name(base) else None
    named = target or recorded or config.target_name
    if named is None:
        raise ValueError(f"--target must be given: neither {folder / CONFIG} nor its card names the target.")
    head = dict(metadata or {})
    if rows.is_file():
        found = read_results(rows)
        _check_drafter(found, folder)
        results = results_section(found)
        if measures := eval_results(found):
            head |= {"model_name": name.rpartition("/")[2], "eval_results": measures}
    elif "results" in sections:
        remedy = "Put its rows there, or take the section out of the card."
        raise invalid_argument(f"section 'results' of {folder / CARD}", f"computed from {rows}", "no such file", remedy)
    adapter = read_object(folder / ADAPTER_CONFIG) if is_adapter else None
    new = render_card(
        config,
        name=name,
        target=named,
        run=Run.load(folder),
        folder=folder,
        results=results,
        metadata=head,
        adapter=adapter,
    )
    wins = list(metadata or {})
    if target:
        wins.append("base_model")
    merged = read_card(merge_card(existing, new, wins))
    data: Any = merged.data
    if isinstance(data.base_model, str) and not is_hub_name(data.base_model):
        data.base_model = None  # a local folder, which means nothing to others
    return str(merged)


def _check_drafter(rows: Sequence[Result], folder: Path) -> None:
    """Raise an error if results measured another drafter than that of their folder, as far as they record it."""
    models: Mapping[str, Any] = next((row["models"] for row in measured(rows) if "models" in row), {})
    recorded = next((models[name] for name in models if name.startswith("drafter ")), None)
    if recorded is not None:
        path = folder / ROWS
        remedy = f"Measure this one: hf-domino bench --drafter {folder} --results {path} --overwrite."
        drafter = DominoDraftModel.from_pretrained(folder, local_files_only=True)
        check_same(TargetIdentity.from_dict(recorded), identify(drafter), str(path), remedy, "the drafter")


def missing_from(card: str) -> list[str]:
    """List the metadata that the Hub shows and the card lacks, each with the flag that sets it."""
    data: Any = read_card(card).data
    missing = []
    if not data.base_model:
        missing.append("The card names no base model on the Hub: give --target OWNER/NAME.")
    if not data.license:
        missing.append("The card names no licence: give --license, such as apache-2.0.")
    return missing
