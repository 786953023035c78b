"""One file per way of drafting; the mode, the file and the class share a stem."""

from ..drafter import Drafter
from .assistant import AssistantDrafter
from .early_exit import EarlyExitDrafter
from .lookahead import LookaheadDrafter
from .medusa import MedusaDrafter
from .prompt_lookup import PromptLookupDrafter

__all__ = [
    "AssistantDrafter",
    "Drafter",
    "EarlyExitDrafter",
    "LookaheadDrafter",
    "MedusaDrafter",
    "PromptLookupDrafter",
]
