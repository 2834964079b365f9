"""`DominoConfig`: every size and convention of a drafter, flat, typed and validated."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import fields
from importlib import import_module
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from hf_domino._common.errors import invalid_argument
from hf_domino._common.notices import notice
from hf_domino.configuration.checks import ADAPTIVE, check_fields, fields_of
from hf_domino.configuration.from_target import DEFAULT_ROPE_THETA, ROTARY, eos_ids_of, fields_from_target
from hf_domino.configuration.method import MethodFacts
from hf_domino.configuration.registry import METHODS, all_fields, default_of

ARCHITECTURE = "DominoDraftModel"  # in every file, whatever the method
# Names that Transformers passes to any configuration or stores in it, besides the fields of its base class, and
# `rope_theta`, the old name of a part of `rope_parameters`.
OF_TRANSFORMERS = {
    *("model_type", "torch_dtype", "num_labels", "name_or_path", "_name_or_path", "_commit_hash", "auto_map"),
    *("attn_implementation", "experts_implementation", "output_attentions", "use_cache", "is_decoder", "rope_theta"),
    *("_attn_implementation_internal", "_experts_implementation_internal", "per_layer_config"),
}
END_AS_MASK = (
    "mask_token_id is %s, which ends texts: no row of the vocabulary is known to be reserved or unused. Pass the "
    "target's tokenizer, if it was not, or set mask_token_id (--mask-token-id) to a token that no text holds."
)


@strict
class DominoConfig(MethodFacts, PreTrainedConfig):
    """Configuration of a drafter; its `projector_type` selects the drafting method.

    `DominoConfig(projector_type="dspark", ...)`, `from_pretrained` and [`~DominoConfig.for_target`] return an instance
    of the method's own subclass, which adds the fields of that method. The defaults have the shape of the released
    drafter for Qwen3-8B. For another target, use [`~DominoConfig.for_target`].

    Args:
        vocab_size (`int`, *optional*, defaults to 151936): Rows of the target's embeddings.
        hidden_size (`int`, *optional*, defaults to 4096): Hidden size of the drafter and of its target.
        intermediate_size (`int`, *optional*, defaults to 12288): Width of the MLPs.
        num_hidden_layers (`int`, *optional*, defaults to 5): Number of layers of the backbone.
        num_attention_heads (`int`, *optional*, defaults to 32): Number of query heads.
        num_key_value_heads (`int`, *optional*, defaults to 8): Number of key and value heads.
        head_dim (`int`, *optional*, defaults to 128): Width of a head.
        hidden_act (`str`, *optional*, defaults to `"silu"`): Activation of the MLPs.
        max_position_embeddings (`int`, *optional*, defaults to 40960): Longest sequence, in tokens.
        initializer_range (`float`, *optional*, defaults to 0.02): Standard deviation of newly initialized weights.
        rms_norm_eps (`float`, *optional*, defaults to 1e-6): Epsilon of the RMS norms.
        rope_parameters (`dict`, *optional*): Rotary embedding, as in Transformers; `rope_type` is one of `"default"`,
            `"linear"`, `"yarn"`, `"llama3"`. Defaults to a `rope_theta` of 10,000.
        rope_interleaved (`bool`, *optional*, defaults to `False`): Whether the rotary embedding rotates the neighbours
            `(2i, 2i + 1)` of a head as a pair, instead of `(i, i + head_dim / 2)`.
        attention_dropout (`float`, *optional*, defaults to 0.0): Dropout of attention weights during training.
        block_size (`int`, *optional*, defaults to 16): Number of positions in a block, including the anchor.
        mask_token_id (`int`, *optional*, defaults to 151669): Token that fills a block after the anchor.
        num_target_layers (`int`, *optional*, defaults to 36): Decoder layers of the target; None if unknown.
        target_layer_ids (`list[int]`, *optional*): Target layers whose outputs are the context features; unique and in
            `[0, num_target_layers - 1]`. The last layer is read after the final norm. A new drafter follows the
            releases' rule. Files must list the layers, but EAGLE-3 files can leave them to the target that is used.
        target_model_type (`str`, *optional*): `model_type` of the target that the drafter was made for.
        projector_type (`str`, *optional*, defaults to `"domino"`): Drafting method; `hf_domino.methods` lists them.
        pure_draft_prefix_len (`int`, *optional*, defaults to 0): Number of first proposals that are not corrected.
        shift_label (`bool`, *optional*, defaults to `True`): Whether block position k predicts the token after it
            (`block_size` proposals) or its own token (`block_size - 1` proposals).
        draft_pool_size (`int`, *optional*, defaults to 128): Number of most likely tokens of a position among which
            drafts are chosen, which is faster and hardly changes them; None for all tokens.
        draft_vocab_size (`int`, *optional*): Size of the draft vocabulary, in `[1, vocab_size]`: drafts, base logits,
            W2 and training only use this many of the target's tokens, stored as `d2t` (arXiv 2502.14856). A new drafter
            has the first ones. None for the whole vocabulary.
        draft_length (`str`, *optional*, defaults to `"adaptive"`): `"adaptive"` only drafts as many tokens as pay off,
            which may be none; `"full"` drafts full blocks.
        draft_tree_size (`int` or `str`, *optional*, defaults to `"adaptive"`): Most proposals of a round in a tree of
            the likeliest branches. `"adaptive"` drafts trees if they emit more tokens in the same time; None, chains.
        draft_window_size (`int`, *optional*): Number of context positions before the anchor that a draft sees; None for
            all. A new drafter gets the `max_length` of its training, because acceptance falls beyond it.
        target_name (`str`, *optional*): Hub or folder name of the target that the drafter was trained for. Training
            sets this field and the next four. They are compared with the target that is used; None means unknown.
        target_revision (`str`, *optional*): Commit of the target on the Hub.
        target_config_digest (`str`, *optional*): Digest of the target's sizes and, behind a `-`, of its other values.
        target_weights_digest (`str`, *optional*): Digest of the signs of a few of the target's weights and, behind a
            `-`, the sizes of all, which are nearly equal in every dtype; or why there is none: `"adapted"`,
            `"quantised"`, `"offloaded"` or `"sharded"`.
        target_dtype (`str`, *optional*): Dtype that the target ran in, such as `"bfloat16"`.
        bos_token_id, eos_token_id, pad_token_id (`int`, *optional*): Token ids of the target.

    Raises:
        ValueError: If a field is out of its range; the message names the field, its range and its value.

    Example:
    ```python
    >>> from hf_domino import DominoConfig
    >>> config = DominoConfig()
    >>> config.num_draft_tokens, config.target_layer_ids
    (16, [1, 9, 17, 25, 33])

    ```
    """

    model_type = "domino"

    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 12288
    num_hidden_layers: int = 5
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    hidden_act: str = "silu"
    max_position_embeddings: int = 40960
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    rope_parameters: dict | None = None
    rope_interleaved: bool = False
    attention_dropout: float | int = 0.0
    block_size: int = 16
    mask_token_id: int = 151669
    num_target_layers: int | None = 36
    target_layer_ids: list[int] | None = None
    target_model_type: str | None = None
    projector_type: str = "domino"
    pure_draft_prefix_len: int = 0
    shift_label: bool = True
    draft_pool_size: int | None = 128
    draft_vocab_size: int | None = None
    draft_length: str = "adaptive"
    draft_tree_size: int | str | None = ADAPTIVE
    draft_window_size: int | None = None
    target_name: str | None = None
    target_revision: str | None = None
    target_config_digest: str | None = None
    target_weights_digest: str | None = None
    target_dtype: str | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __new__(cls, *args: Any, **given: Any) -> DominoConfig:
        """Create an instance of the configuration class that `projector_type` selects."""
        return super().__new__(cls.of_method(given.get("projector_type", cls.projector_type)))

    def __post_init__(self, **kwargs):
        if self.target_layer_ids is None and isinstance(self.num_target_layers, int):  # `check` rejects other types
            self.target_layer_ids = self.choose_layers(self.num_target_layers)
        given = {name: value for name, value in kwargs.items() if value not in (None, False) or name in ROTARY}
        given |= {f"rope_parameters.{name}": None for name in ROTARY if name in (self.rope_parameters or ())}
        self.refuse_unknown(sorted(given.keys() - OF_TRANSFORMERS))
        theta = kwargs.pop("rope_theta", None)
        base = {"rope_theta": DEFAULT_ROPE_THETA if theta is None else theta}
        self.rope_parameters = base | (self.rope_parameters or {"rope_type": "default"})
        if theta not in (None, self.rope_parameters["rope_theta"]):
            expected = f"{self.rope_parameters['rope_theta']} as in rope_parameters"
            raise invalid_argument("rope_theta", expected, theta, "Give it once, as rope_parameters['rope_theta'].")
        if self.draft_vocab_size == self.vocab_size:
            self.draft_vocab_size = None
        for name in all_fields():
            kwargs.pop(name, None)
        super().__post_init__(**kwargs)
        self.check()

    @classmethod
    def of_method(cls, projector_type: Any) -> type[DominoConfig]:
        """Return the configuration class of a method; a subclass of [`DominoConfig`] always returns itself.

        Args:
            projector_type (`str`): Name of the method.

        Raises:
            ValueError: If there is no such method.
        """
        if cls is not DominoConfig:
            return cls
        if not METHODS:  # methods register themselves when they are imported, which has not happened yet
            import_module(f"{__name__.partition('.')[0]}.methods")
        if projector_type not in tuple(METHODS):
            raise ValueError(f"projector_type must be one of {tuple(METHODS)}, got {projector_type!r}.")
        return METHODS[projector_type].config_class

    def check(self) -> None:
        """Validate all fields, for example after one of them was set.

        Raises:
            ValueError: If a field is out of its range; the message names the field, its range and its value.
        """
        check_fields(self)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors that the configuration describes, by name, without creating the tensors."""
        return METHODS[self.projector_type].shapes(self)

    def changed(self, **changes: Any) -> DominoConfig:
        """Return a copy with some fields changed; with `projector_type`, a configuration of that method.

        Args:
            changes: New values of fields. Fields that only the new method has get the values of a new drafter for this
                target.

        Raises:
            ValueError: If a field is unknown, of another method or out of its range.
        """
        result = copy.deepcopy(self)
        method = DominoConfig.of_method(changes.get("projector_type", self.projector_type))
        method.refuse_unknown(changes)
        if method is not type(self):
            own = {field.name: default_of(field) for field in fields(method)} | method.sizes_for(self.hidden_size)
            kept = {name: value for name, value in vars(result).items() if name in own or name.startswith("_")}
            result = object.__new__(method)
            result.__dict__.update(own | kept)
        for name, value in changes.items():
            setattr(result, name, value)
        result.check()
        return result

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build a configuration from a dictionary, as `from_pretrained` reads it.

        Args:
            config_dict (`dict`): The fields of a file.
            kwargs: Fields that replace those of the file, and arguments of Transformers. With another `projector_type`,
                fields of the file that the new method lacks are left out.

        Raises:
            ValueError: If the dictionary describes another kind of model, or a field is out of its range.
        """
        model_type = config_dict.get("model_type", cls.model_type)
        if model_type != cls.model_type:
            raise ValueError(
                f"model_type must be {cls.model_type!r}, got {model_type!r}: this is no drafter of hf_domino. "
                "Load a target with AutoModelForCausalLM; drafters are made by `hf-domino train`."
            )
        stored_method = config_dict.get("projector_type", cls.projector_type)
        method = cls.of_method(kwargs.get("projector_type", stored_method))
        if "projector_type" in kwargs:
            lacking = set(all_fields()) - {field.name for field in fields(method)}
            config_dict = {name: value for name, value in config_dict.items() if name not in lacking}
        replaced = {name: kwargs.pop(name) for name in list(kwargs) if name in all_fields()}
        return super().from_dict(config_dict | replaced, **kwargs)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Save the configuration, with the arguments of [`~transformers.PreTrainedConfig.save_pretrained`]."""
        # When it saves a model, Transformers sets the method's class. All files name the base class.
        if vars(self).get("architectures"):
            self.architectures = [ARCHITECTURE]
        return super().save_pretrained(save_directory, *args, **kwargs)

    @property
    def label_offset(self) -> int:
        """Block position of the first proposal: 0 with `shift_label`, else 1."""
        return 0 if self.shift_label else 1

    @property
    def num_draft_tokens(self) -> int:
        """Number of tokens that are proposed in a round (P)."""
        return self.block_size - self.label_offset

    @property
    def num_captured(self) -> int:
        """Number of target layers that are read (L)."""
        return len(self.target_layer_ids or ()) or self.most_captured

    def layer_ids(self, target_config: PreTrainedConfig) -> list[int]:
        """Return the ids of the layers to read from a target with this configuration."""
        num_layers = target_config.get_text_config(decoder=True).num_hidden_layers
        return list(self.target_layer_ids or self.choose_layers(num_layers))

    @property
    def fixed_tree_size(self) -> int | None:
        """Most nodes of a tree if all rounds propose trees; None for chains and for an adaptive choice."""
        if isinstance(self.draft_tree_size, str):
            return None
        return self.draft_tree_size

    @property
    def most_verified(self) -> int:
        """The most proposals that a round of fixed shape verifies: those of a chain or of a tree."""
        return max(self.num_draft_tokens, self.fixed_tree_size or 0)

    @property
    def draft_width(self) -> int:
        """Number of tokens among which drafts are chosen (D): `draft_vocab_size`, or `vocab_size` if that is None."""
        if self.draft_vocab_size is None:
            return self.vocab_size
        return self.draft_vocab_size

    @classmethod
    def refuse_unknown(cls, names: Iterable[str]) -> None:
        """Raise an error if a name is not a field of this configuration.

        Args:
            names (`Iterable[str]`): Names that were passed as fields.

        Raises:
            ValueError: If some names are not fields; the message lists them.
        """
        names = [name for name in names if name not in {field.name for field in fields(cls)}]
        if others := [name for name in names if name in all_fields()]:
            remedy = f"It has no such part; projector_type, which is {cls.projector_type!r}, selects the method."
            raise invalid_argument(fields_of(cls, *others), "left out", "given", remedy)
        if names:
            raise ValueError(
                f"{', '.join(names)} must be a field of DominoConfig, got none of that name: leave it out, "
                "or take it out of config.json."
            )

    @classmethod
    def for_target(cls, target_config: PreTrainedConfig, tokenizer: Any = None, **overrides: Any) -> DominoConfig:
        """Build a drafter configuration for any causal language model.

        Widths, heads, norms and RoPE follow the target; captured layers follow the releases' rule. The mask token is
        the first of these that exists: the tokenizer's own, an unused row of the target's vocabulary, a reserved token,
        the pad token, the end-of-text token (with a notice).

        Args:
            target_config (`PreTrainedConfig`): The target's configuration; for a multimodal one, its text model's.
            tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's tokenizer, to find a mask token.
            overrides: Any field of the method's configuration, such as `num_hidden_layers` (defaults to 5, or fewer
                for a target with fewer than 20 layers) or `block_size` (defaults to 16).

        Returns:
            `DominoConfig`: A validated configuration.

        Raises:
            ValueError: If the target is an encoder-decoder model or has no width, or an override is unknown or out of
                its range.

        Example:
        ```python
        >>> from transformers import LlamaConfig
        >>> from hf_domino import DominoConfig
        >>> DominoConfig.for_target(LlamaConfig(num_hidden_layers=16), block_size=8).target_layer_ids
        [1, 4, 7, 10, 13]

        ```
        """
        if not isinstance(target_config, PreTrainedConfig):
            given = type(target_config).__name__
            raise ValueError(f"target_config must be a configuration, got a {given}: pass target.config.")
        if getattr(target_config, "is_encoder_decoder", False):
            raise ValueError(
                f"target_config.is_encoder_decoder must be False, got True ({target_config.model_type}): "
                "a Domino drafter reads a decoder-only target."
            )
        method = cls.of_method(overrides.get("projector_type", cls.projector_type))
        beside = method.fields_beside()
        overrides = {name: value for name, value in overrides.items() if name not in beside}
        method.refuse_unknown(overrides)
        text = target_config.get_text_config(decoder=True)
        if unread := [name for name in method.unread if name in overrides]:
            raise invalid_argument(fields_of(method, *unread), "left out", "given", "It has no such part.")
        follows = fields_from_target(text, tokenizer)
        follows |= method.sizes_for(follows["hidden_size"])
        config = method(**(follows | dict(method.defaults) | overrides))
        mask = config.mask_token_id
        if "mask_token_id" not in (*method.unread, *overrides) and mask in eos_ids_of(config):
            notice(END_AS_MASK % (f"{mask}, {tokenizer.convert_ids_to_tokens(mask)!r}" if tokenizer else mask))
        return config
