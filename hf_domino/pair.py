"""Find and load a target with its drafters: the bundled pair of a checkout, or another pair with the same layout.

A pair called NAME is two folders side by side: `NAME` (target and tokenizer) and `NAME-domino` (drafter). If we are not
allowed to publish a target, the checkout has only its drafter.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_domino._common.dtypes import dtype_of, supported_dtype
from hf_domino._common.errors import invalid_argument
from hf_domino._common.fields import BUNDLED_PROMPTS
from hf_domino.data.names import read_template_fields
from hf_domino.data.prompts import Asked, bundled_prompts, read_prompts
from hf_domino.formats.source import CARDS, RECYCLING, card_folders, check_is_target, check_source, has_model
from hf_domino.methods import DominoDraftModel, recycling
from hf_domino.targets.compatibility import check_target
from hf_domino.targets.identity import identify
from hf_domino.targets.loading import AutoTarget, load_config, trusting

BUNDLED = "pycoder-13m"
PROMPTS = "prompts.jsonl"  # held-out prompts in a target's folder
NO_DRAFTER = "no drafter given, and none beside the target: token recycling drafts, which needs no training"


def check_device(device: str) -> None:
    """Raise an error if the installed torch cannot use a device."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ValueError(
            f"--device must be one that torch {torch.__version__} can use, got {device!r} ({reason}): leave it out or "
            "use cpu."
        ) from error


def choose_dtype(
    given: str | None, device: str, target: str | Path | None, trust_remote_code: bool = False
) -> torch.dtype:
    """Return the dtype to load a target and its drafters in, by the rule that all commands share.

    A `given` dtype is used as it is. The default is float32 on a CPU, and on a GPU the dtype of the target's checkpoint
    if the GPU supports it.
    """
    check_device(device)
    if given is not None:
        return dtype_of(given)
    if torch.device(device).type == "cpu":
        return torch.float32
    name = find_target(target)
    config = load_config(name, **_offline(name), **trusting(trust_remote_code))
    saved = config.get_text_config(decoder=True).dtype or config.dtype or torch.bfloat16
    return supported_dtype(device, saved)


@dataclass(frozen=True)
class Pair:
    """A target with its tokenizer, its drafters (keyed by name and method) and an optional small assistant."""

    name: str
    folder: Path
    target: Any
    tokenizer: Any
    drafters: Mapping[str, DominoDraftModel]
    assistant: Any = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # unless a prompt sets them itself

    @property
    def drafter(self) -> Any:
        """The first drafter; None if the pair was loaded without one."""
        return next(iter(self.drafters.values()), None)

    @property
    def drafter_name(self) -> str:
        """The name of the first drafter, as tables show it."""
        return next(iter(self.drafters))

    @property
    def models(self) -> dict[str, dict[str, Any]]:
        """What results record of the models: the known fields of the identity of each, the target's first."""
        named = {"target": self.target} | {f"drafter {name}": one for name, one in self.drafters.items()}
        if self.assistant is not None:
            named["assistant"] = self.assistant
        return {name: identify(model).known for name, model in named.items()}

    @property
    def is_chat(self) -> bool:
        """Whether the target has a chat template, so that it answers messages."""
        return self.tokenizer.chat_template is not None

    def ask(self, messages: Sequence[dict[str, Any]]) -> Asked:
        """Turn messages into a prompt for the target's chat template, or into one text if it has no template."""
        if self.is_chat:
            return self.with_template_kwargs({"messages": messages})
        return {"text": "".join(message["content"] for message in messages)}

    def with_template_kwargs(self, prompt: Asked) -> Asked:
        """Add the pair's variables of the chat template to a prompt of messages, except those that it sets itself."""
        if "messages" not in prompt or not self.chat_template_kwargs:
            return prompt
        own = read_template_fields(prompt).get("chat_template_kwargs", {})
        return prompt | {"chat_template_kwargs": {**self.chat_template_kwargs, **own}}

    def recycled(self) -> Pair:
        """Return a copy of the pair that drafts with token recycling, which works for every target."""
        return replace(self, drafters={RECYCLING: recycling(self.target)})


def find_pair(path: str | Path | None = None) -> Path:
    """Return the target folder of a pair; by default, of the bundled one."""
    candidates = [Path(str(path))]
    if _is_bundled(path):
        candidates = [cards / BUNDLED for cards in card_folders()]
    for candidate in candidates:
        if (candidate / "config.json").is_file() and _drafter_of(candidate) is not None:
            return candidate
    raise _no_pair(candidates)


def find_target(name: str | Path | None = None, field: str = "--target") -> str:
    """Return the folder or the Hub name of a target, and raise an error if there is no such target."""
    found = str(name)
    if _is_bundled(name):
        found = str(find_pair(name).resolve())
    check_source(found, field)
    check_is_target(found, field, **_offline(found))
    return found


def find_drafter(name: str | Path, field: str = "--drafter") -> str:
    """Return the folder or the Hub name of a drafter, and raise an error if there is no such drafter."""
    if _is_bundled(name):
        folders = [domino_folder(cards / BUNDLED) for cards in card_folders()]
        found = next(filter(has_model, folders), None)
        if found is None:
            raise _no_pair(folders)
        return str(found)
    check_source(name, field, words=(RECYCLING,))
    return str(name)


def _is_bundled(name: str | Path | None) -> bool:
    """Return whether a name means the bundled pair, not a folder or a name on the Hub."""
    return name is None or (str(name) == BUNDLED and not Path(name).is_dir())


def _no_pair(candidates: list[Path]) -> FileNotFoundError:
    return FileNotFoundError(
        f"no pair at {' or '.join(map(str, candidates))}: a pair is a target folder NAME with NAME-domino beside it. "
        "Give a --target with its --drafter, or run from a checkout of the repository: the installed package has no "
        f"{CARDS}/."
    )


def domino_folder(target_folder: Path) -> Path:
    """Return the folder of the Domino drafter beside a target's folder."""
    if target_folder.is_dir():
        target_folder = target_folder.resolve()  # so that `.` has a name, too
    return target_folder.parent / f"{target_folder.name}-domino"


def load_pair(
    target: str | Path | None = None,
    drafter: str | Path | None = None,
    assistant: str | Path | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    others: Sequence[str | Path] = (),
    is_drafted: bool = True,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> Pair:
    """Load a target and its drafters, without any network access if they are folders.

    Each drafter is a folder, a Hub name, or `"recycling"`. The default is the drafter beside the target. Code that
    comes with the target or the assistant is only run with `trust_remote_code`.
    """
    trust = trusting(trust_remote_code)
    source = find_target(target)
    folder = Path(source)  # which is not a Hub name everywhere: on Windows, it has another separator
    drafter = drafter or _drafter_of(folder)
    if drafter is None and is_drafted:
        raise ValueError(f"--drafter must be given: there is no {domino_folder(folder)} beside the target {folder}.")
    drafters: list[str] = []
    if drafter:
        drafters = [one if is_recycling(one) else find_drafter(one) for one in map(str, (drafter, *others))]
    names = [Path(drafter).resolve().name for drafter in drafters]
    for name in names:
        if names.count(name) > 1:
            raise invalid_argument("each --drafter", "of another name", name, "Rename one of the folders.")
    if assistant is not None:
        check_source(assistant, "--assistant")
    tokenizer = AutoTokenizer.from_pretrained(source, **_offline(source), **trust)
    if chat_template_kwargs and tokenizer.chat_template is None:
        remedy = f"{folder} has no chat template that would read them."
        raise invalid_argument("--chat-template-kwargs", "left out", chat_template_kwargs, remedy)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token

    def load(model_class: Any, name: str | Path, **options: Any) -> Any:
        model = model_class.from_pretrained(str(name), dtype=dtype, **_offline(name), **options)
        return model.to(torch.device(device)).eval()

    model = load(AutoTarget, source, **trust)
    loaded = {}
    for name, found in zip(names, drafters, strict=True):
        if is_recycling(found):
            loaded[RECYCLING] = recycling(model)
            continue
        one = load(DominoDraftModel, found)
        check_target(one.config, model)
        loaded[f"{name} ({one.config.title})"] = one
    return Pair(
        name=folder.resolve().name,
        folder=folder,
        target=model,
        tokenizer=tokenizer,
        drafters=loaded,
        assistant=assistant and load(AutoModelForCausalLM, assistant, **trust),
        chat_template_kwargs=chat_template_kwargs or {},
    )


def is_recycling(drafter: str | os.PathLike | None) -> bool:
    """Return whether a drafter's name means token recycling, not a folder with that name."""
    return str(drafter) == RECYCLING and not Path(RECYCLING).is_dir()


def drafter_called(name: str | os.PathLike, target: PreTrainedModel) -> DominoDraftModel | None:
    """Return a new drafter for a target if its name is a word, not a folder or a Hub name; else None."""
    if is_recycling(name):
        return recycling(target)
    return None


def _offline(name: str | Path) -> dict[str, Any]:
    """Return the arguments that keep `from_pretrained` off the network if the name is a folder."""
    return {"local_files_only": True} if Path(name).is_dir() else {}


def _drafter_of(target: Path) -> Path | None:
    """Return the folder of the drafter beside a target, or of the published drafter with the target's name."""
    names = dict.fromkeys((target.name, target.name.lower()))  # names on the Hub have capitals, our folders have none
    published = (domino_folder(cards / name) for cards in card_folders() for name in names)
    return next(filter(has_model, (domino_folder(target), *published)), None)


def prompts_for(pair: Pair, given: str | Path | None = None) -> tuple[list[Asked], str]:
    """Return the prompts of a command, and where they come from: given, of the target, or bundled."""
    own = pair.folder / PROMPTS
    if given is not None:
        return list(map(pair.with_template_kwargs, read_prompts(given, pair.is_chat))), "given"
    if own.is_file():
        return list(map(pair.with_template_kwargs, read_prompts(own, pair.is_chat))), "of the target"
    prompts = list(map(pair.with_template_kwargs, bundled_prompts(pair.is_chat)))
    what = "questions about everyday matters, code and maths" if pair.is_chat else "beginnings of texts and code"
    print(f"prompts: the bundled {what}, as the target's folder has none", file=sys.stderr)
    return prompts, BUNDLED_PROMPTS
