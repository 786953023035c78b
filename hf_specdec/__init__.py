"""Exact speculative decoding inside transformers' `generate`.

`import hf_specdec` gives `model.generate()` the argument `speculative_mode=`; the output stays what it was.
"""

from typing import TYPE_CHECKING, Any

from . import analysis, errors
from . import drafters as _modes  # noqa: F401 - registers them
from . import rules as _rules  # noqa: F401 - registers them
from ._version import __version__
from .acceptance import AcceptanceRule, Choice, Offer, register_rule, rule_names, unregister_rule
from .config import SpeculativeConfig
from .context import Context, Picks
from .decoding.stats import RowStats, SpeculationStats, record
from .draft import LAST_HIDDEN, Budget, Draft, HiddenRequest, Scores, Verdict
from .drafter import Drafter
from .drafters.assistant import AssistantConfig, AssistantDrafter
from .drafters.early_exit import EarlyExitConfig, EarlyExitDrafter
from .drafters.lookahead import LookaheadConfig, LookaheadDrafter
from .drafters.medusa import MedusaDrafter, MedusaModeConfig
from .drafters.prompt_lookup import PromptLookupConfig, PromptLookupDrafter
from .errors import SpeculationError
from .generation import SpeculativeGenerationMixin
from .install import install, uninstall
from .modes import Mode, Request, configure, mode_names, register_mode, unregister_mode
from .sampling import NoiseTape
from .tree import TreeBuilder

if TYPE_CHECKING:
    from .heads import MedusaConfig, MedusaModel

__all__ = [
    "LAST_HIDDEN",
    "AcceptanceRule",
    "AssistantConfig",
    "AssistantDrafter",
    "Budget",
    "Choice",
    "Context",
    "Draft",
    "Drafter",
    "EarlyExitConfig",
    "EarlyExitDrafter",
    "HiddenRequest",
    "LookaheadConfig",
    "LookaheadDrafter",
    "MedusaConfig",
    "MedusaDrafter",
    "MedusaModeConfig",
    "MedusaModel",
    "Mode",
    "NoiseTape",
    "Offer",
    "Picks",
    "PromptLookupConfig",
    "PromptLookupDrafter",
    "Request",
    "RowStats",
    "Scores",
    "SpeculationError",
    "SpeculationStats",
    "SpeculativeConfig",
    "SpeculativeGenerationMixin",
    "TreeBuilder",
    "Verdict",
    "__version__",
    "analysis",
    "configure",
    "errors",
    "install",
    "mode_names",
    "record",
    "register_mode",
    "register_rule",
    "rule_names",
    "uninstall",
    "unregister_mode",
    "unregister_rule",
]

# draft heads come with PEFT, which is imported once it is needed
_OF_HEADS = ("MedusaConfig", "MedusaModel")


def __getattr__(name: str) -> Any:
    if name in _OF_HEADS:
        from . import heads

        return getattr(heads, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


install()
