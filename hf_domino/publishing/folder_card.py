"""The card of a drafter's folder, with what was measured, and whether a card says what its rows do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerState

from hf_domino._common.refusal import refusal
from hf_domino.cards import UnfitCard, check_card, merge_card, read_sections, render_card, training_section
from hf_domino.cards.sections import CARD, read_card, read_text
from hf_domino.cards.training import FIGURE
from hf_domino.configuration import DominoConfig
from hf_domino.evaluation.benchmark.methods import BASELINE
from hf_domino.evaluation.benchmark.report import (
    acceptance_of,
    label,
    markdown_table,
    methods_of,
    modes_of,
    number,
    results_table,
)
from hf_domino.evaluation.benchmark.rows import Row, measured, read_rows
from hf_domino.evaluation.benchmark.summary import summarize
from hf_domino.formats.loading import interpret
from hf_domino.formats.stored import read_object

ROWS, STATE = "results.jsonl", "trainer_state.json"
OTHER_ROWS = "results-*.jsonl"  # of the same drafter, measured otherwise: another dtype, batches, other prompts
FIGURES = {"speed-up": "Speed-up", "acceptance": "Acceptance by position", "round": "Time in a round"}
PICTURES = (".svg", ".png")


def results_section(
    rows: Sequence[Row],
    figures: Mapping[str, str] | None = None,
    others: Mapping[str, Sequence[Row]] | None = None,
) -> str:
    """What was measured, as a section of a card, with pictures by title and a table each of other runs by their file.

    Raises:
        ValueError: If the rows measure nothing, or have no plain generation to compare with.
    """
    if not measured(rows):
        raise ValueError(f"rows must have measurements, got {len(rows)} without any: run `hf-domino bench`.")
    pictures = [f"![{title}]({path})" for title, path in (figures or {}).items()]
    tables = [_by_position(rows), _by_kind(rows)]
    parts = ["## Results", results_table(rows), _commits(measured(rows)[0]), *pictures, *tables]
    parts.append(f"Every figure is computed from `{ROWS}`, a row a prompt; `hf-domino card . --check` does it again.")
    parts += [
        f"Measured otherwise, in `{name}`:\n\n{results_table(further)}" for name, further in (others or {}).items()
    ]
    return "\n\n".join(part.strip() for part in parts if part)


def _commits(row: Row) -> str:
    commits = {model: row.get(f"{model}_commit") for model in ("target", "drafter")}
    known = [f"{model} at commit `{commit}`" for model, commit in commits.items() if commit]
    return f"Loaded from the Hub: {', '.join(known)}." if known else ""


def _by_position(rows: Sequence[Row]) -> str:
    """Share of the rounds that accepted each proposal; empty where no method has rounds."""
    rates = {
        f"{label(method)}, {name}": summarize(rows, method, mode).acceptance_rate_at
        for method in methods_of(rows)
        for mode, name in modes_of(rows).items()
    }
    depth = max(map(len, rates.values()))
    body = [[name, *map(number, found), *[""] * (depth - len(found))] for name, found in rates.items() if found]
    title = "Share of the rounds that drafted in which proposal k was accepted:"
    return f"{title}\n\n{markdown_table([str(k + 1) for k in range(depth)], body)}" if body else ""


def _by_kind(rows: Sequence[Row]) -> str:
    """Speed-up and acceptance by the data set or kind of text that prompts are of; empty where they do not say."""
    modes, kinds = modes_of(rows), dict.fromkeys(row.get("kind") for row in measured(rows))
    if not any(kinds):
        return ""
    heads = [f"{name}, {what}" for name in modes.values() for what in ("speed-up", "acceptance length")]
    body = []
    for kind in kinds:
        chosen = [row for row in measured(rows) if row.get("kind") == kind]
        for method in (method for method in methods_of(chosen) if method != BASELINE):
            summaries = [summarize(chosen, method, mode) for mode in modes]
            cells = [cell for one in summaries for cell in (number(one.speed_up, " x"), acceptance_of(one))]
            body.append([f"{kind or 'other'}: {label(method)}", *cells])
    return f"By kind of prompt:\n\n{markdown_table(heads, body)}"


def card_for(
    folder: Path,
    rows: Path | None = None,
    *,
    name: str | None = None,
    target: str | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> str:
    """The card of a drafter's folder, merged into the one that is there.

    Args:
        folder (`Path`): With `config.json`; and `results.jsonl`, further `results-*.jsonl`, `trainer_state.json`,
            pictures in `figures`, as far as they are there.
        rows (`Path`, *optional*): Rows of `hf-domino bench` in place of the folder's.
        name (`str`, *optional*): Name it is loaded by, such as one on the Hub; defaults to the folder's.
        target (`str`, *optional*): Hub name or folder of the target; defaults to the card's `base_model`, or the
            configuration's `target_name`.
        metadata (`Mapping`, *optional*): Fields for the head of the card, such as `license`; lists are united with
            what is there.

    Raises:
        ValueError: If the folder has no drafter, or nothing names its target.
    """
    config, existing = _read_config(folder), read_text(folder / CARD)
    base = read_card(existing).data.get("base_model")
    named = target or (base if isinstance(base, str) else None) or config.target_name
    if named is None:
        raise ValueError(f"--target must be given: neither {folder}/config.json nor its card names the target.")
    wins = [*(metadata or {}), *(["base_model"] if target else [])]
    new = render_card(
        config,
        name=name or folder.resolve().name,
        target=named,
        training=_training(folder, existing),
        results=_results(folder, rows),
        metadata=metadata,
    )
    return merge_card(existing, new, wins)


def check_folder(folder: Path) -> None:
    """Refuse a folder whose card does not say what was measured and recorded there.

    Raises:
        UnfitCard: Naming file, section, what was expected and what was found: if there is no card, it has results
            without rows, or numbers that are not those of its rows.
    """
    path, remedy = folder / CARD, f"Write it again: hf-domino card {folder}."
    text = read_text(path)
    if not text:
        raise UnfitCard(f"{path} must be the drafter's card, got none. {remedy}")
    found, results = read_sections(text), _results(folder)
    if results is not None:
        check_card(text, {"results": results}, str(path), remedy)
    elif "results" in found:
        raise UnfitCard(
            f"section 'results' of {path} must have its rows beside it, in {ROWS}, got none. Put them there, hf-domino "
            f"card {folder} --rows FILE, or take the section out."
        )
    if "training" in found and (line := _unrecorded(folder, found["training"])):
        raise UnfitCard(
            f"section 'training' of {path} must have the line {line!r}, which {STATE} says, got none such. {remedy}"
        )


def _read_config(folder: Path) -> DominoConfig:
    if not (folder / "config.json").is_file():
        raise ValueError(f"FOLDER must be a drafter's folder, got {str(folder)!r}: it has no config.json.")
    return interpret(read_object(folder / "config.json"))[1]


def _results(folder: Path, rows: Path | None = None) -> str | None:
    path = rows or folder / ROWS
    if rows is None and not path.is_file():
        return None
    pictures = (folder / "figures" / f"{name}{kind}" for name in FIGURES for kind in PICTURES)
    figures = {FIGURES[path.stem]: f"figures/{path.name}" for path in pictures if path.is_file()}
    others = {other.name: read_rows(other) for other in sorted(folder.glob(OTHER_ROWS))}
    return results_section(read_rows(path), figures, others)


def _training(folder: Path, existing: str) -> str | None:
    """The card's own section, which says more, unless the trainer recorded something else since."""
    section = read_sections(existing).get("training")
    if section is not None and _unrecorded(folder, section) is None:
        return section
    state = _read_state(folder)
    return state and training_section(state, figure=FIGURE if (folder / FIGURE).is_file() else None)


def _unrecorded(folder: Path, section: str) -> str | None:
    """The first line that the trainer's record asks for and a section does not have."""
    state, lines = _read_state(folder), section.splitlines()
    return next((line for line in training_section(state).splitlines() if line not in lines), None) if state else None


def _read_state(folder: Path) -> TrainerState | None:
    path = folder / STATE
    try:
        return TrainerState.load_from_json(str(path)) if path.is_file() else None
    except (ValueError, TypeError) as error:
        raise refusal(str(path), "what the trainer wrote", str(error), "Take it from the training again.") from error
