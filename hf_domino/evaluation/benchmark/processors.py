"""What each logits processor adds to a round on a CPU: rollout and verification, beside those without any.

    python -m hf_domino.evaluation.benchmark.processors --rows processors.jsonl

Random weights of the shapes of a small model: what a round costs does not depend on what it accepts. All processors
take turns in one process, and ratios of medians count, not milliseconds. What is drafted and verified follows a text
that repeats itself, so that n-grams and bad words are met; the target's logits are its lm_head's of random states.

Shapes: P proposals, H hidden size, T tokens so far, V vocabulary.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, Qwen3Config, Qwen3ForCausalLM
from transformers.generation import logits_process as hf

from hf_domino._common.provenance import provenance
from hf_domino.configuration import DominoConfig
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.rollout import rollout
from hf_domino.decoding.sampling import TokenLaw
from hf_domino.decoding.verification import judge
from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.pair import DTYPES
from hf_domino.target.view import TargetModel

NONE, EOS, PERIOD = "none", 2, 97  # tokens after which the text repeats itself
SIZES = {"vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
DRAFTER = {"num_hidden_layers": 1, "block_size": 16, "mask_token_id": 3, "emb_dim": 256, "gru_hidden_dim": 512}
Row = dict[str, Any]


def processors_of(text: torch.Tensor, vocab_size: int) -> dict[str, list[LogitsProcessor]]:
    """Every kind of stock processor, and what is often used together.

    Args:
        text (`torch.Tensor`): Tokens so far `[1, T]`.
        vocab_size (`int`): All tokens there are.
    """
    length, values = text.shape[1], text[0].tolist()
    words = [values[index : index + 3] for index in range(0, PERIOD, 4)] + [[token] for token in range(500, 530)]
    biases = [[word, 4.0 if index % 2 else -4.0] for index, word in enumerate(words)]
    one = {
        "min_length": hf.MinLengthLogitsProcessor(2 * length, [EOS]),
        "min_new_tokens": hf.MinNewTokensLengthLogitsProcessor(length - 8, 512, [EOS]),
        "forced_bos": hf.ForcedBOSTokenLogitsProcessor(5),
        "forced_eos": hf.ForcedEOSTokenLogitsProcessor(length + 9, [EOS]),
        "suppress_tokens": hf.SuppressTokensLogitsProcessor(list(range(100, 190))),
        "begin_suppress_tokens": hf.SuppressTokensAtBeginLogitsProcessor(list(range(100, 190)), length),
        "bad_words": hf.NoBadWordsLogitsProcessor(words),
        "sequence_bias": hf.SequenceBiasLogitsProcessor(biases),
        "no_repeat_ngram": hf.NoRepeatNGramLogitsProcessor(3),
        "encoder_no_repeat_ngram": hf.EncoderNoRepeatNGramLogitsProcessor(3, text),
        "repetition_penalty": hf.RepetitionPenaltyLogitsProcessor(1.1),
        "encoder_repetition_penalty": hf.EncoderRepetitionPenaltyLogitsProcessor(1.1, text),
        "length_decay": hf.ExponentialDecayLengthPenalty((4, 1.05), [EOS], length - 8),
        "watermark": hf.WatermarkLogitsProcessor(vocab_size, "cpu"),
        "prefix_allowed_tokens": hf.PrefixConstrainedLogitsProcessor(lambda row, ids: [5, 6, 7], 1),
    }
    lists: dict[str, list[LogitsProcessor]] = {NONE: []} | {name: [processor] for name, processor in one.items()}
    lists["four of them"] = [one[name] for name in ("repetition_penalty", "no_repeat_ngram", "bad_words", "min_length")]
    return lists


class Round:
    """One round of a small drafter and target: everything but their layers."""

    def __init__(self, text_length: int, dtype: torch.dtype):
        tokens = {"bos_token_id": None, "eos_token_id": EOS, "pad_token_id": 0, "tie_word_embeddings": True}
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS, **tokens)).to(dtype).eval()
        config = DominoConfig.for_target(model.config, **DRAFTER, draft_length="full")
        self.drafter, self.target = DominoDraftModel(config).to(dtype).eval(), TargetModel(model, config)
        text = torch.randint(600, config.vocab_size, (1, PERIOD)).repeat(1, text_length // PERIOD + 2)
        self.text, self.tokens = text[:, :text_length], text[:, text_length : text_length + config.num_draft_tokens]
        self.draft_hidden = torch.randn(1, config.num_draft_tokens, config.hidden_size, dtype=dtype)
        hidden = torch.randn(1, config.num_draft_tokens + 1, config.hidden_size, dtype=dtype)
        self.target_logits = model.lm_head(hidden)

    def stages(self, processors: list[LogitsProcessor]) -> dict[str, Callable[[], Any]]:
        """What is timed: the rollout and the verification under these processors."""
        law, prefixes = TokenLaw(LogitsProcessorList(processors)), Prefixes.of(self.text)
        drafts = law.without_state()
        return {
            "rollout": lambda: rollout(self.drafter, self.target, self.draft_hidden, prefixes, drafts),
            "verification": lambda: judge(law, prefixes, self.tokens, self.target_logits, None).outcome.tolist(),
        }


@torch.no_grad()
def measure(text_length: int, dtype: torch.dtype, repeats: int) -> list[Row]:
    """Time all processors in turn; one row each.

    Args:
        text_length (`int`): Tokens so far (T).
        dtype (`torch.dtype`): Of both models.
        repeats (`int`): Rounds of each; the median counts.
    """
    one_round = Round(text_length, dtype)
    lists = processors_of(one_round.text, SIZES["vocab_size"])
    stages = {name: one_round.stages(processors) for name, processors in lists.items()}
    times: dict[str, dict[str, list[float]]] = {name: {stage: [] for stage in stages[name]} for name in lists}
    turns = itertools.product(stages[NONE], range(-1, repeats), lists)  # of a stage the first do not count
    for stage, repeat, name in turns:
        start = time.process_time()
        stages[name][stage]()
        if repeat >= 0:
            times[name][stage].append(1e3 * (time.process_time() - start))
    rows = []
    for name, of_stages in times.items():
        row: Row = {"processors": name}
        for stage, values in of_stages.items():
            row[f"{stage}_ms"] = statistics.median(values)
            row[f"{stage}_ratio"] = row[f"{stage}_ms"] / statistics.median(times[NONE][stage])
        rows.append(row)
    return rows


def main() -> None:
    """Measure, print a table and write rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, help="JSONL file to write")
    parser.add_argument("--text", type=int, default=512, help="tokens so far")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16", help="dtype of both models")
    parser.add_argument("--repeats", type=int, default=15, help="rounds of each; the median counts")
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and text")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    rows = measure(options.text, DTYPES[options.dtype], options.repeats)
    print(f"{'ms a round':<28}{'rollout':>10}{'':>8}{'verification':>14}")
    for row in rows:
        cells = f"{row['rollout_ms']:>10.2f}{row['rollout_ratio']:>7.2f}x{row['verification_ms']:>13.2f}"
        print(f"{row['processors']:<28}{cells}{row['verification_ratio']:>7.2f}x")
    if options.rows:
        names = ("text", "dtype", "repeats", "threads", "seed")
        origin = SIZES | DRAFTER | {name: getattr(options, name) for name in names} | provenance()
        options.rows.write_text("".join(json.dumps(row | origin) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
