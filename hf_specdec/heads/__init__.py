"""Draft heads that are trained beside a model and travel as PEFT adapters.

A kind of heads is one file or folder and a line below; `kind.HeadKind` lists what it says.
"""

from . import medusa, trained_exit
from .config import HeadConfig
from .finding import find_heads, has_heads
from .kind import HeadKind, get_head_kind, head_kinds, kind_of
from .medusa.config import MedusaConfig
from .medusa.network import BoundHeads, MedusaHeads
from .output import HeadNetwork, SharedOutput
from .trained_exit.config import TrainedExitConfig
from .trained_exit.network import BoundExit, TrainedExit
from .tuner import register_head_kind, tuner_for

for _kind in (*medusa.KINDS, trained_exit.KIND):
    register_head_kind(_kind)

# what `hf-specdec train-heads` trains unless told otherwise
DEFAULT_KIND = "sequential"
MedusaModel = tuner_for(MedusaConfig)

__all__ = [
    "DEFAULT_KIND",
    "BoundExit",
    "BoundHeads",
    "HeadConfig",
    "HeadKind",
    "HeadNetwork",
    "MedusaConfig",
    "MedusaHeads",
    "MedusaModel",
    "SharedOutput",
    "TrainedExit",
    "TrainedExitConfig",
    "find_heads",
    "get_head_kind",
    "has_heads",
    "head_kinds",
    "kind_of",
    "register_head_kind",
]
