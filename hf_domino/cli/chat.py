"""`hf-domino chat`: talk to a target in the terminal, and see each round of an answer as it is committed."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hf_domino.cli.flags import add_choice, add_models, readable

if TYPE_CHECKING:
    import torch

    from hf_domino.cli.answers import RoundPrinter
    from hf_domino.pair import Pair

EXAMPLES = """\
  hf-domino chat
  hf-domino chat --target Qwen/Qwen3-8B --drafter Huang2020/Qwen3-8B-Domino-b16 --system "Answer in one sentence."
"""
COMMANDS = "/new: forget the conversation; /quit: end (or Ctrl-D)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hf-domino chat`."""
    parser.add_argument("--system", help="system message, for a target with a chat template")
    add_choice(parser.add_argument_group("choice of tokens"), max_new_tokens=512)
    add_models(parser.add_argument_group("models"))


def run(options: argparse.Namespace) -> None:
    """Run `hf-domino chat`."""
    from rich.console import Console

    from hf_domino.cli.answers import RoundPrinter, open_pair

    with readable("--system"):
        (options.system or "").encode()
    pair, arguments = open_pair(options)
    conversation = Conversation(pair, options.system)
    how = ""
    if not pair.is_chat:
        how = f" {pair.name} has no chat template: it continues the text that you write."
    print(f"{pair.name} with {pair.drafter_name}.{how}\n{COMMANDS}\n", file=sys.stderr)
    while (said := _read()) is not None:
        if said == "/new":
            conversation = Conversation(pair, options.system)
        elif said.startswith("/"):
            print(COMMANDS, file=sys.stderr)
        elif said:
            printer = RoundPrinter(pair.tokenizer, Console(highlight=False), shows_rounds=True)
            try:
                conversation.answer(said, printer, arguments)
            except KeyboardInterrupt:
                print("\n(interrupted; Ctrl-D ends the chat)", file=sys.stderr)
            else:
                print(pair.drafter.stats.summary, file=sys.stderr)


@dataclass
class Conversation:
    """The messages so far, the target's cache of them, and the drafter's memory of their texts.

    Args:
        pair ([`Pair`]): The target that answers, with its drafter.
        system (`str`, *optional*): The system message.
        messages (`list[dict]`, *optional*): The messages so far; without a chat template, pieces of one text.
    """

    pair: Pair
    system: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    _read: torch.Tensor | None = None  # tokens that the cache holds, [1, T]
    _cache: Any = None

    def __post_init__(self) -> None:
        from hf_domino.decoding.lookup_memory import LookupMemory

        self.pair.drafter.memory = LookupMemory()
        if self.system is None:
            return
        if not self.pair.is_chat:
            raise ValueError(f"--system must be left out: {self.pair.name} has no chat template to put it into.")
        self.messages.append({"role": "system", "content": self.system})

    def answer(self, said: str, printer: RoundPrinter, arguments: dict[str, Any]) -> None:
        """Answer a message. After an interrupt, the part that was written stays in the conversation."""
        from hf_domino._common.cache_name import CACHE
        from hf_domino.configuration.from_target import eos_ids_of
        from hf_domino.data.answers import message_of
        from hf_domino.data.writers import Written
        from hf_domino.evaluation.benchmark.prompts import inputs_of

        self.messages.append({"role": "user", "content": said})
        inputs = inputs_of(self.pair, [self.pair.ask(self.messages)])
        ids = inputs["input_ids"]
        cache = None
        if self._read is not None and ids[:, : self._read.shape[1]].equal(self._read):
            cache = self._cache
        self._read = self._cache = None
        try:
            output = self.pair.target.generate(
                **inputs, **arguments, assistant_model=self.pair.drafter, streamer=printer, **{CACHE: cache},
                return_dict_in_generate=True,
            )  # fmt: skip
            self._read = output.sequences
            self._cache = getattr(output, CACHE)
        finally:
            ended = printer.tokens[-1:] and printer.tokens[-1] in eos_ids_of(self.pair.target.generation_config)
            written = Written(printer.tokens, bool(ended))
            self.messages.append(message_of(ids[0].tolist(), written, self.pair.tokenizer, is_chat=self.pair.is_chat))


def _read() -> str | None:
    """Read the user's next message; return None when the user ends the chat."""
    mark = "> " if sys.stdin.isatty() else ""
    try:
        with readable("the message"):
            said = input(mark)
            said.encode()
    except (EOFError, KeyboardInterrupt):
        return None
    if said.strip() == "/quit":
        return None
    return said
