"""Checkpoints of vllm-project/speculators: `dflash`, `dflash2`, `dspark`, `xpress`, and Domino of its pull request 773.

The backbone is nested as `transformer_layer_config`, which only has the differences from its architecture's defaults.
Layer ids count the embeddings as 0, so they are one higher than ours. Files also contain the embeddings, lm_head and
sometimes more of the target. When speculators trains a drafter, it counts windows from the anchor, but vLLM, which
serves its drafters, counts them from each query, and so do we: up to a block of the oldest positions differs.

Sources: `src/speculators/models/dflash/config.py`, `src/speculators/convert/dflash/converter.py` (c05b95b),
`update_dflash` of vLLM (its pull request 40727); for Domino `models/domino/config.py` and `convert/domino/converter.py`
of the pull request.
"""

from __future__ import annotations

from contextlib import suppress

from hf_domino._common.errors import invalid_argument
from hf_domino.configuration.domino_config import DominoConfig
from hf_domino.formats.fields import (
    AROUND_LAYERS,
    CANNOT_RUN,
    CODEBOOKS,
    CONVOLUTION,
    CORRECT_IT,
    DECODER_SECTION,
    FUSION,
    READ_OF_BLOCKS,
    ROTARY,
    SCALES,
    Fields,
    Format,
    StoredConfig,
    backbone_fields,
    block_fields,
    merged,
    misfit,
    predicts_next,
    refuse_others_than,
    required,
    section_of,
    stored_backbone,
    stored_head,
)

KIND = "speculators_model_type"
VERIFIER = "speculators_config"
PROPOSALS = "speculative_tokens"
# Defaults of its configuration class.
DRAFT_VOCAB_SIZE = 32000
BLOCK_SIZE = 8
# The methods that are read, each with the defaults of its own class.
DEFAULTS: dict[str, Fields] = {
    "domino": {"gru_hidden_dim": 1024, "emb_dim": 256, "pure_draft_prefix_len": 1},
    "dspark": {},
    "dflash2": {
        "conv_kernel_size": 2,
        "selector_rank": 256,
        "selector_top_k": 16,
        "sliding_window_non_causal": True,
    },
    "xpress": {"xpress_rank": 256, "xpress_mlp_ratio": 2, "num_jacobi_passes": 6},
    "dflash": {},
}
PREDICT_NEXT = ("domino", "dspark")  # unless files say otherwise
OWN = """
    dflash_config dspark_config vocab_size hidden_size num_hidden_layers target_hidden_size layer_types projector_type
    aux_hidden_state_layer_ids proposal_methods logits_correction_emb_dim sliding_window_non_causal
"""
# The methods that are written, each with its class.
WRITTEN = {
    "dflash": "DFlashDraftModel",
    "dspark": "DSparkSpeculator",
    "dflash2": "DFlash2DraftModel",
}


def _read(stored: StoredConfig) -> Fields:
    if (kind := stored[KIND]) not in DEFAULTS:
        raise invalid_argument(KIND, f"one of {', '.join(DEFAULTS)}", kind, CANNOT_RUN)
    if (given := stored.get("projector_type", kind)) != kind:
        remedy = f"Set {KIND} to the kind of the weights."
        raise invalid_argument("projector_type", f"{kind!r}, as {KIND} says", given, remedy)
    stored = merged(stored, "dflash_config", "dspark_config")  # copies for engines have both
    if "logits_correction_emb_dim" in stored:
        stored["emb_dim"] = stored["logits_correction_emb_dim"]
    stored = DEFAULTS[kind] | stored
    required(stored, DECODER_SECTION, "aux_hidden_state_layer_ids", "mask_token_id")
    decoder = dict(section_of(stored, DECODER_SECTION))
    if stored.get("layer_types"):  # they may be beside the backbone instead of in it
        decoder["layer_types"] = stored["layer_types"]
    refuse_others_than(dict.fromkeys(AROUND_LAYERS, False), decoder)  # these count only among the drafter's own fields
    fields = backbone_fields(decoder)
    if "layer_types" in fields:
        fields["sliding_window_non_causal"] = stored.get("sliding_window_non_causal", False)
    for name in ("vocab_size", "hidden_size", "num_hidden_layers"):
        if stored.get(name) not in (None, fields[name]):
            raise invalid_argument(name, f"{fields[name]} as in {DECODER_SECTION}.{name}", stored[name], CORRECT_IT)
    if (width := stored.get("target_hidden_size")) not in (None, fields["hidden_size"]):
        expected = f"{fields['hidden_size']} ({DECODER_SECTION}.hidden_size)"
        raise invalid_argument("target_hidden_size", expected, width, CANNOT_RUN)
    stored.setdefault("block_size", BLOCK_SIZE)
    stored["draft_vocab_size"] = stored.get("draft_vocab_size") or DRAFT_VOCAB_SIZE
    stored["num_target_layers"] = None  # it is not stored, so layer ids are checked when the drafter meets its target
    stored["target_layer_ids"] = layer_ids_of(stored, "aux_hidden_state_layer_ids")
    return fields | block_fields(stored, kind) | {"shift_label": _predicts_next(stored, kind in PREDICT_NEXT)}


def _predicts_next(stored: StoredConfig, default: bool) -> bool:
    """Return whether block position k predicts the token after it, which older files only imply by their proposals."""
    count = None
    with suppress(TypeError, LookupError):  # not all files say it
        count = section_of(stored, VERIFIER)["proposal_methods"][0][PROPOSALS]
    size = stored["block_size"]
    if not isinstance(count, int) or not isinstance(size, int) or count not in (size - 1, size):
        return predicts_next(stored, default)  # somebody chose another number, which implies nothing
    is_next = predicts_next(stored, count == size)
    if is_next != (count == size):
        expected = f"{size - (not is_next)} of block_size={size} as the order of a block says"
        raise misfit(f"speculators_config.proposal_methods[0].{PROPOSALS}", expected, count)
    return is_next


def layer_ids_of(stored: StoredConfig, name: str) -> list[int]:
    """Read captured layers from a field that counts the embeddings as 0, and return them as we count them."""
    aux_ids = stored[name]
    if not isinstance(aux_ids, list) or not all(type(index) is int and index > 0 for index in aux_ids):
        raise invalid_argument(name, "a list of integers from 1 on (0 is the embeddings)", aux_ids, CANNOT_RUN)
    return [index - 1 for index in aux_ids]


def _write(config: DominoConfig) -> Fields:
    """Return a config.json for speculators 0.9 and vLLM 0.33, which need no target tensors for a whole vocabulary."""
    kind = config.projector_type
    is_dflash2 = kind == "dflash2"
    reads_last = (config.num_target_layers or 0) - 1 in (config.target_layer_ids or ())
    is_convolved = config.conv_kernel_size is not None
    wrong = [
        ("projector_type", kind not in WRITTEN, f"one of {', '.join(WRITTEN)}", "its Domino is pull request 773"),
        ("sliding_window", config.has_sliding_layers, "None", "which counts windows in two ways"),
        ("target_layer_ids", reads_last, "without the last layer", "which reads it before the final norm"),
        (CONVOLUTION, is_convolved != is_dflash2, "given for DFlash 2 alone", "as in its classes"),
        ("draft_vocab_size", is_dflash2 and config.draft_vocab_size, "None", "whose DFlash 2 drafts all tokens"),
        (FUSION, config.layer_fusion, "False", "which has no such field"),
        *((name, getattr(config, name), "None", "which has no such field") for name in SCALES),
    ]
    for name, is_wrong, expected, why in wrong:
        if is_wrong:
            expected = f"{expected} for format='speculators' ({why})"
            raise invalid_argument(name, expected, getattr(config, name), "Use format='specforge'.")
    proposals = {"proposal_type": "greedy", PROPOSALS: config.num_draft_tokens}
    backbone = stored_backbone(config)
    return stored_head(config) | {
        "architectures": [WRITTEN[kind]],
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layer_ids or ()],
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_width,
        "dtype": backbone["dtype"],
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.shift_label,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposals],
            "verifier": {"name_or_path": config.target_name, "architectures": []},
        },
        KIND: kind,
        DECODER_SECTION: backbone,
    }


SPECULATORS = Format(
    name="speculators",
    matches=lambda stored: KIND in stored,
    read=_read,
    write=_write,
    exported_as="speculators",
    renames={r"^logits_correction\.": "", **CODEBOOKS},
    reads=(*READ_OF_BLOCKS, *ROTARY, KIND, DECODER_SECTION, VERIFIER, *OWN.split()),
    harmless=("algorithm", "default_proposal_method", "target_layer_ids", "confidence_head_alpha"),
)
