"""What a memory is worth to prompt lookup while a file is edited: tokens a forward, without a clock or a model.

    python model_cards/workshop/benchmarks/edit_loop.py --rows edit-loop.jsonl

Each loop makes ten small changes to the first lines of a module of Python's standard library, one after the other. The
prompt of a change is the request and the whole file as it is by then, and the answer is the whole changed file. The
answers are known, so a proposal is accepted if it equals the answer's next token, as in greedy decoding. Each change is
answered with prompt lookup alone, with a memory of the loop so far (`memory`), and with one that has also seen another
loop over the same file, whose changes differ (`warm memory`), for each limit of tokens that a round looks up. A row is
one answer.
"""

from __future__ import annotations

import argparse
import random
import re
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hf_domino import LookupMemory
from hf_domino._common.provenance import provenance
from hf_domino.decoding.estimates import NOMINAL_PROPOSAL
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.prompt_lookup import PromptLookup
from hf_domino.evaluation.results import Result, to_lines
from hf_domino.pair import BUNDLED

TOKENIZER = Path(__file__).parents[2] / BUNDLED
MODULES = ("argparse", "configparser", "csv", "heapq", "shlex", "statistics", "textwrap", "zipfile")
LIMITS = (10, 32)  # of the tokens that a round looks up
NUM_LINES = 150
NUM_CHANGES = 10
OTHER_LOOP = 1000  # added to the seed of the loop that a warm memory has seen


def change(code: str, number: int, draws: random.Random) -> tuple[str, str]:
    """Make one small change to a file; return the request and the changed file."""
    lines = code.split("\n")
    place = draws.randrange(len(lines))
    if number % 3 == 0:
        names = sorted(set(re.findall(r"\b[a-z_]{4,}\b", code)))
        name = draws.choice(names)
        return f"Rename `{name}` to `{name}_value` everywhere.", re.sub(rf"\b{name}\b", f"{name}_value", code)
    if number % 3 == 1:
        lines.insert(place, f"# See note {number} of the design.")
        return f"Add a comment that refers to note {number} before line {place + 1}.", "\n".join(lines)
    del lines[place]
    return f"Delete line {place + 1}.", "\n".join(lines)


def loop(code: str, seed: int) -> list[tuple[str, str]]:
    """The prompts and the answers of ten changes, one after the other."""
    draws = random.Random(seed)
    turns = []
    for number in range(NUM_CHANGES):
        request, changed = change(code, number, draws)
        turns.append((f"{request}\n\n```python\n{code}\n```\n\n", f"```python\n{changed}\n```"))
        code = changed
    return turns


def answer(prompt: Sequence[int], text: Sequence[int], lookup: PromptLookup) -> dict[str, int]:
    """Count the forwards and the proposals of an answer whose text is known."""
    whole = [*prompt, *text]
    length = len(prompt) + 1  # the first token comes from the prompt's forward
    lookup.read = lambda row, start: whole[start:length]
    num_rounds = num_proposed = 0
    while length < len(whole):
        prefixes = Prefixes.of(torch.tensor([whole[:length]]))
        offer = lookup.offer(prefixes, len(whole) - length, NOMINAL_PROPOSAL)
        num_accepted = 0
        if offer is not None:
            following = whole[length:]
            pairs = zip(offer.tokens[0], following, strict=False)
            num_accepted = next((count for count, (one, other) in enumerate(pairs) if one != other), offer.length)
            num_accepted = min(num_accepted, len(following) - 1)
            num_proposed += offer.length
            lookup.observe(offer, [num_accepted + 1])
        length += num_accepted + 1
        num_rounds += 1
    lookup.finish(1)
    return {"new_tokens": len(text) - 1, "rounds": num_rounds, "proposed": num_proposed}


def run(module: str, seed: int, tokenizer: PreTrainedTokenizerBase) -> list[Result]:
    """Measure the loop over one module with each memory."""
    source = Path(sysconfig.get_paths()["stdlib"], f"{module}.py").read_text(encoding="utf-8")
    code = "\n".join(source.split("\n")[:NUM_LINES])
    turns = [[tokenizer(text).input_ids for text in turn] for turn in loop(code, seed)]
    others = [tokenizer(f"{prompt}{text}").input_ids for prompt, text in loop(code, seed + OTHER_LOOP)]
    rows = []
    made = provenance()
    for limit in LIMITS:
        warm = LookupMemory()
        for tokens in others:
            warm.add(tokens)
        for method, memory in (("lookup", None), ("memory", LookupMemory()), ("warm memory", warm)):
            for number, (prompt, text) in enumerate(turns):
                lookup = PromptLookup(limit, len(tokenizer), memory=memory, max_length=len(prompt) + len(text))
                counts = answer(prompt, text, lookup)
                about = {"module": module, "change": number, "limit": limit, "prompt_tokens": len(prompt)}
                about |= {"tokenizer": TOKENIZER.name, "seed": seed}
                rows.append(Result(method, about, counts, made))
    return rows


def main() -> None:
    """Measure all modules and write rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the changes (default: 0)")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    rows = [row for module in MODULES for row in run(module, options.seed, tokenizer)]
    options.rows.write_text(to_lines(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
