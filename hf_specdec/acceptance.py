"""What an acceptance rule is, and the rules by name.

The walk asks a rule once per committed token. The rule sees the processed scores of the node that was reached and the
children drafted below it, and returns the token to commit and the child that carries it, if any. Where no child does,
that token ends the round. A rule sees no model and no cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .errors import AcceptanceRuleError, InvalidSettingError
from .sampling import Selection


@dataclass(frozen=True)
class Offer:
    """The children drafted below a node."""

    # node numbers and tokens of the children, in order of preference
    nodes: Sequence[int] = ()
    tokens: Sequence[int] = ()
    # per child: the distribution it was drawn from, [V_q]; None for a deterministic draft
    q: Sequence[torch.Tensor] | None = None

    def child(self, token: int) -> int | None:
        """The child that carries `token`."""
        for node, offered in zip(self.nodes, self.tokens, strict=True):
            if offered == token:
                return node
        return None


@dataclass(frozen=True)
class Choice:
    """One committed token, and the drafted node that carried it (None: the round ends here)."""

    token: int
    node: int | None


def check_choices(choices: Sequence[Choice], offers: Sequence[Offer], vocab_size: int) -> None:
    """Raise `AcceptanceRuleError` unless these are choices from these offers: rules are open to users."""
    if not isinstance(choices, list) or len(choices) != len(offers):
        raise AcceptanceRuleError(f"an acceptance rule must return a list of {len(offers)} choices, got {choices!r}")
    for choice, offer in zip(choices, offers, strict=True):
        if not isinstance(choice, Choice) or type(choice.token) is not int or not 0 <= choice.token < vocab_size:
            raise AcceptanceRuleError(f"an acceptance rule chose {choice!r}: no token of a vocabulary of {vocab_size}")
        carried = choice.node is None or (choice.node, choice.token) in zip(offer.nodes, offer.tokens, strict=True)
        if not carried:
            raise AcceptanceRuleError(
                f"an acceptance rule chose {choice!r}, but the nodes offered, with their tokens, were "
                f"{dict(zip(offer.nodes, offer.tokens, strict=True))}"
            )


class Choose(Protocol):
    """A rule at work in one call."""

    def __call__(
        self, scores: torch.Tensor, offers: Sequence[Offer], step: int, rows: list[int] | None
    ) -> list[Choice]:
        """Choose for `scores [k, V]` of the given rows (None: all of the batch), all at generation step `step`."""
        ...


@dataclass(frozen=True)
class AcceptanceRule:
    """A rule of acceptance: `speculative_config={"acceptance": name}`."""

    name: str
    # from how logits become tokens and the settings of the mode (`SpeculativeConfig`)
    build: Callable[[Selection, Any], Choose]
    # whether greedy output is plain decoding's, and sampled output has its distribution
    lossless: bool
    # whether sampled tokens are those of the noise tape, the text of the seed; where the tape may not be kept, as on
    # a device whose `multinomial` is another one, `rejection` takes its place
    reads_tape: bool


_rules: dict[str, AcceptanceRule] = {}


def register_rule(rule: AcceptanceRule) -> None:
    """Make `acceptance=rule.name` available (replacing a rule of that name)."""
    _rules[rule.name] = rule


def unregister_rule(name: str) -> None:
    """Take a rule away again. Raises `InvalidSettingError` where there is none of this name."""
    get_rule(name)
    del _rules[name]


def rule_names() -> list[str]:
    """Names of the registered rules."""
    return sorted(_rules)


def get_rule(name: Any) -> AcceptanceRule:
    """The rule of this name. Raises `InvalidSettingError`, which lists the known ones."""
    if not isinstance(name, str) or name not in _rules:
        raise InvalidSettingError(f"acceptance must be {' or '.join(map(repr, rule_names()))}, got {name!r}.")
    return _rules[name]
