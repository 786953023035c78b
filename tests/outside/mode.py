"""A mode as somebody outside the package writes it: one file, with its settings, its drafter and its registration.

As a pytest plugin (`-p outside.mode`) it registers itself, and the conformance suite tests it like any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hf_specdec import (
    Budget,
    Context,
    Draft,
    Drafter,
    Mode,
    Request,
    SpeculativeConfig,
    TreeBuilder,
    register_mode,
)

NAME = "followers"


@dataclass(frozen=True, kw_only=True)
class FollowersConfig(SpeculativeConfig):
    """Settings of the mode.

    Args:
        alternatives: tokens drafted below the root.
    """

    alternatives: int = 1


class FollowersDrafter(Drafter):
    """Drafts what followed each token earlier in the row's text, the latest first."""

    def __init__(self, config: FollowersConfig) -> None:
        self.config = config

    def propose(self, context: Context, budget: Budget) -> Draft:
        trees = []
        for text, depth in zip(context.tokens, budget.depth, strict=True):
            following = list(pairwise(text))[::-1]
            tree = TreeBuilder(text[-1])
            roots = list(dict.fromkeys(after for before, after in following if before == text[-1]))
            for token in roots[: self.config.alternatives] if depth > 0 else []:
                node = tree.add(0, token, 0.6)
                for _ in range(depth - 1):
                    after = next((after for before, after in following if before == tree.tokens[node]), None)
                    if after is None or len(tree) > budget.nodes:
                        break
                    node = tree.add(node, after, 0.5)
            trees.append(tree)
        return Draft.of(trees)


def build(request: Request, config: Any) -> FollowersDrafter:
    return FollowersDrafter(config)


MODE = Mode(NAME, FollowersConfig, build, conformance={"alternatives": 2})


def pytest_configure() -> None:
    register_mode(MODE)
