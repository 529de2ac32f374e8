"""When a run that follows a plan is planned anew, because others take part in it. Pure.

Idea: a change of members changes what is best for the rest; one that is undone within minutes does
not, and planning costs seconds of a core.

Rule: once others take part than those that the run was planned for last, and they have been the
same for `settle_s`, and it was not planned anew within `apart_s`. So a region that comes and goes
has the run planned at most once in `apart_s`. Whether the new plan is worth anything is decided by
its gain (`geo_ray.planning.replan`: 5 % of what is left, the change paid).

Source: ours; hysteresis as in `geo_ray.planning.replan`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import inf

SETTLE_S = 60.0
APART_S = 600.0


@dataclass(slots=True)
class ReplanPolicy:
    """See the module's docstring.

    Attributes:
        settle_s: how long others must have taken part.
        apart_s: shortest time between two plans.
    """

    settle_s: float = SETTLE_S
    apart_s: float = APART_S
    _planned: frozenset[str] | None = None  # whom it was planned for last
    _seen: frozenset[str] = frozenset()
    _since_s: float = 0.0
    _newest_s: float = -inf

    def due(self, members: Collection[str], now_s: float) -> bool:
        """Whether to plan anew for those who take part now; asked again and again.

        The first time those are there that the run was planned for.
        """
        present = frozenset(members)
        if present != self._seen:
            self._seen, self._since_s = present, now_s
        if self._planned is None or present == self._planned:
            self._planned = present
            return False
        if now_s - self._since_s < self.settle_s or now_s - self._newest_s < self.apart_s:
            return False
        self._planned, self._newest_s = present, now_s
        return True

    def doubt(self) -> None:
        """Whom the run was planned for is not known: plan once those who are there settle."""
        self._planned = frozenset()
