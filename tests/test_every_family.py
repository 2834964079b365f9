"""Every causal language model of the installed Transformers is exact, or refused before any forward.

Proposals are the target's own continuation with a fault in every place in turn, so that every acceptance length occurs.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from builders import build_drafter, left_padded
from families import MODEL_TYPES, VOCAB_SIZE, build
from oracle import faults, tree_faults

NEW_TOKENS = 43  # two cycles of faults
LOGITS_TOL = {"atol": 1e-4, "rtol": 1e-4}  # fp32 sums in another order, through four layers
PROMPTS = [torch.arange(7, 27), torch.arange(40, 45), torch.arange(30, 41)]
IN_CI = (
    "bamba",
    "bart",
    "deepseek_v3",
    "dots3_note_text",
    "zamba2",
)  # latent and sparse keys too

_WIDTH = "forward over several new positions equals plain decode steps"
_CACHE, _STREAMS = "target's cache must be", "stream"
# Families that no drafter serves, with words of the reason.
REFUSED = {
    **dict.fromkeys(("cpmant", "doge", "jamba", "moshi", "nemotron_h", "prophetnet"), _WIDTH),
    **dict.fromkeys(("recurrent_gemma", "zamba", "zamba2"), _WIDTH),
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2", "minimax", "openai-gpt", "reformer", "rwkv", "xlm"), _CACHE),
    **dict.fromkeys(("xlnet",), _CACHE),
    **dict.fromkeys(("deepseek_v4", "gemma3n_text", "hy_v4", "qwen4_exp", "qwen4_exp_text"), _STREAMS),
    "longcat_flash": "num_layers",
    "mllama": "cross_attention_layers",
}
_LAYERS, _COLUMNS = "made of dynamic attention layers", "takes position_ids"
# Families whose prompts are generated one at a time, with words of the reason.
ALONE = {
    **dict.fromkeys(("axk2", "bailing_hybrid", "bamba", "deepseek_v32", "dots3_note", "dots3_note_text"), _LAYERS),
    **dict.fromkeys(("falcon_h1", "glm_moe_dsa", "granitemoehybrid", "inkling2_text", "inkling_text"), _LAYERS),
    **dict.fromkeys(("kimi_linear", "lfm2", "lfm2_moe", "lfm3", "minimax_m3_vl_text", "olmo_hybrid"), _LAYERS),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "zaya"), _LAYERS),
    **dict.fromkeys(("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "git", "marian", "mbart"), _COLUMNS),
    **dict.fromkeys(("moss_transcribe_diarize", "mvp", "pegasus", "plbart", "roformer", "trocr", "whisper"), _COLUMNS),
    **dict.fromkeys(("llama4", "llama4_text"), "floor_scale"),
}
NOT_BUILT = {
    "blt": "its own generate fails with a cache: its configuration counts no layers",
    "gemma3n": "its vision tower needs timm",
    "gemma4_assistant": "the configuration's own defaults are refused; it drafts for Gemma 4 and is no model by itself",
    "gemma4_unified_assistant": "it drafts for Gemma 4 and is no model by itself",
    "musicgen": "the mapping names a configuration that its class does not take",
    "musicgen_melody": "the mapping names a configuration that its class does not take",
    "xlstm": "its own generate fails where the value heads are small",
}


def refusal_of(target, batch_size, do_sample):
    """None where a call is exact, and why it was refused where it was."""
    ids, mask = left_padded(PROMPTS[:batch_size])
    options = {"attention_mask": mask, "do_sample": do_sample, "max_new_tokens": NEW_TOKENS, "use_cache": True}
    options |= {"eos_token_id": -1, "pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True}
    torch.manual_seed(0)
    plain, forwards = target.generate(ids, **options), []
    handle = target.register_forward_pre_hook(lambda *args: forwards.append(args))
    try:
        drafter = build_drafter(target)
        with faults(plain.sequences.tolist(), VOCAB_SIZE):
            torch.manual_seed(0)
            assisted = target.generate(ids, assistant_model=drafter, **options)
    except ValueError as error:
        assert not forwards
        return str(error)
    finally:
        handle.remove()
    lengths = {length for row in drafter.stats.rows for length in row}
    assert lengths == set(range(1, drafter.config.num_draft_tokens + 2))
    assert torch.equal(assisted.sequences, plain.sequences)
    # Not scores: of two logits equal up to rounding, top-k may keep either.
    torch.testing.assert_close(torch.stack(assisted.logits), torch.stack(plain.logits), **LOGITS_TOL)
    return None


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=() if name in IN_CI else pytest.mark.slow) for name in MODEL_TYPES]
)
def test_exact_or_refused(model_type):
    if model_type in NOT_BUILT:
        pytest.skip(f"{model_type} of transformers {transformers.__version__}: {NOT_BUILT[model_type]}")
    target = build(model_type)
    alone, batched = REFUSED.get(model_type), (ALONE | REFUSED).get(model_type)
    for batch_size, do_sample, expected in (
        (1, False, alone),
        (1, True, alone),
        (3, False, batched),
        (3, True, batched),
    ):
        refusal = refusal_of(target, batch_size, do_sample)
        assert (refusal is None) == (expected is None), refusal
        assert expected is None or expected in refusal


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted({*MODEL_TYPES} - {*REFUSED, *NOT_BUILT}))
def test_trees_are_exact(model_type):
    target, prompt = build(model_type), PROMPTS[0][None]
    drafter = build_drafter(target, draft_tree_size=11)
    for do_sample in (False, True):
        options = {"do_sample": do_sample, "max_new_tokens": NEW_TOKENS, "eos_token_id": -1, "use_cache": True}
        torch.manual_seed(0)
        plain = target.generate(prompt, **options)
        torch.manual_seed(0)
        with tree_faults(plain.tolist(), VOCAB_SIZE, 11):
            assert torch.equal(target.generate(prompt, assistant_model=drafter, **options), plain)
