"""The drafting methods, one file each, registered by `projector_type`.

To add a method, write a file with a subclass of [`DominoConfig`] and a subclass of [`DominoDraftModel`], and register
the model here.
"""

from __future__ import annotations

from hf_domino.configuration.domino_config import DominoConfig
from hf_domino.configuration.registry import METHODS, register
from hf_domino.methods.dflash import DFlashModel
from hf_domino.methods.dflash2 import DFlash2Model
from hf_domino.methods.dfly import DFlyModel
from hf_domino.methods.domino import DominoMethodModel
from hf_domino.methods.dspark import DSparkModel
from hf_domino.methods.eagle3 import Eagle3Model
from hf_domino.methods.modeling import DominoDraftModel
from hf_domino.methods.recycling import RecyclingModel, recycling
from hf_domino.methods.xpress import XPressModel

register(DominoMethodModel)
register(DFlashModel)
register(DSparkModel)
register(DFlash2Model)
register(DFlyModel)
register(XPressModel)
register(Eagle3Model)
register(RecyclingModel)

__all__ = ["METHODS", "DominoConfig", "DominoDraftModel", "recycling", "register"]
