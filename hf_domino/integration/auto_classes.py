"""Register the model type `"domino"` with `AutoConfig`, `AutoModel` and `AutoModelForCausalLM`, by name only.

`AutoConfig.register` needs the classes themselves, whose import takes seconds. A name in Transformers' tables costs
nothing until a drafter is loaded. In these tables, our package takes the place of a module of `transformers.models`,
because it has both classes. Drafters are registered as causal language models because that is how assistants are
loaded, although a drafter cannot generate by itself.
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
    """Register the model type `"domino"` with Transformers' auto classes. Calling it again changes nothing."""
    for name in ("configuration_auto", "modeling_auto"):
        when_imported(f"transformers.models.auto.{name}", _register)


def _register(module: ModuleType) -> None:
    """Add the names to the tables of `configuration_auto` or `modeling_auto`."""
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
