"""What a target sees of a tree: in each row, behind padding, with windows: each node's text, and nothing else."""

from __future__ import annotations

import pytest
import torch
from builders import left_padded
from families import build
from transformers import DynamicCache

from hf_domino._common.cache_name import CACHE
from hf_domino.decoding.tree import Tree, tree_inputs

PROMPTS = [torch.arange(7, 27), torch.arange(40, 43), torch.arange(30, 41)]
TOL = {"atol": 1e-4, "rtol": 1e-4}  # fp32 sums in another order, through four layers
# Node by node its parent's position: bushes, and paths of up to ten.
PARENTS = [[0, 1, 1, 0, 3, 2, 4, 5, 6, 0], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [0, 0, 0, 3, 3, 4, 2, 7, 7, 9]]


@torch.no_grad()
@pytest.mark.parametrize(("attention", "window"), [("sdpa", 4), ("eager", 16)])
@pytest.mark.parametrize("knows_windows", [True, False])
@pytest.mark.parametrize("model_type", ["gemma3_text", "gemma4_text", "mistral"])
def test_each_node_sees_its_own_text(model_type, knows_windows, window, attention):
    target = build(model_type, sliding_window=window)
    target.set_attn_implementation(attention)
    tree = Tree(torch.arange(30).view(3, 10) + 50, torch.tensor(PARENTS))
    ids, mask = left_padded(PROMPTS)
    cache = DynamicCache(config=target.config if knows_windows else None)
    target(input_ids=ids, attention_mask=mask, position_ids=mask.cumsum(1).sub(1).clamp_min(0), past_key_values=cache)
    block = torch.nn.functional.pad(tree.tokens, (1, 0), value=49)
    inputs = {"input_ids": block, CACHE: cache, "use_cache": True}
    inputs |= {"attention_mask": torch.nn.functional.pad(mask, (0, 11), value=1)}
    inputs |= {"position_ids": mask.sum(dim=1, keepdim=True) + torch.arange(11)}
    logits = target(**tree_inputs(tree.depths, tree.sees, inputs, target)).logits
    for row, prompt in enumerate(PROMPTS):
        for node in range(11):
            text = torch.cat((prompt, block[row, tree.sees[row, node]]))
            torch.testing.assert_close(logits[row, node], target(text[None]).logits[0, -1], **TOL)
