"""How often packed weights change the token that a model chooses, greedy and sampled.

    python model_cards/workshop/benchmarks/packed_choices.py --target FOLDER --rows packed-choices.jsonl

The target reads the documentation in float32, with its own weights and with packed ones, and chooses a token after each
one that it has read: the likeliest, and the one that the same noise makes of both distributions. There is one row.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_domino import packed_linears
from hf_domino._common.atomic_writes import check_writable
from hf_domino._common.provenance import provenance
from hf_domino.evaluation.results import Result, append_results

DOCUMENTATION = Path(__file__).parents[3] / "docs"


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> None:
    """Count the choices that differ and add a row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="folder of the target")
    parser.add_argument("--texts", type=int, default=40, help="texts to read (default: 40)")
    parser.add_argument("--length", type=int, default=512, help="tokens of each (default: 512)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the noise (default: 0)")
    parser.add_argument("--rows", type=Path, required=True, help="JSONL file to add the row to")
    options = parser.parse_args(arguments)
    check_writable(options.rows.parent, "the folder of --rows")
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted(DOCUMENTATION.glob("*.md")))
    ids = tokenizer(text, return_tensors="pt").input_ids[0, : options.texts * options.length].view(options.texts, -1)
    generator = torch.Generator().manual_seed(options.seed)
    changed = {"greedy": 0, "sampled": 0}
    for row in tqdm(ids, unit="text"):
        own = target(row[None]).logits[0]
        with packed_linears(target):
            packed = target(row[None]).logits[0]
        noise = torch.empty_like(own).exponential_(generator=generator)
        changed["greedy"] += int((own.argmax(-1) != packed.argmax(-1)).sum())
        choices = [(logits.softmax(-1) / noise).argmax(-1) for logits in (own, packed)]
        changed["sampled"] += int((choices[0] != choices[1]).sum())
    settings = {"target": options.target.name, "dtype": "float32", "seed": options.seed, "num_tokens": ids.numel()}
    append_results(options.rows, [Result("packed", settings, changed, provenance())])
    print(ids.numel(), changed)


if __name__ == "__main__":
    main()
