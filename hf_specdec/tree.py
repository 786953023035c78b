"""Token trees as topology: parents, depths, ancestors, paths. Pure Python, one row at a time.

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


Row = tuple[list[int], list[int], list[float]]


def union(first: Row, second: Row) -> Row:
    """Tokens, parents and confidences of the tree that holds the paths of two trees with the same root.

    A node that both hold, with confidences a and b, gets 1 - (1 - a)(1 - b).
    """
    tokens, parents, confidence = list(first[0]), list(first[1]), list(first[2])
    known = {(parent, token): node for node, (token, parent) in enumerate(zip(tokens, parents, strict=True))}
    place = [0]  # of the second tree's nodes in the union
    for token, parent, value in list(zip(*second, strict=True))[1:]:
        key = (place[parent], token)
        if key not in known:
            known[key] = len(tokens)
            tokens.append(token)
            parents.append(place[parent])
            confidence.append(value)
        else:
            confidence[known[key]] = 1 - (1 - confidence[known[key]]) * (1 - value)
        place.append(known[key])
    return tokens, parents, confidence
