"""Collect Python source as training text, the standard library and permissively licensed packages, and tokenize it.

Modules are filtered (no tests, no generated tables), de-duplicated line by line so that vendored and generated
copies cannot leak, and only then split: whole modules are held out by a hash of their name.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT, MASK = "<|endoftext|>", "<|mask|>"
# A newline keeps the indentation after it, so that a Python line start is one token; digits stand alone.
SPLIT = r"\n+ *| ?_*[A-Za-z]+| ?\d| ?[^\s\w]+|_+| +|\s+|[^\s]"
REQUIREMENTS = Path(__file__).with_name("corpus.txt")

# Directories that hold tests, vendored copies, or text that is data rather than code.
TESTS = {"test", "tests", "testing", "_test", "idle_test"}
VENDORED = {"site-packages", "_vendor", "vendor", "vendored", "externals", "extern", "ensurepip", "lib2to3"}
DATA = {"__pycache__", "locale", "locales", "encodings", "data", "pydoc_data", "lib-dynload", "turtledemo"}
DATA |= {"migrations"}
SKIPPED_DIRECTORIES = TESTS | VENDORED | DATA
MIN_CHARACTERS = 600
MAX_CHARACTERS = 200_000
MAX_COMPRESSION = 7.5  # zlib ratio above which a module is a table or boilerplate: it would teach the model to loop
MAX_DUPLICATE_SHARE = 0.35  # share of a module's long lines already seen in an earlier module
MIN_LINE_FOR_DEDUPLICATION = 24
HELD_OUT_ONE_IN = 16


@dataclass(frozen=True)
class Module:
    """One source file: where it is from, its name there, and its text."""

    source: str
    name: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether the module is kept from all training, decided by a hash of its name alone."""
        digest = hashlib.sha256(f"{self.source}:{self.name}".encode()).digest()
        return int.from_bytes(digest[:4], "big") % HELD_OUT_ONE_IN == 0


def collect_modules(packages: Path) -> list[Module]:
    """The filtered and de-duplicated modules of the standard library and of the packages of `corpus.txt`."""
    seen: set[int] = set()
    kept = []
    for module in _read_all(packages):
        long = [line for line in module.text.splitlines() if len(line.strip()) >= MIN_LINE_FOR_DEDUPLICATION]
        lines = set(map(hash_line, long))
        if lines and len(lines & seen) <= MAX_DUPLICATE_SHARE * len(lines):
            kept.append(module)
            seen |= lines
    return kept


def hash_line(line: str) -> int:
    """Hash a line without its indentation; stable between processes, unlike `hash`."""
    return int.from_bytes(hashlib.blake2b(line.strip().encode(), digest_size=8).digest(), "big")


def _read_all(packages: Path) -> Iterator[Module]:
    standard_library = Path(sysconfig.get_paths()["stdlib"])
    yield from _read_tree("stdlib", standard_library, sorted(standard_library.rglob("*.py")))
    for name in pinned_packages():
        found = list(metadata.distributions(name=name, path=[str(packages)]))
        if not found:
            raise FileNotFoundError(f"{name} is not in {packages}: pip install --no-deps --target it there first.")
        files = sorted(packages / file for file in found[0].files or [] if file.suffix == ".py")
        yield from _read_tree(name, packages, files)


def pinned_packages() -> list[str]:
    """Names of the packages in `corpus.txt`, in its order."""
    lines = REQUIREMENTS.read_text().splitlines()
    return [line.split("==")[0] for line in lines if line and not line.startswith("#")]


def _read_tree(source: str, root: Path, files: list[Path]) -> Iterator[Module]:
    for file in files:
        if ".." in file.parts or SKIPPED_DIRECTORIES.intersection(file.relative_to(root).parts[:-1]):
            continue
        if file.name.startswith(("test_", "_test")) or file.name == "conftest.py":
            continue
        try:
            text = clean(file.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, OSError):
            continue
        if reads_like_code(text):
            yield Module(source, file.relative_to(root).as_posix(), text)


def clean(text: str) -> str:
    """Drop the licence header, trailing blanks and runs of empty lines; expand tabs."""
    lines = [line.rstrip() for line in text.expandtabs(4).splitlines()]
    start = 0
    while start < len(lines) and (not lines[start] or lines[start].startswith("#")):
        start += 1
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines[start:])).strip() + "\n"


def reads_like_code(text: str) -> bool:
    """Whether a module reads like code somebody wrote: sensible length, little repetition, few literals."""
    if not MIN_CHARACTERS <= len(text) <= MAX_CHARACTERS:
        return False
    if len(text) / len(zlib.compress(text.encode())) > MAX_COMPRESSION:
        return False
    letters = sum(character.isascii() and character.isalpha() for character in text)
    digits = sum(character.isdigit() for character in text)
    return letters > 0.5 * len(text.replace(" ", "").replace("\n", "")) and digits < 0.06 * len(text)


def train_tokenizer(texts: Iterable[str], vocab_size: int, model_max_length: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with an end-of-text and a mask token."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        mask_token=MASK,
        model_max_length=model_max_length,
        padding_side="left",  # as generation needs it
        clean_up_tokenization_spaces=False,
    )
