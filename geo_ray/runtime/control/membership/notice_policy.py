"""Decides which regions leave because a machine of their servers will be taken away. Pure.

Idea: a region whose server or bridge is on a machine with a notice is lost with it, whatever is
done. If it leaves before, at a border, nothing is lost, and the machine can go at once.

Rule: it is asked to leave as soon as the notice is heard of. If it has not come to a border
`AT_ONCE_S` before the machine goes, the others go on without it then: they would have to find out
otherwise. One region stays, though all have notices: a run of nobody cannot go on; and so does one
that the run cannot go on without, such as the averager's while nobody stands by.

Source: ours.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final, Literal

AT_ONCE_S: Final = 2.0
"""Before a machine goes, the others go on without a region that has not come to a border."""


def leave_on_notice(
    left_s: Mapping[str, float],
    members: Collection[str],
    leaving: Collection[str],
    needed: Collection[str],
) -> dict[str, Literal["leave", "lose"]]:
    """What is done about notices now.

    Args:
        left_s: how long servers of regions will be there still, by region.
        members: the regions that take part.
        leaving: those of them that are asked to leave already, for whatever reason.
        needed: those of them that the run cannot go on without.

    Returns:
        Regions to be asked to leave, and those to go on without at once.
    """
    answers: dict[str, Literal["leave", "lose"]] = {}
    stay = [name for name in members if name not in leaving]
    for region in sorted(left_s, key=lambda name: (left_s[name], name)):
        if region not in members or region in needed:
            continue
        if region in leaving:
            if left_s[region] <= AT_ONCE_S:
                answers[region] = "lose"
        elif len(stay) > 1:
            answers[region] = "leave"
            stay.remove(region)
    return answers
