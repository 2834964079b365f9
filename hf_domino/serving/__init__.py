"""Domino inside vLLM: a plugin that lets its server take a drafter of ours.

`plugin` is what vLLM calls in each of its processes: it hands over a name. `vllm_model` is the model behind that name
and `vllm_faults` mends what a CPU does wrong: these two alone import vLLM. `settings` says what of a folder and of
a server's settings is taken, `head` has the mathematics. Other people's DFlash drafters go through the model as through
vLLM's own.

What it leans on, read in vLLM 0.32.0 and 0.33.0:

- `plugins/__init__.py`, `load_general_plugins`: calls the entry points of `vllm.general_plugins` in every process; an
  error of loading one is caught, of calling it is not.
- `model_executor/models/registry.py`, `ModelRegistry.register_model`: a second `"module:Class"` replaces the first.
- `transformers_utils/configs/eagle.py`, `EAGLEConfig`: keeps names of classes that begin or end in `DFlash`.
- `model_executor/models/qwen3_dflash.py`, `DFlashQwen3ForCausalLM` and `DFlashQwen3Model`: what is built upon.
- `model_executor/models/qwen3_dflash2.py`, `DFlash2Qwen3DecoderLayer`: convolutions of blocks, whose sizes are those of
  `dflash_config`. Row i is position `i % (1 + P)` of its block, so padding, which is behind all blocks, changes none.
- `v1/spec_decode/llm_base_proposer.py`, `SpecDecodeBaseProposer`: insists on that class (`propose`) and takes the
  argmax of `compute_logits` for proposals (`_greedy_sample`).
- `v1/sample/rejection_sampler.py`, `expand_batch_to_tokens`: one temperature per proposal; a fault on a CPU.
- `_custom_ops.py`, `CPUDNNLGEMMHandler.__del__`: reads a tensor when a matrix of oneDNN is freed; a fault on a CPU.
- `v1/spec_decode/dflash.py`, `DFlashProposer.set_inputs_first_pass`: rows `[B (1 + P)]` of which each request's first
  is the anchor and the other P are asked for logits, request by request.
- `v1/worker/gpu/spec_decode/dflash/speculator.py`, `DFlashSpeculator`: the same of the runner where Triton has a
  backend. Read, not run.
"""
