"""Transformers' own DFlash drafter, `MuseGlimmerAssistantModel`.

Its configuration says nothing of the target, which is Muse Glimmer; layer ids are ours. All layers of the released one
are sliding; a query sees all of its block, and as many positions before its own as the window has. Source:
`models/muse_glimmer_assistant/`, `masking_utils.py` and `generation/candidate_generator.py` of Transformers 5.23.
"""

from __future__ import annotations

from typing import Any

from hf_domino.formats.fields import backbone_fields, decoder_of, merged, predicts_next, refuse_unread
from hf_domino.formats.format import Format, StoredConfig

MODEL_TYPE, TARGET_TYPE = "muse_glimmer_assistant", "muse_glimmer_text"


def _matches(stored: StoredConfig) -> bool:
    return stored.get("model_type") == MODEL_TYPE


def _fields(stored: StoredConfig) -> dict[str, Any]:
    stored = merged(stored, "dflash_config")
    refuse_unread(stored)
    drafter = decoder_of(stored)
    vocab_size = stored.get("vocab_size") or decoder_of({"model_type": TARGET_TYPE}).vocab_size
    fields = backbone_fields(stored)
    if "layer_types" in fields:
        fields |= {"sliding_window": fields["sliding_window"] + 1, "sliding_window_non_causal": True}
    return fields | {
        "vocab_size": vocab_size,
        "block_size": drafter.block_size,
        "mask_token_id": drafter.mask_token_id,
        "num_target_layers": None,
        "target_layer_ids": drafter.target_layer_ids,
        "projector_type": "dflash",
        "shift_label": predicts_next(stored, False),
    }


MUSE_GLIMMER = Format(
    name="Muse Glimmer assistant",
    matches=_matches,
    fields=_fields,
    renames={r"^encoder\.fc\.": "fc.", r"^encoder\.output_norm_enc\.": "hidden_norm."},
    runs_natively=True,
)
