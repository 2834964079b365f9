"""The rollout on a CPU at the head shapes of Qwen3-8B: ours against two published schemes, re-derived here.

    python model_cards/workshop/benchmarks/compare_rollouts.py --results rollouts.jsonl

Four ways to choose the 16 proposals of a block from the same base logits (the lm_head is not counted):

- `whole_block`, as in SpecForge's sampler: at every step the GRU reads the whole block again, and the whole head is
  applied to all its positions;
- `stepwise`, as in the Domino authors' code: one GRU step and the whole head for one position at every step;
- `exact`: ours with `draft_pool_size=None`;
- `pool`: ours as it is by default.

The head is the bundled drafter's, its matrices filled up with zeros to the larger sizes, and so are the draft hidden
states and base logits of real rounds: the arithmetic is that of Qwen3-8B, the choices are those of a trained drafter.
The larger vocabulary is the bundled pair's over and over, each further time less likely. Rounds follow each other
as in one generation, so what ours keeps between rounds is built up within the time that is counted. Ratios of totals
count, not milliseconds.

Shapes: K block size, P proposals (P = K), H hidden size, G width of the prefix state, R low rank, V vocabulary.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from transformers import LogitsProcessorList

from hf_domino import DominoConfig, DominoDraftModel
from hf_domino._common.provenance import provenance
from hf_domino.decoding.branches import Branches
from hf_domino.decoding.drafting import ContextSession
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.sampling import TokenDistribution
from hf_domino.evaluation.results import Result, to_lines
from hf_domino.methods.scorer import Drafted
from hf_domino.pair import Pair, load_pair, read_prompts
from hf_domino.targets.view import TargetModel

HEAD_8B = {"hidden_size": 4096, "gru_hidden_dim": 1024, "emb_dim": 256, "vocab_size": 151_936, "block_size": 16}
HEAD_TINY = {"hidden_size": 320, "gru_hidden_dim": 288, "emb_dim": 144, "vocab_size": 6_000, "block_size": 16}
DEFAULT_POOL = DominoConfig.draft_pool_size
GREEDY = TokenDistribution(LogitsProcessorList())
ACCEPTED = 4  # tokens from one recorded round to the next
BEHIND = 12.0  # how far the base logits of a token's doubles lie below its own, at least


@dataclass(frozen=True)
class Block:
    """One round's input: anchor `[1]`, base logits `[1, P, V]`, draft hidden states `[1, P, H]`."""

    anchor: torch.Tensor
    base_logits: torch.Tensor
    draft_hidden: torch.Tensor


class Head(TargetModel):
    """A target of which there are only the embeddings, and base logits set beforehand in place of an lm_head's."""

    def __init__(self, embeddings: torch.Tensor):
        self.embeddings, self.base_logits = embeddings, torch.empty(0)

    def embed(self, token_ids: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        """Rows `[..., H]` of the embeddings."""
        return F.embedding(token_ids, self.embeddings)

    def logits(self, hidden_states: torch.Tensor, head: object = None, scaling: object = None) -> torch.Tensor:
        """The base logits that were set."""
        return self.base_logits


class Recorder(TargetModel):
    """A target that keeps the draft hidden states it was given and the base logits it gave."""

    seen: tuple[torch.Tensor, torch.Tensor]

    def logits(self, hidden_states: torch.Tensor, head: object = None, scaling: object = None) -> torch.Tensor:
        """The target's logits `[..., V]`."""
        logits = super().logits(hidden_states)
        self.seen = hidden_states, logits
        return logits


@torch.no_grad()
def record(pair: Pair, num_blocks: int) -> Iterator[Block]:
    """Yield successive rounds of the bundled pair along texts it writes itself."""
    view = Recorder(pair.target, pair.drafter.config.layer_ids(pair.target.config))
    for prompt in read_prompts(pair.folder / "prompts.jsonl"):
        inputs = pair.tokenizer(prompt["text"], return_tensors="pt")
        ids = pair.target.generate(**inputs, max_new_tokens=min(128, num_blocks * ACCEPTED), do_sample=False)
        captured = view.captured(pair.target(ids, **view.capture_kwargs()))
        session, seen = ContextSession(pair.drafter, view, GREEDY), 0
        for stop in range(inputs["input_ids"].shape[1], ids.shape[1] - 1, ACCEPTED):
            session.observe(tuple(states[:, seen:stop] for states in captured), stop)
            session.propose(Prefixes.of(ids[:, : stop + 1]), pair.drafter.config.num_draft_tokens)
            draft_hidden, base_logits = view.seen
            yield Block(ids[0, stop : stop + 1], base_logits, draft_hidden)
            seen, num_blocks = stop, num_blocks - 1
            if not num_blocks:
                return


def widen(block: Block, config: DominoConfig, dtype: torch.dtype) -> Block:
    """A block of the larger sizes; where the recorded one is shorter, its last position repeats."""
    recorded, num_positions = block.base_logits[0], config.num_draft_tokens
    positions = torch.arange(num_positions).clamp_max(len(recorded) - 1)
    doubles = torch.arange(config.vocab_size) % recorded.shape[1]
    base = recorded[positions][:, doubles] - BEHIND - torch.empty(config.vocab_size).exponential_()
    base[:, : recorded.shape[1]] = recorded[positions]
    hidden = filled(block.draft_hidden[0, positions], (num_positions, config.hidden_size), dtype)
    return Block(block.anchor, base[None], hidden[None])


def filled(values: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Values in the first places of each dimension, zeros elsewhere."""
    result = torch.zeros(shape, dtype=dtype)
    result[tuple(slice(size) for size in values.shape)] = values.to(dtype)
    return result


@torch.no_grad()
def build_head(pair: Pair, config: DominoConfig, dtype: torch.dtype) -> tuple[DominoDraftModel, Head]:
    """A drafter with the bundled drafter's head at the larger sizes, and embeddings."""
    small, drafter = pair.drafter, DominoDraftModel(config).to(dtype).eval()
    size, wide, hidden = small.config.gru_hidden_dim, config.gru_hidden_dim, small.config.hidden_size
    for name in ("weight_ih_l0", "weight_hh_l0"):
        weight = getattr(small.prefix_gru, name).view(3, size, -1)
        columns = getattr(drafter.prefix_gru, name).shape[1]
        getattr(drafter.prefix_gru, name).copy_(filled(weight, (3, wide, columns), dtype).view(3 * wide, columns))
    down, up = (cast(torch.nn.Linear, small.embed_proj[place]).weight for place in (0, 2))
    parts = [(down[:, :hidden], config.hidden_size), (down[:, hidden:], wide)]
    drafter.embed_proj[0].weight.copy_(
        torch.cat([filled(part, (config.emb_dim, columns), dtype) for part, columns in parts], dim=1)
    )
    doubles = torch.arange(config.vocab_size) % len(up)
    drafter.embed_proj[2].weight.copy_(filled(up[doubles], (len(doubles), config.emb_dim), dtype))
    embeddings = pair.target.get_input_embeddings().weight[doubles]
    return drafter, Head(filled(embeddings, (len(doubles), config.hidden_size), dtype))


def whole_block(drafter: DominoDraftModel, head: Head, block: Block) -> torch.Tensor:
    """Every step reads and corrects the whole block; position i keeps its choice from step i."""
    gru, projection = drafter.prefix_gru, drafter.embed_proj
    num_positions = block.base_logits.shape[1]
    tokens = torch.full((1, num_positions + 1), drafter.config.mask_token_id)
    tokens[:, 0] = block.anchor
    for index in range(num_positions):
        states = gru(head.embed(tokens[:, :-1]))
        corrected = block.base_logits + projection(torch.cat((block.draft_hidden, states), dim=-1))
        tokens[:, index + 1] = corrected[:, index].argmax(dim=-1)
    return tokens[:, 1:]


def stepwise(drafter: DominoDraftModel, head: Head, block: Block) -> torch.Tensor:
    """Every step reads one token and corrects one position by the whole head."""
    gru, projection = drafter.prefix_gru, drafter.embed_proj
    token, state, tokens = block.anchor, gru.initial_state(1), []
    for index in range(block.base_logits.shape[1]):
        state = torch.gru_cell(head.embed(token), state, gru.weight_ih_l0, gru.weight_hh_l0)
        correction = projection(torch.cat((block.draft_hidden[:, index], state), dim=-1))
        token = (block.base_logits[:, index] + correction).argmax(dim=-1)
        tokens.append(token)
    return torch.stack(tokens, dim=1)


class Ours:
    """`hf_domino`'s rollout, with the table that a generation keeps."""

    def __init__(self, drafter: DominoDraftModel, head: Head, pool_size: int | None):
        self.pool_size = pool_size
        self.scorer = drafter.scorer(head)

    def __call__(self, drafter: DominoDraftModel, head: Head, block: Block) -> torch.Tensor:
        """Proposals `[1, P]`."""
        drafter.config.draft_pool_size, head.base_logits = self.pool_size, block.base_logits
        prefixes = Prefixes.of(block.anchor[None])
        self.scorer.begin(Drafted(block.draft_hidden, prefixes.last()))
        return Branches(self.scorer, prefixes, GREEDY).chain()


@torch.no_grad()
def compare(drafter: DominoDraftModel, head: Head, blocks: list[Block]) -> dict[str, dict[str, Any]]:
    """Time all schemes block by block, one after the other; returns the figures of each."""
    schemes: dict[str, Callable[..., torch.Tensor]] = {
        "whole_block": whole_block,
        "stepwise": stepwise,
        "exact": Ours(drafter, head, None),
        "pool": Ours(drafter, head, DEFAULT_POOL),
    }
    for name in ("whole_block", "stepwise"):
        schemes[name](drafter, head, blocks[0])  # warm-up; ours get none
    seconds = dict.fromkeys(schemes, 0.0)
    num_equal = dict.fromkeys(schemes, 0)
    for block in blocks:
        chosen = {}
        for name, scheme in schemes.items():
            start = time.perf_counter()
            chosen[name] = scheme(drafter, head, block)
            seconds[name] += time.perf_counter() - start
            num_equal[name] += int(torch.equal(chosen[name], chosen["whole_block"]))
    return {
        name: {
            "ms_per_block": 1e3 * seconds[name] / len(blocks),
            "speed_up_over_whole_block": seconds["whole_block"] / seconds[name],
            "speed_up_over_stepwise": seconds["stepwise"] / seconds[name],
            "blocks_equal_to_whole_block": num_equal[name],
            "extra_bytes": scheme.scorer.num_bytes if isinstance(scheme, Ours) else 0,
        }
        for name, scheme in schemes.items()
    }


def main() -> None:
    """Measure in the chosen dtypes, print a table and write rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="JSONL file to write")
    parser.add_argument("--blocks", type=int, default=64, help="rounds to time (default: 64, some 256 tokens)")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], help="dtypes of the head")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, to see that it runs")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    shape = HEAD_TINY if options.dry_run else HEAD_8B
    sizes = {"num_hidden_layers": 1, "intermediate_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1}
    config = DominoConfig(**shape, **sizes, target_layer_ids=[1], mask_token_id=5_000)
    pair, rows = load_pair(), []
    recorded = list(record(pair, options.blocks))
    for dtype in options.dtypes:
        torch.manual_seed(options.seed)
        wide = getattr(torch, dtype)
        settings = {"dtype": dtype, "blocks": len(recorded), "draft_pool_size": DEFAULT_POOL, "seed": options.seed}
        blocks = [widen(block, config, wide) for block in recorded]
        for scheme, figures in compare(*build_head(pair, config, wide), blocks).items():
            rows.append(Result(scheme, settings | shape, figures, provenance()))
            print(rows[-1].to_line(), end="")
    if options.results:
        options.results.write_text(to_lines(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
