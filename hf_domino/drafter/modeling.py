"""`DominoDraftModel`: the model that a drafter of any kind is, loaded, saved, viewed and counted in one way.

What it drafts by is its kind's, in `hf_domino.kinds`. Embeddings and lm_head are the target's and are not stored.

Shapes: B batch, C new context positions, H hidden size, L captured layers.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_domino._common.refusal import refusal
from hf_domino.configuration import DominoConfig
from hf_domino.drafter.stats import DecodingStats, last_stats
from hf_domino.drafter.vocabulary import DraftVocabulary, ReducedVocabulary, restrict
from hf_domino.formats.adapters import load_adapted
from hf_domino.formats.exporting import Export
from hf_domino.formats.exporting import export as export_drafter
from hf_domino.formats.fields import TARGET_TENSORS
from hf_domino.formats.loading import check_loaded, translate
from hf_domino.formats.standalone import write_bundle
from hf_domino.kinds.backbone import ZeroLinear
from hf_domino.kinds.block import CorrectionHead
from hf_domino.kinds.domino import PrefixGRU
from hf_domino.kinds.kind import Kind


class DominoDraftModel(PreTrainedModel):
    """A drafter: reads target hidden states and proposes a block of tokens in one parallel pass.

    Pass it as `assistant_model` to `generate` or to a text-generation pipeline. Its kind is the configuration's
    `projector_type`.

    Args:
        config (`DominoConfig`): Sizes and conventions; see [`DominoConfig.for_target`].

    Example:
    ```python
    >>> from transformers import Qwen3Config
    >>> from hf_domino import DominoConfig, DominoDraftModel
    >>> target_config = Qwen3Config(
    ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
    ...     num_key_value_heads=1, head_dim=16,
    ... )
    >>> drafter = DominoDraftModel(DominoConfig.for_target(target_config, block_size=8))
    >>> drafter.has_correction_head, drafter.config.num_draft_tokens
    (True, 8)

    ```
    """

    config_class = DominoConfig
    base_model_prefix = "model"
    main_input_name = "noise_embeds"
    input_modalities = ("text",)
    _no_split_modules = ["BackboneLayer"]
    _supports_sdpa = True
    supports_gradient_checkpointing = True
    _keys_to_ignore_on_load_unexpected = list(TARGET_TENSORS)
    prefix_gru: PrefixGRU  # of Domino
    embed_proj: nn.Sequential

    def __init__(self, config: DominoConfig):
        config.check()  # `from_pretrained` sets fields after it has built the configuration
        super().__init__(config)
        self.kind.build()
        if config.draft_vocab_size is not None:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.post_init()

    @property
    def kind(self) -> Kind:
        """Its configuration's kind, drafting by its weights."""
        return self.config.kind(self)

    @property
    def has_correction_head(self) -> bool:
        """Whether drafts are corrected token by token (Domino, DSpark) or taken as they are (DFlash)."""
        return bool(self.config.kind.head_layers)

    @property
    def head(self) -> CorrectionHead | None:
        """What corrects them."""
        return self.kind.head

    @property
    def vocabulary(self) -> DraftVocabulary:
        """The target's tokens that it proposes."""
        if self.config.draft_vocab_size is None:
            return DraftVocabulary()
        return ReducedVocabulary(self.config.vocab_size, self.d2t)

    @property
    def stats(self) -> DecodingStats:
        """Statistics of the calling thread's last assisted `generate` with this drafter, or else of any thread's.

        A call that streams has its own as `streamer.stats`, one with `return_dict_in_generate` as `output.stats`.

        Raises:
            RuntimeError: If no thread has generated with it yet.
        """
        return last_stats(self)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to generate: a drafter has no law of its own.

        Raises:
            ValueError: Always, saying which call is meant.
        """
        remedy = "Call target.generate(..., assistant_model=drafter)."
        raise refusal("the model that generates", "the target, which a drafter only assists", "a drafter", remedy)

    def view(self, **changes: Any) -> DominoDraftModel:
        """A second drafter over the same weights, with fields of the configuration changed; this one stays as it is.

        Args:
            changes: Fields of [`DominoConfig`] that do not change the weights' shapes, such as `draft_length`.

        Raises:
            ValueError: If there is no such field, or its value is out of range.

        Example:
        ```python
        >>> from hf_domino import DominoConfig, DominoDraftModel
        >>> sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
        >>> drafter = DominoDraftModel(DominoConfig(**sizes, mask_token_id=3, emb_dim=8, gru_hidden_dim=8))
        >>> drafter.view(draft_length="full").config.draft_length, drafter.config.draft_length
        ('full', 'adaptive')

        ```
        """
        view = copy.copy(self)
        view.config = copy.deepcopy(self.config)
        DominoConfig.refuse_unknown(changes)
        for field, value in changes.items():
            setattr(view.config, field, value)
        if view.config.draft_vocab_size != self.config.draft_vocab_size:
            remedy = "Take a copy with fewer tokens: drafter.restricted(token_ids)."
            raise refusal("draft_vocab_size", self.config.draft_vocab_size, view.config.draft_vocab_size, remedy)
        view.config.check()
        shapes, own = (each.kind.shapes(each) for each in (view.config, self.config))
        if not shapes.items() <= own.items():
            remedy = "Make a drafter of that shape: DominoDraftModel(DominoConfig.for_target(target.config, ...))."
            raise refusal(f"{', '.join(changes)} of a view", "of the drafter's own weights", changes, remedy)
        return view

    def restricted(self, token_ids: Sequence[int] | torch.Tensor) -> DominoDraftModel:
        """A copy that proposes some of the target's tokens only: base logits and W2 are of these alone.

        Whatever is left out costs acceptance where the target says it, never exactness.

        Args:
            token_ids (`Sequence[int]` or `torch.Tensor`): The target's ids, in any order; the most frequent ones.

        Raises:
            ValueError: If an id is there twice or not among those that the drafter proposes, or if tensors are not the
                drafter's own (adapters, quantised weights).

        Example:
        ```python
        >>> from hf_domino import DominoConfig, DominoDraftModel
        >>> sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
        >>> drafter = DominoDraftModel(DominoConfig(**sizes, mask_token_id=3, emb_dim=8, gru_hidden_dim=8))
        >>> small = drafter.restricted([4, 63, 9])
        >>> small.config.draft_vocab_size, small.vocabulary.token_ids.tolist(), small.embed_proj[2].weight.shape
        (3, [4, 9, 63], torch.Size([3, 8]))

        ```
        """
        return restrict(self, token_ids)

    def fuse_context(self, hidden_states: Sequence[torch.Tensor]) -> torch.Tensor:
        """Fuse target hidden states into context features.

        Args:
            hidden_states (`Sequence[torch.Tensor]`): L tensors `[B, C, H]`, the outputs of `config.target_layer_ids`.

        Returns:
            `torch.Tensor`: Context features `[B, C, H]` in the drafter's dtype.
        """
        return self.kind.fuse_context(hidden_states)

    def forward(self, *args: Any, within: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Run the weights as its kind does, or whatever else needs them.

        Args:
            args, kwargs: Of its kind's [`~kinds.kind.Kind.forward`].
            within (`Callable`, *optional*): Called in its place. Wrappers such as `DistributedDataParallel` follow
                gradients of what runs inside a forward.

        Returns:
            `torch.Tensor`: Draft hidden states `[B, Q, H]`, or what `within` returns.
        """
        return self.kind.forward(*args, **kwargs) if within is None else within()

    def get_input_embeddings(self) -> None:
        """Return None: embeddings are the target's. Sharding by `accelerate` asks."""
        return None

    def export(self, folder: str | os.PathLike, format: str = "specforge", **options: Any) -> Export:
        """Write the drafter for other projects; which serving engines will take the folder is said before.

        Args:
            folder (`str` or `PathLike`): Where to write; a checkpoint in it is an error unless `overwrite=True`.
            format (`str`, *optional*, defaults to `"specforge"`): The layouts that SGLang and vLLM read, of SpecForge,
                z-lab and, for DSpark, DeepSpec; or `"speculators"` (no Domino).
            options: `engine`, the name of one that must take the folder (`"sglang"`, `"vllm"`, `"dflash"`); `dtype` of
                the weights (defaults to bfloat16); `overwrite`; `max_shard_size` (defaults to `"5GB"`); `target`, of
                which speculators' format holds rows of lm_head where there is a draft vocabulary.

        Returns:
            [`~formats.exporting.Export`]: The files, and what each engine will not take.

        Raises:
            ValueError: If the format cannot hold such a drafter, the engine will not take it, the folder is not empty,
                or tensors are not the drafter's own (adapters, quantised weights). Nothing is written then.
        """
        return export_drafter(self, Path(folder), format, **options)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, ZeroLinear):
            nn.init.zeros_(module.weight)
        else:
            super()._init_weights(module)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> DominoDraftModel:
        """Load a drafter from a folder or the Hub; arguments are those of [`~transformers.PreTrainedModel`].

        Checkpoints of other projects are recognised by their configuration: SpecForge, z-lab's DFlash, speculators,
        Model-Optimizer, Transformers' own DFlash drafter, and the layouts of EAGLE-3. The folder or Hub name of a PEFT
        adapter loads the drafter that it names, with the adapter merged into its weights.

        Raises:
            ValueError: If weights are missing, misshapen or of the other `projector_type`: random weights would draft
                garbage without a word. Also if there is no such folder or Hub name, or a drafter of another kind in it.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        token_ids = translate(pretrained_model_name_or_path, kwargs)
        name = pretrained_model_name_or_path
        if kwargs.get("config") is None and isinstance(name, (str, os.PathLike)):
            model, info = load_adapted(cls.from_pretrained, name, *args, **kwargs)
        else:
            model, info = super().from_pretrained(name, *args, output_loading_info=True, **kwargs)
            check_loaded(model.state_dict(), info["missing_keys"])
            if model.config.draft_vocab_size is not None:
                model.d2t = model.d2t.long()
            if token_ids is not None:
                model = restrict(model, token_ids, model.name_or_path)
        model._weight_conversions = []  # saved under our names, with our configuration
        model.config._commit_hash = getattr(kwargs.get("revision"), "resolved", None)  # on the Hub
        return (model, info) if wants_info else model  # type: ignore[return-value]

    def save_pretrained(self, save_directory: Any, *args: Any, standalone: bool = False, **kwargs: Any) -> None:
        """Save the drafter; arguments are those of [`~transformers.PreTrainedModel`].

        Args:
            save_directory (`str` or `Path`): The folder.
            standalone (`bool`, *optional*, defaults to `False`): Also write `custom_generate/`: this package's code,
                with which `target.generate(..., custom_generate=folder, trust_remote_code=True)` needs only torch and
                transformers.

        Raises:
            ValueError: With both `standalone` and `push_to_hub`.
        """
        self.config.kind.refuse_what_it_lacks("save_pretrained")
        if standalone and kwargs.get("push_to_hub"):
            remedy = "It would not be uploaded: save the folder, and send it by hf-domino push."
            raise refusal("push_to_hub of save_pretrained with standalone=True", False, True, remedy)
        super().save_pretrained(save_directory, *args, **kwargs)
        if standalone and kwargs.get("is_main_process", True):
            write_bundle(save_directory)


def recycling(target: PreTrainedModel, **fields: Any) -> DominoDraftModel:
    """Make a drafter that needs no training: it proposes what the target has given before (arXiv 2408.08696).

    Of each token it keeps the eight likeliest successors, as the target gave them last, from one call to the next. So
    keep the drafter, too.

    Args:
        target (`PreTrainedModel`): The target it is for, on its device.
        fields: Fields of [`DominoConfig`], such as `draft_tree_size` (defaults to 32 nodes) or `block_size` (defaults
            to paths of 8).

    Raises:
        ValueError: If the target is no model, or a field is unknown or out of its range.

    Example:
    ```python
    >>> import torch
    >>> from transformers import Qwen3Config, Qwen3ForCausalLM
    >>> import hf_domino
    >>> target = Qwen3ForCausalLM(Qwen3Config(
    ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    ...     num_key_value_heads=1, head_dim=16,
    ... ))
    >>> drafter, ids = hf_domino.recycling(target), torch.tensor([[5, 9, 33]])
    >>> options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    >>> torch.equal(target.generate(ids, assistant_model=drafter, **options), target.generate(ids, **options))
    True

    ```
    """
    embeddings = getattr(target, "get_input_embeddings", lambda: None)()
    if embeddings is None:
        remedy = "Pass the model itself, as from_pretrained returned it."
        raise refusal("target", "a causal language model", type(target).__name__, remedy)
    device = embeddings.weight.device
    config = DominoConfig.for_target(target.config, projector_type="recycling", **fields)
    with torch.inference_mode(False):  # the table is written to later, in any mode
        return DominoDraftModel(config).to("cpu" if device.type == "meta" else device)
