"""Entry point of a drafter's `custom_generate/generate.py`: `generate` with the drafter of that repository.

`drafter.save_pretrained(folder, custom_generate=True)` writes a file that imports this function. It patches nothing: it
passes our loop to Transformers as the custom decoding method of the call.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_domino._common.errors import invalid_argument
from hf_domino.formats.loading import DOWNLOAD_ARGUMENTS
from hf_domino.integration.assisted_call import check_call, decode, named


def generate(model: PreTrainedModel, inputs: Any = None, drafter: str | None = None, **kwargs: Any) -> Any:
    """Generate as `model.generate` does, but with several tokens per forward.

    Args:
        model (`PreTrainedModel`): The target.
        inputs (`torch.Tensor`, *optional*): The prompts, as for `model.generate`.
        drafter (`str`, *optional*): Folder or Hub name of the drafter. Defaults to the repository that was passed as
            `custom_generate`.
        kwargs: Other arguments of `model.generate`, and those of `from_pretrained` for the drafter's download.
    """
    name = drafter or sys._getframe(1).f_locals.get("custom_generate")  # as the caller named this repository
    if not name or not isinstance(name, str):
        remedy = "Pass drafter='folder or Hub name'; only generate(..., custom_generate='...') tells it."
        raise invalid_argument("drafter", "the repository of the drafter", name, remedy)
    download = {key: kwargs.pop(key) for key in DOWNLOAD_ARGUMENTS if key in kwargs}
    loaded = named(model, name, **download)
    if kwargs.get("assistant_model") is not None:
        remedy = f"The drafter is {name}; leave assistant_model out."
        raise invalid_argument(
            "assistant_model beside custom_generate", None, type(kwargs["assistant_model"]).__name__, remedy
        )
    if (lookup := kwargs.get("prompt_lookup_num_tokens")) is not None:
        del kwargs["prompt_lookup_num_tokens"]  # Transformers would start its own prompt lookup
    # Transformers does not pass these on to a custom decoding method.
    streamer = kwargs.get("streamer")
    tokenizer = kwargs.get("tokenizer")
    prepares = model
    if tokenizer is not None:
        prepares = _with_tokenizer(model, tokenizer)

    def decoding_method(_: PreTrainedModel, input_ids: torch.Tensor, **call: Any) -> Any:
        config = call["generation_config"]
        if lookup is not None:
            config.prompt_lookup_num_tokens = lookup
        mode_kwargs = {"assistant_model": loaded, "tokenizer": tokenizer}
        check_call(model, config.get_generation_mode(loaded), config, mode_kwargs)
        return decode(model, input_ids, assistant_model=loaded, streamer=streamer, **call)

    return type(model).generate(prepares, inputs, custom_generate=decoding_method, **kwargs)


def _with_tokenizer(model: PreTrainedModel, tokenizer: Any) -> PreTrainedModel:
    """Return a copy of the model that keeps the tokenizer for stop strings, which Transformers would not pass on."""
    find = model._get_stopping_criteria
    model = copy.copy(model)
    model._get_stopping_criteria = lambda **call: find(**call | {"tokenizer": tokenizer})
    return model
