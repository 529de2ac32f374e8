"""What a job is worth by how long it takes: a sigmoid that falls around its target.

``u(d) = worth / (1 + exp(urgency (d - target_slots)))``, where ``d`` is the number of slots from
the one in which the job came to the last one in which it ran. Urgency 0 is a job that does not mind
waiting (half of its worth, whenever); 4 to 6 one that is worth nothing when late.

Source: read in SMD, a sister paper of PD-ORS by the same authors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

_STEEP: Final = 700.0  # exp of more is no float


@dataclass(frozen=True, slots=True)
class SigmoidUtility:
    """See the module's docstring.

    Attributes:
        worth: priority; what the job is worth at once, if it is urgent.
        urgency: per slot.
        target_slots: when half of the worth is gone.
    """

    worth: float
    urgency: float
    target_slots: float

    def of(self, slots: float) -> float:
        """Return what finishing ``slots`` after the slot of arrival is worth."""
        return self.worth / (1 + math.exp(min(_STEEP, self.urgency * (slots - self.target_slots))))
