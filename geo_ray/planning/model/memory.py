"""What a model needs of the machines' memory, and how many rows fit beside it.

Counted in copies of the model, 4 bytes a parameter:

- a worker: parameters and gradient, and the optimizer's values where workers take steps of their
  own, on its accelerator if it has one; there its host keeps two more, which it shares with its
  parameter server
- a region's parameter server and bridge: parameters, the sum of gradients, the optimizer's values,
  the strategy's two (where the region stood at the last exchange, and what is being sent) and, with
  several regions, an update and an answer on their way

and, for every row, what the backward pass needs of the forward pass. It is the least that is
needed: the averager's region needs more, and nothing is said of the memory of other programs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from geo_ray.clouds.instances import Instance

_GB: Final = 1e9
_FP32_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class Footprint:
    """See the module's docstring.

    Attributes:
        num_params: of the model.
        states: values per parameter that the optimizer keeps.
        local: whether workers take steps of their own.
        regions: of the job.
        row_bytes: that a row needs; None: not known, and not counted.
    """

    num_params: int
    states: int = 0
    local: bool = False
    regions: int = 1
    row_bytes: float | None = None

    @property
    def worker_bytes(self) -> float:
        """What a worker needs where it computes."""
        return self._copies(2 + (self.states if self.local else 0))

    @property
    def server_bytes(self) -> float:
        """What a region's parameter server and bridge need."""
        return self._copies(4 + self.states + (2 if self.regions > 1 else 0))

    def room(self, machine: Instance, *, serves: bool) -> tuple[float, str]:
        """Return the rows of a step that a machine has room for, and why there is none.

        Args:
            machine: what it has.
            serves: whether the parameter server may be on it.
        """
        accelerators = machine.accelerators or 0
        workers = max(1, accelerators)
        host_bytes = (self.server_bytes if serves else 0.0) + workers * (
            self._copies(2) if accelerators else self.worker_bytes
        )
        row_bytes = self.row_bytes or 0.0
        rooms = []
        if accelerators and machine.accelerator_gb is not None:
            rooms.append(("an accelerator", machine.accelerator_gb, self.worker_bytes, workers))
        if machine.host_gb is not None:
            rows_there = 0 if accelerators else 1
            rooms.append(("the machine", machine.host_gb, host_bytes, rows_there))
        most = math.inf
        for what, has_gb, needs_bytes, shares in rooms:
            left = has_gb * _GB - needs_bytes
            if left < (row_bytes if shares else 0.0):
                beside = f", and {row_bytes / _GB:.2g} GB for a row" if shares and row_bytes else ""
                return 0, (
                    f"{what} has {has_gb:g} GB of memory and {needs_bytes / _GB:.3g} GB are needed "
                    f"for model, gradients and optimizer{beside}"
                )
            if shares and row_bytes:
                most = min(most, shares * math.floor(left / row_bytes))
        return most, ""

    def _copies(self, number: float) -> float:
        return number * _FP32_BYTES * self.num_params
