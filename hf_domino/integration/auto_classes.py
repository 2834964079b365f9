"""`AutoConfig`, `AutoModel` and `AutoModelForCausalLM` of the model type `"domino"`, by names in Transformers' tables.

`AutoConfig.register` wants the classes themselves, and these cost seconds; a name in the tables costs nothing until a
drafter is loaded. The package stands where a module of `transformers.models` would: it holds both classes.
As a causal language model because that is how assistants are loaded; a drafter refuses to generate by itself.
"""

from __future__ import annotations

import sys
import warnings
from types import ModuleType

from hf_domino.integration.on_import import when_imported

MODEL_TYPE = "domino"
PACKAGE = "hf_domino"
CONFIG_NAME = "DominoConfig"
MODEL_NAME = "DominoDraftModel"


def register_auto_classes() -> None:
    """Teach `AutoConfig` and `AutoModel` the model type `"domino"`. Calling it again changes nothing."""
    for name in ("configuration_auto", "modeling_auto"):
        when_imported(f"transformers.models.auto.{name}", _register)


def _register(module: ModuleType) -> None:
    """Put the names into the tables of one of the modules."""
    package = sys.modules[PACKAGE]
    try:
        if module.__name__.endswith("configuration_auto"):
            table = module.CONFIG_MAPPING
            table._mapping[MODEL_TYPE], table._modules[MODEL_TYPE] = CONFIG_NAME, package
            return
        for table in (module.MODEL_MAPPING, module.MODEL_FOR_CAUSAL_LM_MAPPING):
            table._reverse_config_mapping[CONFIG_NAME] = MODEL_TYPE
            table._model_mapping[MODEL_TYPE], table._modules[MODEL_TYPE] = MODEL_NAME, package
    except AttributeError as error:
        version = sys.modules["transformers"].__version__
        warnings.warn(
            f"AutoConfig and AutoModel do not know drafters: transformers {version} keeps its tables otherwise "
            f"({error}). Load drafters with hf_domino.DominoDraftModel.from_pretrained.",
            stacklevel=2,
        )
