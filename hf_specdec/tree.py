"""Token trees: topology as lists of parents, and how a tree is built. Pure Python, one row at a time.

A tree over n nodes is its list of parents: `parents[0] == -1` (the root, the last committed token) and
`parents[i] < i` for every other node, so that a parent always comes before its children.
"""

from __future__ import annotations

from collections.abc import Sequence

from .errors import DraftError


def check(parents: Sequence[int]) -> None:
    """Raise `DraftError` unless `parents` is a tree in parent-first order."""
    if not parents or parents[0] != -1:
        raise DraftError(f"a tree starts with its root: parents[0] must be -1, got {list(parents[:1])}")
    for node, parent in enumerate(parents[1:], start=1):
        if not 0 <= parent < node:
            raise DraftError(f"node {node} must come after its parent, got parents[{node}] = {parent}")


def is_chain(parents: Sequence[int]) -> bool:
    """Whether every node is the only child of the node before it."""
    return all(parent == node - 1 for node, parent in enumerate(parents))


def depths(parents: Sequence[int]) -> list[int]:
    """Distance of every node from the root."""
    depth = [0] * len(parents)
    for node in range(1, len(parents)):
        depth[node] = depth[parents[node]] + 1
    return depth


def children(parents: Sequence[int]) -> list[list[int]]:
    """Children of every node, in node order."""
    below: list[list[int]] = [[] for _ in parents]
    for node in range(1, len(parents)):
        below[parents[node]].append(node)
    return below


def ancestors(parents: Sequence[int]) -> list[list[bool]]:
    """`[i][j]`: node j lies on the path from the root to node i, both ends included."""
    n = len(parents)
    mask = [[False] * n for _ in range(n)]
    for node in range(n):
        if node:
            mask[node] = list(mask[parents[node]])
        mask[node][node] = True
    return mask


def path_probabilities(parents: Sequence[int], probabilities: Sequence[float]) -> list[float]:
    """Probability that each node is reached: the product of `probabilities` along its path (root: 1)."""
    reached = [1.0] * len(parents)
    for node in range(1, len(parents)):
        reached[node] = reached[parents[node]] * probabilities[node]
    return reached


def best_first(parents: Sequence[int], probabilities: Sequence[float]) -> list[int]:
    """All nodes by falling path probability, every parent before its children.

    Any prefix of the answer is a tree that contains the root, and among the trees of its size the one with the
    largest expected number of accepted tokens (Sequoia, arXiv:2402.12374, for independent nodes).
    """
    reached = path_probabilities(parents, probabilities)
    return sorted(range(len(parents)), key=lambda node: (-reached[node], node))


def subtree(parents: Sequence[int], nodes: Sequence[int]) -> list[int]:
    """Parents of the tree that keeps only `nodes` (ascending, root first, closed under parents)."""
    new_index = {node: i for i, node in enumerate(nodes)}
    return [-1 if parents[node] < 0 else new_index[parents[node]] for node in nodes]


class TreeBuilder:
    """One row's token tree while a drafter grows it. `Draft.of` makes a draft of one builder per row.

    Args:
        root: the row's last committed token, node 0.
    """

    def __init__(self, root: int) -> None:
        self.tokens = [root]
        self.parents = [-1]
        # the drafter's own estimate that a node is accepted once its parent is
        self.confidence = [1.0]
        # the product of these along a node's path
        self.reached = [1.0]
        self.passenger = [False]

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, confidence: float = 1.0, *, passenger: bool = False) -> int:
        """Put a token below a node. Returns its node."""
        confidence = min(1.0, confidence)
        self.tokens.append(token)
        self.parents.append(parent)
        self.confidence.append(confidence)
        self.reached.append(self.reached[parent] * confidence)
        self.passenger.append(passenger)
        return len(self.tokens) - 1

    def nodes_to(self, node: int) -> list[int]:
        """The nodes on the path from below the root to this one."""
        path: list[int] = []
        while node > 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def path(self, node: int) -> list[int]:
        """The tokens on that path."""
        return [self.tokens[at] for at in self.nodes_to(node)]

    def best_path(self) -> list[float]:
        """Confidences along the most probable path to the deepest level."""
        depth = depths(self.parents)
        deepest = max(range(len(self)), key=lambda node: (depth[node], self.reached[node]))
        return [self.confidence[at] for at in self.nodes_to(deepest)]

    def merge(self, other: TreeBuilder) -> None:
        """Take in the paths of another tree with the same root.

        The two drafters are taken to err independently: a node that both hold, with confidences a and b, gets
        1 - (1 - a)(1 - b).
        """
        known = {key: node for node, key in enumerate(zip(self.parents, self.tokens, strict=True))}
        place = [0]  # of the other tree's nodes in this one
        for node in range(1, len(other)):
            key = (place[other.parents[node]], other.tokens[node])
            if key in known:
                both = 1 - (1 - self.confidence[known[key]]) * (1 - other.confidence[node])
                self.confidence[known[key]] = both
            else:
                known[key] = self.add(*key, other.confidence[node], passenger=other.passenger[node])
            place.append(known[key])
        self.reached = path_probabilities(self.parents, self.confidence)

    def best(self, nodes: int) -> TreeBuilder:
        """The tree of the root and the `nodes` other nodes that are most probably reached, in the order of addition."""
        if nodes >= len(self) - 1:
            return self
        kept = sorted(best_first(self.parents, self.confidence)[: nodes + 1])
        picked, place = TreeBuilder(self.tokens[0]), {0: 0}
        for node in kept[1:]:
            place[node] = picked.add(
                place[self.parents[node]], self.tokens[node], self.confidence[node], passenger=self.passenger[node]
            )
        return picked
