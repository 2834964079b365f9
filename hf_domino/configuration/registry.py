"""Registry of drafting methods: the model class of each `projector_type`. `hf_domino.methods` registers ours."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from typing import Any

from transformers import AutoModel, AutoModelForCausalLM, PreTrainedConfig

METHODS: dict[str, Any] = {}  # subclasses of DominoDraftModel


def register(model_class: Any) -> None:
    """Register a drafting method, so that its `projector_type` works wherever a drafter is created or loaded.

    Args:
        model_class (`type[DominoDraftModel]`): The method's model. Its `config_class`, a subclass of [`DominoConfig`],
            names the method as the default of `projector_type`.
    """
    METHODS[model_class.config_class.projector_type] = model_class
    for auto_class in (AutoModel, AutoModelForCausalLM):
        auto_class.register(model_class.config_class, model_class, exist_ok=True)


def config_classes() -> list[Any]:
    """Return the configuration classes of all methods."""
    return [model_class.config_class for model_class in METHODS.values()]


def default_of(field: Field) -> Any:
    """Return the default of a configuration's field, from its factory if it has one."""
    if field.default_factory is MISSING:
        return field.default
    return field.default_factory()


def all_fields() -> dict[str, str]:
    """Return the fields of all methods' configurations, with their types as text, such as `"list[int] | None"`."""
    inherited = {field.name for field in fields(PreTrainedConfig)}
    found = dict[str, str]()
    for config_class in config_classes():
        for field in fields(config_class):
            if field.name not in inherited:
                # It is a class if the method's module does not import annotations from __future__.
                name = field.type.__name__ if type(field.type) is type else str(field.type)
                found.setdefault(field.name, name)
    return found
