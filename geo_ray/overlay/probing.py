"""Chooses links to measure while nothing else is under way: those measured longest ago.

Regions compute between two rounds, and the links are idle. Probes are pairs of which no two share a
sender or a receiver, so that each shows what its link can do.
"""

from __future__ import annotations

from random import Random

from geo_ray.overlay.links import Links
from geo_ray.overlay.plan import PROBE, SendOrder


def probes(links: Links, num_segments: int, random: Random) -> list[SendOrder]:
    """Return orders to send a few segments, at most one from and to every region.

    Args:
        links: present knowledge of links.
        num_segments: segments per probe.
        random: breaks ties.
    """
    regions = [node for node in range(links.num_regions) if node not in links.down]
    pairs = [(a, b) for a in regions for b in regions if a != b and not links.is_broken(a, b)]
    random.shuffle(pairs)
    pairs.sort(key=lambda pair: -links.age(*pair))
    senders: set[int] = set()
    receivers: set[int] = set()
    chosen = []
    for src, dst in pairs:
        if src not in senders and dst not in receivers and links.age(src, dst) > 0:
            senders.add(src)
            receivers.add(dst)
            chosen.append(SendOrder(src, dst, PROBE, 0, num_segments))
    return chosen
