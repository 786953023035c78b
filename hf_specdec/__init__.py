"""Exact speculative decoding inside transformers' `generate`.

`import hf_specdec` gives `model.generate()` the argument `speculative_mode=`; the output stays what it was.
"""

from . import analysis, errors
from ._version import __version__
from .config import (
    AssistantConfig,
    EarlyExitConfig,
    LookaheadConfig,
    MedusaModeConfig,
    PromptLookupConfig,
    SpeculativeConfig,
    configure,
)
from .decoding.stats import RowStats, SpeculationStats, record
from .draft import Budget, Context, Draft, Scores, Verdict
from .drafters import AssistantDrafter, Drafter, EarlyExitDrafter, LookaheadDrafter, MedusaDrafter, PromptLookupDrafter
from .errors import SpeculationError
from .generation import SpeculativeGenerationMixin, install, uninstall
from .heads import MedusaConfig, MedusaModel
from .modes import Mode, Request, mode_names, register_mode
from .sampling import NoiseTape

__all__ = [
    "AssistantConfig",
    "AssistantDrafter",
    "Budget",
    "Context",
    "Draft",
    "Drafter",
    "EarlyExitConfig",
    "EarlyExitDrafter",
    "LookaheadConfig",
    "LookaheadDrafter",
    "MedusaConfig",
    "MedusaDrafter",
    "MedusaModeConfig",
    "MedusaModel",
    "Mode",
    "NoiseTape",
    "PromptLookupConfig",
    "PromptLookupDrafter",
    "Request",
    "RowStats",
    "Scores",
    "SpeculationError",
    "SpeculationStats",
    "SpeculativeConfig",
    "SpeculativeGenerationMixin",
    "Verdict",
    "__version__",
    "analysis",
    "configure",
    "errors",
    "install",
    "mode_names",
    "record",
    "register_mode",
    "uninstall",
]

install()
