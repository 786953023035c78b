"""One file per way of drafting, with its settings beside it; the mode, the file and the class share a stem.

A new mode is one file and its line below. The line also states what the conformance suite must give the mode.
"""

from ..modes import Mode, register_mode
from . import assistant, early_exit, lookahead, medusa, prompt_lookup

register_mode(Mode("assistant", assistant.AssistantConfig, assistant.build, needs_assistant=True))
register_mode(
    Mode(
        "early_exit",
        early_exit.EarlyExitConfig,
        early_exit.build,
        decoder_only="early_exit splits the layers of decoder-only models",
        conformance={"exit_layer": 2},
    )
)
register_mode(Mode("lookahead", lookahead.LookaheadConfig, lookahead.build))
register_mode(
    Mode(
        "medusa",
        medusa.MedusaModeConfig,
        medusa.build,
        decoder_only="draft heads are trained on decoder-only models",
        needs_heads="sequential",
    )
)
register_mode(Mode("prompt_lookup", prompt_lookup.PromptLookupConfig, prompt_lookup.build))
