"""Changes a tree so that it avoids broken links and regions that are down."""

from __future__ import annotations

from itertools import product

from geo_ray.overlay.links import Links
from geo_ray.overlay.plan import Tree


def mend(tree: Tree, links: Links) -> Tree:
    """Give a new parent to regions whose link to their parent is broken, or whose parent is down.

    A region goes to the nearest of its parent's ancestors that works, else to any region outside
    its own subtree. If the region reaches none of these but one below it does, the subtree is
    re-rooted at that one. If none does, the region keeps its parent.
    """
    parents = list(tree.parents)
    masks = tree.masks()
    for node in tree.outward():
        parent = parents[node]
        if node == parent or not _is_bad(links, node, parent):
            continue
        above = [parent]
        while parents[above[-1]] != above[-1]:
            above.append(parents[above[-1]])
        others = [n for n in range(len(parents)) if not masks[node] >> n & 1]
        below = [n for n in range(len(parents)) if masks[node] >> n & 1 and n != node]
        for end, candidate in product([node, *below], [*above[1:], *others]):
            if not _is_bad(links, end, candidate):
                _turn(parents, node, end, candidate)
                masks = Tree(tuple(parents), tree.first, tree.stop).masks()
                break
    return Tree(tuple(parents), tree.first, tree.stop)


def _turn(parents: list[int], top: int, end: int, outside: int) -> None:
    """Re-root the subtree of ``top`` at its member ``end`` and make it a child of ``outside``."""
    node, parent = end, outside
    while True:
        following, parents[node] = parents[node], parent
        if node == top:
            return
        node, parent = following, node


def _is_bad(links: Links, node: int, parent: int) -> bool:
    return parent in links.down or links.is_broken(node, parent)
