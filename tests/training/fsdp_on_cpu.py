"""Lets `accelerate` shard on CPUs, where it would train with DistributedDataParallel: imported, it does so.

Only the choice is changed; what runs then is its FSDP2 code and the trainer's, over gloo.
"""

from __future__ import annotations

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

_original = AcceleratorState.__init__


def _init(self, *args, fsdp_plugin=None, **kwargs) -> None:
    _original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None:
        self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        if self._mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self._mixed_precision)
        self.fsdp_plugin = fsdp_plugin


AcceleratorState.__init__ = _init
