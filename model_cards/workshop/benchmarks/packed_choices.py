"""How often packed weights change the token that a model chooses, greedy and sampled.

    python model_cards/workshop/benchmarks/packed_choices.py --target FOLDER --rows packed-choices.jsonl

The target reads the documentation in float32: the first half of each text as a prompt, the rest behind it from a cache.
With its own weights, it reads one token at a time, as plain generation does. With packed weights, it reads as many at a
time as a plain decode step, short and long rounds have. After each token, it chooses one: the likeliest, and the one
that the same noise makes of the distribution. Every width is a row, in which `logits_changed` counts the choices whose
logits are not bit for bit those of plain generation. All weights are packed, whether that gains time here or not.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

from hf_domino import packed_linears
from hf_domino._common.atomic_writes import check_writable
from hf_domino._common.cache_name import CACHE
from hf_domino._common.provenance import provenance
from hf_domino.evaluation.results import Result, append_results
from hf_domino.targets.packed import ALWAYS, SETTING

DOCUMENTATION = Path(__file__).parents[3] / "docs"
WIDTHS = (1, 4, 8, 16)  # positions of a forward: a plain decode step, and rounds


def logits_behind(target: PreTrainedModel, ids: torch.Tensor, width: int, is_packed: bool) -> torch.Tensor:
    """Logits `[N, V]` after each token of the second half of a text `[T]`, read `width` at a time."""
    length = len(ids) // 2
    with packed_linears(target) if is_packed else nullcontext():
        cache = DynamicCache(config=target.config)
        target(ids[None, :length], **{CACHE: cache})
        pieces = ids[None, length:].split(width, dim=1)
        return torch.cat([target(piece, **{CACHE: cache}).logits[0] for piece in pieces])


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> None:
    """Count the choices that differ and add the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="folder of the target")
    parser.add_argument("--texts", type=int, default=16, help="texts to read (default: 16)")
    parser.add_argument("--length", type=int, default=512, help="tokens of each, half of them prompt (default: 512)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the noise (default: 0)")
    parser.add_argument("--rows", type=Path, required=True, help="JSONL file to add the rows to")
    options = parser.parse_args(arguments)
    check_writable(options.rows.parent, "the folder of --rows")
    os.environ[SETTING] = ALWAYS
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted(DOCUMENTATION.glob("*.md")))
    ids = tokenizer(text, return_tensors="pt").input_ids[0, : options.texts * options.length].view(options.texts, -1)
    generator = torch.Generator().manual_seed(options.seed)
    counts = {width: {"greedy": 0, "sampled": 0, "logits_changed": 0} for width in WIDTHS}
    for row in tqdm(ids, unit="text"):
        own = logits_behind(target, row, 1, is_packed=False)
        noise = torch.empty_like(own).exponential_(generator=generator)
        for width, changed in counts.items():
            packed = logits_behind(target, row, width, is_packed=True)
            changed["logits_changed"] += int((own != packed).any(-1).sum())
            changed["greedy"] += int((own.argmax(-1) != packed.argmax(-1)).sum())
            choices = [(logits.softmax(-1) / noise).argmax(-1) for logits in (own, packed)]
            changed["sampled"] += int((choices[0] != choices[1]).sum())
    about = {"target": options.target.name, "dtype": "float32", "seed": options.seed}
    prompt = options.length // 2
    about |= {"prompt_tokens": prompt, "num_tokens": options.texts * (options.length - prompt)}
    made = provenance()
    rows = [Result("packed", about | {"width": width}, changed, made) for width, changed in counts.items()]
    append_results(options.rows, rows)
    print("".join(row.to_line() for row in rows), end="")


if __name__ == "__main__":
    main()
