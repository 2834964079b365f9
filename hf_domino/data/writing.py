"""Let a target write a file to train on and one to evaluate on, from given prompts or from its own."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_domino._common.atomic_writes import write_atomic
from hf_domino._common.errors import invalid_argument
from hf_domino._common.notices import notice
from hf_domino._common.version import __version__
from hf_domino.data.answers import REFUSED, TOO_LONG, UNENDED, Answer, write_answers
from hf_domino.data.filters import Exclusions, loops
from hf_domino.data.prompts import Prompt, PromptFilter, check_answers_messages, prompt_of
from hf_domino.data.records import Source, from_files
from hf_domino.data.self_written import find_user_turn, write_prompts
from hf_domino.data.settings import WritingSettings
from hf_domino.data.units import Rows, read_written, run_units
from hf_domino.data.writers import Writer
from hf_domino.targets.identity import TargetIdentity, check_same

SETTINGS = "settings.json"
UNITS = "units"
OLD_NAME = "template_kwargs"  # of chat_template_kwargs, in folders that an earlier version began
TRAIN = "train.jsonl"
EVALUATION = "evaluation.jsonl"
REPORT = "report.json"
LEAST_KEPT = 0.3  # if a smaller share of the answers is kept, a warning says so
START_AGAIN = "Choose another folder, or delete this one."


def write_data(
    writer: Writer,
    tokenizer: Any,
    ends: Sequence[int],
    output: str | Path,
    settings: WritingSettings | None = None,
    prompts: Sequence[Path] = (),
    exclude: Sequence[Path] = (),
    identity: TargetIdentity | None = None,
    shard: tuple[int, int] = (0, 1),
    progress: bool = True,
) -> dict[str, Any]:
    """Let a target write training text: answers to given prompts, or to prompts that it writes itself.

    A call resumes where earlier calls stopped. The number of processes can change, and the result is always the same.

    Args:
        writer (`Writer`): The target, as a [`TargetWriter`] or an [`EndpointWriter`].
        tokenizer (`PreTrainedTokenizerBase`): The target's tokenizer.
        ends (`Sequence[int]`): Token ids that end a text of the target.
        output (`str` or `Path`): Folder for `train.jsonl`, `evaluation.jsonl`, `report.json`, the settings, and the
            batches in `units`.
        settings (`WritingSettings`, *optional*): How text is written; defaults to `WritingSettings()`.
        prompts (`Sequence[Path]`, *optional*): Files of records with `messages`, `conversations`, `prompt` or `text`.
            Without any, a chat model writes its own prompts.
        exclude (`Sequence[Path]`, *optional*): Files whose prompts must not occur in the text, such as benchmarks.
        identity (`TargetIdentity`, *optional*): The identity of the target, which the settings record.
        shard (`tuple[int, int]`, *optional*, defaults to (0, 1)): Index of this process and number of processes.
        progress (`bool`, *optional*, defaults to `True`): Whether to show progress bars.

    Returns:
        `dict`: The report that `report.json` holds.

    Raises:
        ValueError: If the folder was begun with another target or other settings, a file is malformed, or there are no
            prompts and the target cannot write them.
    """
    settings = settings or WritingSettings()
    output = Path(output)
    given = from_files(prompts)
    excluded = from_files(exclude)
    exclusions = Exclusions(prompt_of(record, place).words for place, record in excluded.records())
    # Errors about prompts and the chat template come before anything is written.
    if prompts:
        filtered = _filter(given, tokenizer, exclusions, settings)
    else:
        find_user_turn(tokenizer, ends, settings.system, settings.chat_template_kwargs)
    template = hashlib.sha256(json.dumps(tokenizer.chat_template).encode()).hexdigest()[:16]
    target = identity.to_dict() if identity else None
    record = {"chat template": template, "target": target}
    record |= {"prompts": given.fingerprint(), "exclude": excluded.fingerprint()}
    _begin(output, settings.of_the_text() | record)

    do = partial(run_units, output / UNITS, shard, progress)
    if not prompts:
        filtered = write_prompts(writer, tokenizer, ends, settings, exclusions, do)
    if not filtered.kept:
        raise ValueError(f"no prompt is left to answer: {dict(filtered.dropped)}. Pass other prompts (--prompts).")
    answers = write_answers(filtered.kept, writer, tokenizer, settings, do)
    return _write_result(output, filtered, answers, settings)


def _filter(given: Source, tokenizer: Any, exclusions: Exclusions, settings: WritingSettings) -> PromptFilter:
    """Choose which of the given prompts the target will answer."""
    filtered = PromptFilter(exclusions)
    plain = settings.plain or tokenizer.chat_template is None
    for place, record in given.records():
        prompt = prompt_of(record, place, plain, settings.system)
        if prompt.messages:
            check_answers_messages(tokenizer)
        if settings.rows is not None and len(filtered.kept) == settings.rows:
            filtered.dropped["surplus"] += 1
        else:
            filtered.add(prompt, prompt.drop_reason)
    return filtered


def _begin(output: Path, record: dict[str, Any]) -> None:
    """Record the settings of a new folder, or raise an error if the folder was begun with other settings."""
    path = output / SETTINGS
    if path.exists():
        found = read_written(path, START_AGAIN)
        if OLD_NAME in found:
            found["chat_template_kwargs"] = found.pop(OLD_NAME)
        recorded, target = (TargetIdentity.from_dict(values.get("target")) for values in (found, record))
        if target is not None:
            check_same(recorded, target, str(output), START_AGAIN)
        for name, value in record.items():
            if name != "target" and found.get(name) != value:
                raise invalid_argument(name, f"{found.get(name)!r}, as when {output} was begun", value, START_AGAIN)
        return
    if any((output / name).exists() for name in (TRAIN, EVALUATION)):
        remedy = "Choose another: these would be written over."
        raise invalid_argument("output", f"a folder without {TRAIN} and {EVALUATION} of others", str(output), remedy)
    versions = {
        "hf_domino": __version__, "torch": torch.__version__, "transformers": transformers.__version__,
    }  # fmt: skip
    write_atomic(path, json.dumps(record | {"versions": versions}, indent=1))


def _write_result(output: Path, filtered: PromptFilter, answers: Rows, settings: WritingSettings) -> dict[str, Any]:
    """Write the files of training examples and the report, and return the report.

    The report and the batches are written even if no example is left to train on, so that no text is lost.
    """
    drop_reasons = [_drop_reason(answer, settings) for answer in answers]
    kept = [answer for answer, reason in zip(answers, drop_reasons, strict=True) if reason is None]
    kept.sort(key=lambda answer: _rank(filtered.kept[answer["number"]]))  # by digest, so that lengths are mixed
    parts = {EVALUATION: kept[: settings.eval_rows], TRAIN: kept[settings.eval_rows :]}
    rows = {
        name: [
            row | {"temperature": answer["temperature"]} | _words_of(answer, filtered.kept[answer["number"]])
            for answer in part
            for row in answer["rows"]
        ]
        for name, part in parts.items()
    }
    report: dict[str, Any] = {
        "prompts": {
            "written or read": len(filtered.kept) + sum(filtered.dropped.values()),
            "kept, all distinct": len(filtered.kept),
            "dropped": dict(filtered.dropped),
        },
        "answers": {
            "written": len(answers),
            "kept": len(kept),
            "dropped": Counter(filter(None, drop_reasons)),
            "unended": sum(answer["flaw"] == UNENDED for answer in answers),
        },
        "rows": {name: len(rows[name]) for name in (TRAIN, EVALUATION)},
        "supervised tokens": sum(sum(row["loss_mask"]) for part in rows.values() for row in part),
    }
    refusals = [answer["refusal"] for answer in answers if answer["flaw"] == REFUSED]
    if refusals:
        report["answers"]["first refusal"] = refusals[0]
        notice(f"{len(refusals)} chats are dropped, because the template rejects what the target wrote. {refusals[0]}")
    write_atomic(output / REPORT, json.dumps(report, indent=1) + "\n")
    _check_kept(report, settings)
    for name, part in rows.items():
        write_atomic(output / name, "".join(json.dumps(row) + "\n" for row in part))
    return report


def _check_kept(report: Mapping[str, Any], settings: WritingSettings) -> None:
    """Warn if most answers were dropped, and raise an error if there is no example to train on."""
    answers = report["answers"]
    said = f"{answers['kept']} of {answers['written']} answers are kept"
    if dropped := answers["dropped"]:
        said += f" (dropped: {', '.join(f'{count} {why}' for why, count in dropped.items())})"
    if UNENDED in dropped:
        said += f"; unended ones were cut at max_new_tokens={settings.max_new_tokens}: raise it, or pass --keep-unended"
    if not report["rows"][TRAIN]:
        of_evaluation = f"The first {settings.eval_rows} chats go to {EVALUATION}: lower --num-eval-examples"
        raise ValueError(f"{TRAIN} must hold an example, got none: {said}. {of_evaluation}, or raise --num-examples.")
    if answers["kept"] < LEAST_KEPT * answers["written"]:
        notice(f"Only {said}.")


def _drop_reason(answer: Answer, settings: WritingSettings) -> str | None:
    """Return why an answer is dropped, or None; a chat that became too long is kept up to that turn."""
    reason = answer["flaw"]
    is_dropped = reason == UNENDED and not settings.keep_unended
    if is_dropped or not answer["rows"] or reason not in (None, TOO_LONG, UNENDED):
        return reason
    for example in answer["rows"]:
        written = [token for token, mask in zip(example["input_ids"], example["loss_mask"], strict=True) if mask]
        if loops(written, settings.min_distinct):
            return "loops"
    return None


def _rank(prompt: Prompt) -> str:
    return hashlib.sha256(repr((prompt.messages, prompt.text)).encode()).hexdigest()


def _words_of(answer: Answer, prompt: Prompt) -> dict[str, Any]:
    """Return the words of an example, for people to read and for a benchmark to use as a prompt."""
    if prompt.messages:
        return {"messages": answer["messages"], **prompt.fields}
    return {"prompt": prompt.text, "completion": answer["messages"][-1]["content"]}
