"""`AutoConfig` and `AutoModel` of the model type `"domino"`, in the tables by which Transformers loads its own late.

`AutoConfig.register` wants the classes themselves, and these cost seconds; a name in the tables costs nothing until a
drafter is loaded. The package stands where a module of `transformers.models` would: it holds both classes.
"""

from __future__ import annotations

import sys
import warnings
from types import ModuleType

from hf_domino.integration.on_import import when_imported

MODEL_TYPE, PACKAGE = "domino", "hf_domino"
CONFIG_NAME, MODEL_NAME = "DominoConfig", "DominoDraftModel"


def register_auto_classes() -> None:
    """Teach `AutoConfig` and `AutoModel` the model type `"domino"`. Calling it again changes nothing."""
    when_imported("transformers.models.auto.configuration_auto", _register_config)
    when_imported("transformers.models.auto.modeling_auto", _register_model)


def _register_config(module: ModuleType) -> None:
    try:
        table = module.CONFIG_MAPPING
        table._mapping[MODEL_TYPE], table._modules[MODEL_TYPE] = CONFIG_NAME, sys.modules[PACKAGE]
    except AttributeError as error:
        _warn(error)


def _register_model(module: ModuleType) -> None:
    try:
        table = module.MODEL_MAPPING
        table._reverse_config_mapping[CONFIG_NAME] = MODEL_TYPE
        table._model_mapping[MODEL_TYPE], table._modules[MODEL_TYPE] = MODEL_NAME, sys.modules[PACKAGE]
    except AttributeError as error:
        _warn(error)


def _warn(error: AttributeError) -> None:
    version = sys.modules["transformers"].__version__
    warnings.warn(
        f"AutoConfig and AutoModel do not know drafters: transformers {version} keeps its tables otherwise ({error}). "
        "Load drafters with hf_domino.DominoDraftModel.from_pretrained.",
        stacklevel=2,
    )
