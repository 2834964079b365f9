"""Make zlab.safetensors: a tiny drafter of z-lab's own class, two rounds of inputs, and what the class returns.

In an environment of its own, where hf_domino cannot run (PyPI's dflash 0.1.0, MIT, wants transformers 5.15):

    pip install torch==2.13.0 transformers==5.15.0 && pip install --no-deps dflash==0.1.0
    python tests/formats/make_zlab_fixture.py
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import torch
from dflash.model import DFlashDraftModel
from safetensors.torch import save_file
from transformers import DynamicCache, Qwen3Config

FILE = Path(__file__).with_name("zlab.safetensors")
SEED, STD = 0, 0.2
CONFIG = {
    "architectures": ["DFlashDraftModel"],
    "block_size": 6,
    "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 2]},
    "dtype": "float32",
    "head_dim": 8,
    "hidden_size": 32,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_target_layers": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "vocab_size": 64,
}
# Context that each round adds; the second round's block is behind both.
FIRST, SECOND = 9, 3


@torch.no_grad()
def main() -> None:
    """Write the fixture beside this script."""
    torch.manual_seed(SEED)
    model = DFlashDraftModel(Qwen3Config(**CONFIG)).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=STD)
    block, width = CONFIG["block_size"], CONFIG["hidden_size"]
    layers = len(CONFIG["dflash_config"]["target_layer_ids"])
    inputs = {
        "target_hidden": torch.randn(1, FIRST + SECOND, layers * width),
        "noise": torch.randn(2, 1, block, width),
        "lm_head": torch.randn(CONFIG["vocab_size"], width) * STD,
    }
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()  # as its own `generate` does
    logits, start = [], 0
    for index, end in enumerate((FIRST, FIRST + SECOND)):
        hidden = model(
            position_ids=torch.arange(start, end + block)[None],
            noise_embedding=inputs["noise"][index],
            target_hidden=inputs["target_hidden"][:, start:end],
            past_key_values=cache,
            use_cache=True,
        )
        cache.crop(-block)
        logits.append(hidden @ inputs["lm_head"].T)
        start = end
    tensors = {f"weights.{name}": tensor for name, tensor in model.state_dict().items()}
    tensors |= {f"inputs.{name}": tensor for name, tensor in inputs.items()}
    versions = {name: version(name) for name in ("dflash", "transformers", "torch")}
    metadata = {"config": json.dumps(CONFIG), "versions": json.dumps(versions)}
    save_file(tensors | {"logits": torch.stack(logits)}, FILE, metadata=metadata)


if __name__ == "__main__":
    main()
