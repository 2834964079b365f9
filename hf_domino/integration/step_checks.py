"""What a target hands on from one step to the next: a round takes several steps in one forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import GenerationMixin, PreTrainedModel
from transformers.utils import ModelOutput

from hf_domino._common.refusal import refusal

# Outputs of a target that are the same in all steps.
FOR_ALL_STEPS = ("image_outputs", "image_hidden_states")


class _Noted(dict):
    """Stands for outputs before there are any, and notes what is read of them."""

    def __init__(self):
        self.names: set[str] = set()

    def __getattr__(self, name: Any, default: Any = None) -> _Noted:
        self.names.add(str(name))
        return _Noted()

    __missing__ = get = __getattr__

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return ModelOutput

    def __call__(self, *args: Any, **kwargs: Any) -> _Noted:
        return _Noted()

    def __contains__(self, name: Any) -> bool:
        self.names.add(str(name))
        return True

    def __iter__(self) -> Iterator[str]:
        self.names.add("all of them")
        return iter(())

    keys = values = items = __iter__  # type: ignore[assignment]


def check_steps(target: PreTrainedModel, model_kwargs: Mapping[str, Any]) -> None:
    """Refuse a target whose next step needs more of this one than its token: a round is several steps in one forward.

    Raises:
        ValueError: If it reads outputs that are not the same in all steps, or fails where there are none.
    """
    usual = GenerationMixin._update_model_kwargs_for_generation
    if type(target)._update_model_kwargs_for_generation is usual:
        return
    outputs, read_by_all = _Noted(), _Noted()
    usual(target, read_by_all, dict(model_kwargs))
    failed: list[str] = []
    try:
        target._update_model_kwargs_for_generation(
            outputs, dict(model_kwargs), is_encoder_decoder=False, num_new_tokens=1
        )
    except Exception as error:
        failed.append(f"an error ({error})")
    if found := sorted(outputs.names.difference(FOR_ALL_STEPS, read_by_all.names)) or failed:
        raise refusal(
            f"what {type(target).__name__}._update_model_kwargs_for_generation reads of outputs",
            f"nothing but {FOR_ALL_STEPS}",
            found,
            "A round takes several steps in one forward, and none has outputs of its own; drop assistant_model.",
        )
