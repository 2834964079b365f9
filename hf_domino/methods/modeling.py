"""`DominoDraftModel`: the base class of all drafters, with loading, saving, views and statistics.

A method is a subclass that implements the hooks of [`~methods.interface.DraftingMethod`]. Embeddings and lm_head belong
to the target and are not stored.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_domino._common.errors import invalid_argument
from hf_domino.configuration.domino_config import DominoConfig
from hf_domino.configuration.registry import METHODS
from hf_domino.formats.adapters import load_adapted
from hf_domino.formats.custom_generate import write_custom_generate
from hf_domino.formats.exporting import Export
from hf_domino.formats.exporting import export as export_drafter
from hf_domino.formats.fields import TARGET_TENSORS
from hf_domino.formats.loading import check_loaded, translate
from hf_domino.methods.backbone import ZeroLinear
from hf_domino.methods.interface import DraftingMethod
from hf_domino.methods.vocabulary import DraftVocabulary, ReducedVocabulary, restrict
from hf_domino.stats.decoding_stats import DecodingStats, last_stats


class DominoDraftModel(DraftingMethod, PreTrainedModel):
    """A drafter, which proposes tokens that the target then verifies together in one forward.

    Pass it as `assistant_model` to `generate` or to a text-generation pipeline. `DominoDraftModel(config)` and
    `from_pretrained` return an instance of the subclass for the configuration's method.

    Set `drafter.memory` to a [`LookupMemory`] to look up tokens in the texts of earlier calls, too.

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
    input_modalities = ("text",)
    _no_split_modules: list[str] = []
    _supports_sdpa = True
    supports_gradient_checkpointing = True
    _keys_to_ignore_on_load_unexpected = list(TARGET_TENSORS)
    memory: Any = None  # a LookupMemory, which is neither saved, copied nor moved with the drafter

    def __new__(cls, config: Any = None, *args: Any, **kwargs: Any) -> DominoDraftModel:
        """Create an instance of the subclass for the configuration's method."""
        is_method = cls is not DominoDraftModel or not isinstance(config, DominoConfig)
        return super().__new__(cls if is_method else METHODS[config.projector_type])

    def __init__(self, config: DominoConfig):
        if not isinstance(config, self.config_class):
            remedy = "DominoDraftModel(config) makes the drafter of any method."
            raise invalid_argument(
                f"config of {type(self).__name__}", self.config_class.__name__, type(config).__name__, remedy
            )
        config.check()  # again, because `from_pretrained` sets fields after it has built the configuration
        super().__init__(config)
        self.build()
        if config.draft_vocab_size is not None:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.post_init()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the memory out of copies and pickles, because it holds texts of users."""
        return {name: value for name, value in vars(self).items() if name != "memory"}

    @classmethod
    def shapes(cls, config: DominoConfig) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors that a configuration describes, by name, without allocating any."""
        described = cls.__new__(cls)
        nn.Module.__init__(described)
        described.config = config
        with torch.device("meta"):
            described.build()
        found = {name: tuple(weight.shape) for name, weight in described.named_parameters()}
        if config.draft_vocab_size is None:
            return found
        return found | {"d2t": (config.draft_vocab_size,)}

    @property
    def has_correction_head(self) -> bool:
        """Whether drafts are corrected token by token (such as Domino's) or used as they are (such as DFlash's)."""
        return bool(self.config.head_layers)

    @property
    def vocabulary(self) -> DraftVocabulary:
        """The target's tokens that the drafter can propose."""
        if self.config.draft_vocab_size is None:
            return DraftVocabulary()
        return ReducedVocabulary(self.config.vocab_size, self.d2t)

    @property
    def stats(self) -> DecodingStats:
        """Statistics of the last assisted `generate` with this drafter.

        They are those of the calling thread's last call, or of any thread's last call if this thread has made none. A
        call with a streamer also stores its own as `streamer.stats`, and a call with `return_dict_in_generate=True` as
        `output.stats`.

        Raises:
            RuntimeError: If no thread has generated with this drafter yet.
        """
        return last_stats(self)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Raise an error: only the target generates, and a drafter assists it.

        Raises:
            ValueError: Always. The message shows the correct call.
        """
        remedy = "Call target.generate(..., assistant_model=drafter)."
        raise invalid_argument(
            "the model that generates", "the target, which a drafter only assists", "a drafter", remedy
        )

    def view(self, **changes: Any) -> DominoDraftModel:
        """Return a second drafter that shares the weights but has some fields of the configuration changed.

        This drafter does not change.

        Args:
            changes: Fields of [`DominoConfig`], such as `draft_length`. They must change neither the shapes of the
                weights nor anything that the modules were built with.

        Raises:
            ValueError: If a field does not exist, its value is out of range, or a view cannot change it.

        Example:
        ```python
        >>> from hf_domino import DominoConfig, DominoDraftModel
        >>> sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
        >>> drafter = DominoDraftModel(DominoConfig(**sizes, mask_token_id=3, emb_dim=8, gru_hidden_dim=8))
        >>> drafter.view(draft_length="full").config.draft_length, drafter.config.draft_length
        ('full', 'adaptive')

        ```
        """
        config = self.config.changed(**changes)
        if config.draft_vocab_size != self.config.draft_vocab_size:
            remedy = "Take a copy with fewer tokens: drafter.restricted(token_ids)."
            raise invalid_argument("draft_vocab_size", self.config.draft_vocab_size, config.draft_vocab_size, remedy)
        own = vars(self.config)
        kept = {name: own[name] for name in self.config.built_with if getattr(config, name, own[name]) != own[name]}
        if kept:
            changed = {name: getattr(config, name) for name in kept}
            remedy = "Its modules were built with that. Load the drafter with another: from_pretrained(folder, ...)."
            raise invalid_argument(f"{', '.join(kept)} of a view", kept, changed, remedy)
        if not config.shapes().items() <= self.config.shapes().items():
            remedy = "Make a drafter of that shape: DominoDraftModel(DominoConfig.for_target(target.config, ...))."
            raise invalid_argument(f"{', '.join(changes)} of a view", "of the drafter's own weights", changes, remedy)
        view = copy.copy(self)
        view.__class__ = METHODS[config.projector_type]
        view.config = config
        view.memory = self.memory
        return view

    def restricted(self, token_ids: Sequence[int] | torch.Tensor) -> DominoDraftModel:
        """Return a copy that proposes only some of the target's tokens and computes base logits and W2 only for these.

        When the target chooses a token that was left out, no draft can match it. That costs acceptance, but never
        exactness.

        Args:
            token_ids (`Sequence[int]` or `torch.Tensor`): Ids of the target's tokens, in any order; choose the most
                frequent ones.

        Raises:
            ValueError: If an id occurs twice or is not among those that the drafter proposes, or if some tensors are
                not the drafter's own (adapters, quantised weights).

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

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the method's `draft_states`, which has the same arguments; returns draft hidden states `[B, Q, H]`."""
        return self.draft_states(*args, **kwargs)

    def get_input_embeddings(self) -> None:
        """Return None, because the embeddings are the target's; `accelerate` calls this to shard a model."""
        return None

    def export(self, folder: str | os.PathLike, format: str = "specforge", **options: Any) -> Export:
        """Write the drafter in another project's format; a warning names serving engines that do not accept it.

        Args:
            folder (`str` or `PathLike`): Where to write; it must be empty unless `overwrite=True`.
            format (`str`, *optional*, defaults to `"specforge"`): `"specforge"` for the layouts that SGLang and vLLM
                read, which are those of SpecForge, z-lab and, for DSpark, DeepSpec; or `"speculators"` (not for
                Domino).
            options: `engine`, the name of an engine that must accept the folder (`"sglang"`, `"vllm"`, `"dflash"`);
                `dtype` of the weights (defaults to bfloat16); `overwrite`; `max_shard_size` (defaults to `"5GB"`);
                `target`, whose rows of lm_head the format of speculators stores if there is a draft vocabulary.

        Returns:
            [`~formats.exporting.Export`]: The files, and for each engine the reasons why it does not accept them.

        Raises:
            ValueError: If the format cannot hold such a drafter, the engine does not accept it, the folder is not
                empty, or some tensors are not the drafter's own (adapters, quantised weights). Nothing is written in
                these cases.
        """
        return export_drafter(self, Path(folder), format, **options)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, ZeroLinear):
            nn.init.zeros_(module.weight)
        else:
            super()._init_weights(module)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> DominoDraftModel:
        """Load a drafter from a folder or the Hub; the arguments are those of [`~transformers.PreTrainedModel`].

        Checkpoints of other projects are recognised by their configuration: SpecForge, z-lab's DFlash, speculators,
        Model-Optimizer, Transformers' own DFlash drafter, and the layouts of EAGLE-3. If you pass the folder or Hub
        name of a PEFT adapter, the drafter that the adapter names is loaded and the adapter is merged into its weights.

        Raises:
            ValueError: If weights are missing, have a wrong shape or belong to another `projector_type`, because random
                weights in their place would silently draft garbage. Also if the folder or Hub name does not exist, or
                holds a drafter that is not supported.
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
        model._weight_conversions = []  # save under hf_domino's names, with its configuration
        model.config._commit_hash = getattr(kwargs.get("revision"), "resolved", None)  # commit on the Hub
        return (model, info) if wants_info else model  # type: ignore[return-value]

    def save_pretrained(self, save_directory: Any, *args: Any, custom_generate: bool = False, **kwargs: Any) -> None:
        """Save the drafter; the other arguments are those of [`~transformers.PreTrainedModel`].

        Args:
            save_directory (`str` or `Path`): The folder.
            custom_generate (`bool`, *optional*, defaults to `False`): Whether to also write
                `custom_generate/generate.py`, which imports this package, for users who generate by
                `target.generate(..., custom_generate=folder, trust_remote_code=True)`.

        Raises:
            ValueError: If both `custom_generate` and `push_to_hub` are set.
        """
        self.config.check_supports("save_pretrained")
        if custom_generate and kwargs.get("push_to_hub"):
            remedy = "Transformers would not upload the file: save the folder, and upload it with hf-domino push."
            raise invalid_argument("push_to_hub of save_pretrained with custom_generate=True", False, True, remedy)
        super().save_pretrained(save_directory, *args, **kwargs)
        if custom_generate and kwargs.get("is_main_process", True):
            write_custom_generate(save_directory)
