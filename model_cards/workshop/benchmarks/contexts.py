"""Acceptance and the time of a draft by the length of the prompt, with a window over the drafter's context and without.

    python model_cards/workshop/benchmarks/contexts.py --target TARGET --drafter DRAFTER --results contexts.jsonl

Prompts ask about as many tokens of the documentation as a length says. Answers are greedy, and compared with those of
plain generation. Whole blocks are drafted, so that acceptance does not depend on a clock.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_domino import DominoDraftModel, timed_phases
from hf_domino._common.atomic_writes import check_writable, write_atomic
from hf_domino._common.provenance import provenance
from hf_domino.evaluation.results import Result, to_lines

DOCUMENTATION = Path(__file__).parents[3] / "docs"
QUESTION = "Explain in your own words what this part of a manual says:\n\n{}"
BESIDE = 64  # tokens of a prompt beside the text


def prompts_of(tokenizer: Any, length: int, count: int) -> Iterator[torch.Tensor]:
    """So many prompts `[1, T]` of about a length, each about another part of the documentation."""
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted(DOCUMENTATION.glob("*.md")))
    ids = tokenizer(text, return_tensors="pt").input_ids[0]
    for start in torch.linspace(0, len(ids) - length, count).long().tolist():
        part = tokenizer.decode(ids[start : start + max(length - BESIDE, 1)])
        chat = [{"role": "user", "content": QUESTION.format(part)}]
        yield tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=False)


def measure(options: argparse.Namespace, target: PreTrainedModel, tokenizer: Any, drafter: DominoDraftModel) -> list:
    """Measure every length and window: a row for each prompt."""
    names = {"target": Path(options.target).name, "drafter": Path(options.drafter).name}
    made = provenance()
    written = {"do_sample": False, "max_new_tokens": options.max_new_tokens}
    views = {window: drafter.view(draft_length="full", draft_window_size=window) for window in (None, options.window)}
    rows: list[Result] = []
    for length in tqdm(options.contexts, desc="contexts", unit="length"):
        for prompt, ids in enumerate(prompts_of(tokenizer, length, options.num_prompts)):
            plain = target.generate(ids, **written)
            for window, view in views.items():
                contexts: list[Any] = []
                new_context = type(view).new_context

                def watched(view: Any = view, contexts: list = contexts, new_context: Any = new_context) -> Any:
                    contexts.append(new_context(view))
                    return contexts[-1]

                object.__setattr__(view, "new_context", watched)
                with timed_phases():
                    text = target.generate(ids, assistant_model=view, **written)
                stats = view.stats
                assert stats.phases is not None
                about = {"context": length, "prompt": prompt, "prompt_tokens": ids.shape[1], "window": window}
                figures = {
                    "acceptance_length": round(stats.acceptance_length, 4),
                    "num_rounds": stats.num_rounds,
                    "draft_ms": round(1000 * stats.phases["draft"] / stats.num_rounds, 3),
                    "context_bytes": sum(context.num_bytes for context in contexts),
                    "equals_plain": torch.equal(text, plain),
                }
                rows.append(Result("domino", names | about, figures, made))
        if options.results is not None:  # the longest take a while
            write_atomic(options.results, to_lines(rows))
    return rows


def table(rows: Sequence[Result]) -> str:
    """Render the means of a run, a line for each length."""
    lines = [f"{'context':>8}{'acceptance, all':>18}{'window':>10}{'ms a draft, all':>18}{'window':>10}{'equal':>8}"]
    for length in sorted({row["context"] for row in rows}):
        here = [row for row in rows if row["context"] == length]
        cells = []
        for field in ("acceptance_length", "draft_ms"):
            for has_window in (False, True):
                values = [row[field] for row in here if (row["window"] is not None) == has_window]
                cells.append(sum(values) / len(values))
        equal = f"{sum(row['equals_plain'] for row in here)}/{len(here)}"
        lines.append(f"{length:>8}{cells[0]:>18.2f}{cells[1]:>10.2f}{cells[2]:>18.1f}{cells[3]:>10.1f}{equal:>8}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder or Hub name of the target, a chat model")
    parser.add_argument("--drafter", required=True, help="folder or Hub name of its drafter")
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024, 2048, 4096, 7168], help="tokens")
    parser.add_argument("--window", type=int, default=512, help="draft_window_size to compare with none")
    parser.add_argument("--num-prompts", type=int, default=3, help="prompts of each length")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="length of the answers")
    parser.add_argument("--results", type=Path, help="JSONL file for the rows")
    options = parser.parse_args(arguments)
    if options.results is not None:
        check_writable(options.results.parent, "the folder of --results")
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    drafter = DominoDraftModel.from_pretrained(options.drafter, dtype=torch.float32).eval()
    rows = measure(options, target, tokenizer, drafter)
    print(table(rows))


if __name__ == "__main__":
    main()
