"""Training text in a target's own words, from prompts or from none: a file to train on, one to evaluate on."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_domino._common.whole_files import write_whole
from hf_domino.data.answers import Answerer
from hf_domino.data.filters import Exclusions
from hf_domino.data.prompts import Sieve, read_prompts, texts_of
from hf_domino.data.result import write_result
from hf_domino.data.self_written import SelfWriter
from hf_domino.data.settings import WritingSettings, check_settings, read_settings
from hf_domino.data.sources import Source, from_files
from hf_domino.data.units import Workplace
from hf_domino.data.user_turn import check_chat_template, find_user_turn
from hf_domino.data.writers import Writer
from hf_domino.target.identity import TargetIdentity

SETTINGS, UNITS = "settings.json", "units"
VERSIONS = "versions"
START_AGAIN = "Pass overwrite=True (--overwrite) to start the folder again, or choose another folder."


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
    overwrite: bool = False,
) -> dict[str, Any]:
    """Let a target write training text, and answer prompts or what it asks itself.

    The work is cut into batches with a seed and a file each. A call goes on where earlier ones stopped, with any number
    of processes, and ends with the same rows.

    Args:
        writer (`Writer`): The target, as a [`TargetWriter`] or an [`EndpointWriter`].
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        ends (`Sequence[int]`): Token ids that end a text of the target.
        output (`str` or `Path`): Folder for `train.jsonl`, `evaluation.jsonl`, `report.json`, the settings, and the
            batches in `units`.
        settings (`WritingSettings`, *optional*): How; defaults to `WritingSettings()`.
        prompts (`Sequence[Path]`, *optional*): Files of prompts, as [`read_prompts`] reads them. With none, a chat
            model writes its own.
        exclude (`Sequence[Path]`, *optional*): Files of prompts that will be measured on, to be kept out.
        identity (`TargetIdentity`, *optional*): Who the target is, to be recorded.
        shard (`tuple[int, int]`, *optional*, defaults to (0, 1)): This process and the number of processes.
        progress (`bool`, *optional*, defaults to `True`): Show progress bars.
        overwrite (`bool`, *optional*, defaults to `False`): Start again where the folder was begun with another target
            or other settings.

    Returns:
        `dict`: The report, as in `report.json`.

    Raises:
        ValueError: If the folder was begun with another target or other settings, a file is not as described, or the
            target cannot write prompts and there are none.
    """
    settings, output = settings or WritingSettings(), Path(output)
    asks = None if prompts else _self_writer(writer, tokenizer, ends, settings)
    given, excluded = from_files(prompts), from_files(exclude)
    exclusions = Exclusions(texts_of(excluded))
    record = _record(settings, tokenizer, identity) | {
        "prompts": given.fingerprint(),
        "exclude": excluded.fingerprint(),
    }
    sieve = None if asks else _sift(given, tokenizer, exclusions, settings)  # before the folder is theirs
    _begin(output, record, overwrite)
    place = Workplace(output / UNITS, shard, progress)
    sieve = asks.write(place, exclusions) if asks else sieve
    assert sieve is not None
    if not sieve.kept:
        raise ValueError(f"no prompt is left to answer: {dict(sieve.dropped)}.")
    answers = Answerer(writer, tokenizer, settings).write(sieve.kept, place)
    return write_result(output, sieve, answers, settings, place.work_done())


def _self_writer(writer: Writer, tokenizer: Any, ends: Sequence[int], settings: WritingSettings) -> SelfWriter:
    turn = find_user_turn(tokenizer, ends, settings.system, settings.template_kwargs)
    return SelfWriter(writer, turn, tokenizer, settings)


def _sift(given: Source, tokenizer: Any, exclusions: Exclusions, settings: WritingSettings) -> Sieve:
    """The given prompts that are to be answered."""
    sieve = Sieve(exclusions)
    for prompt in read_prompts(given, settings.plain, settings.system):
        if prompt.messages:
            check_chat_template(tokenizer)
        if settings.rows is not None and len(sieve.kept) == settings.rows:
            sieve.dropped["surplus"] += 1
        else:
            sieve.add(prompt, prompt.flaw)
    return sieve


def _record(settings: WritingSettings, tokenizer: Any, identity: TargetIdentity | None) -> dict[str, Any]:
    """What is written down of who writes, and how."""
    from hf_domino import __version__

    return settings.of_the_text() | {
        "chat template": hashlib.sha256(json.dumps(tokenizer.chat_template).encode()).hexdigest()[:16],
        "target": identity.to_dict() if identity else None,
        VERSIONS: {
            "hf_domino": __version__, "torch": torch.__version__, "transformers": transformers.__version__,
        },
    }  # fmt: skip


def _begin(output: Path, record: dict[str, Any], overwrite: bool) -> None:
    """Note the settings of a new folder; refuse to go on with one that was begun differently, or start it again."""
    path = output / SETTINGS
    if path.exists():
        try:
            compared = {name: value for name, value in record.items() if name != VERSIONS}
            check_settings(output, read_settings(path), compared, START_AGAIN)
            return
        except ValueError:
            if not overwrite:
                raise
            shutil.rmtree(output / UNITS, ignore_errors=True)
    write_whole(path, json.dumps(record, indent=1))
