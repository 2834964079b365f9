"""A vLLM plugin, with which vLLM's server can serve Domino drafters.

vLLM calls `plugin` in each of its processes, and `plugin` registers the name of a model. `vllm_model` is that model,
and `vllm_faults` works around faults of vLLM on a CPU; only these two modules cannot be imported without vLLM.
`settings` checks which drafters and server settings are supported, and `head` runs the correction head. The model
serves other people's DFlash drafters in the same way as vLLM's own model.

The plugin relies on these parts of vLLM, read in 0.32.0 and 0.33.0 (B requests, P proposals):

- `plugins/__init__.py`, `load_general_plugins`: calls the entry points of `vllm.general_plugins` in every process. It
  catches errors while an entry point is loaded, but not while it is called.
- `model_executor/models/registry.py`, `ModelRegistry.register_model`: a second `"module:Class"` replaces the first.
- `transformers_utils/configs/eagle.py`, `EAGLEConfig`: keeps the names of classes that begin or end in `DFlash`.
- `model_executor/models/qwen3_dflash.py`, `DFlashQwen3ForCausalLM` and `DFlashQwen3Model`: the base classes.
- `model_executor/models/qwen3_dflash2.py`, `DFlash2Qwen3DecoderLayer`: convolutions inside blocks, with the sizes of
  `dflash_config`. Row i is position `i % (1 + P)` of its block, so padding, which follows all blocks, changes nothing.
- `v1/spec_decode/llm_base_proposer.py`, `SpecDecodeBaseProposer`: requires that class (`propose`), and proposes the
  argmax of `compute_logits` (`_greedy_sample`).
- `v1/sample/rejection_sampler.py`, `expand_batch_to_tokens`: one temperature per proposal; has a fault on a CPU.
- `_custom_ops.py`, `CPUDNNLGEMMHandler.__del__`: reads a tensor when a matrix of oneDNN is freed; has a fault on a CPU.
- `v1/spec_decode/dflash.py`, `DFlashProposer.set_inputs_first_pass`: makes rows `[B (1 + P)]`, request by request. The
  first row of a request is its anchor, and logits are computed for the other P.
- `v1/worker/gpu/spec_decode/dflash/speculator.py`, `DFlashSpeculator`: does the same in the runner that vLLM uses where
  Triton has a backend. This code was read, but not run.
"""
