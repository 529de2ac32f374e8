"""What machines have: accelerators, memory, network. Only for types of the shipped prices.

Source: AWS's pages of instance types, as known in 2026 and not read again; undated. Networks are
what a type keeps up, and not the bursts of "up to"; sizes are as sold, a GB taken as 10^9 bytes,
which is on the safe side. A configuration's own numbers count more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Instance:
    """What a type of machine has; None: not known.

    Attributes:
        accelerators: how many; each takes a worker.
        accelerator_gb: memory of one of them; None also if there is none.
        host_gb: the machine's own memory.
        network_gbps: what its network keeps up.
    """

    accelerators: int | None = None
    accelerator_gb: float | None = None
    host_gb: float | None = None
    network_gbps: float | None = None


INSTANCES: Final[dict[tuple[str, str], Instance]] = {
    ("aws", "c5a.2xlarge"): Instance(0, None, 16, 2.5),
    ("aws", "m5.2xlarge"): Instance(0, None, 32, 2.5),
    ("aws", "g4dn.xlarge"): Instance(1, 16, 16, 5),
    ("aws", "g5.xlarge"): Instance(1, 24, 16, 2.5),
    ("aws", "g6.2xlarge"): Instance(1, 24, 32, 5),
    ("aws", "p4d.24xlarge"): Instance(8, 40, 1152, 400),
    ("aws", "p5.4xlarge"): Instance(1, 80, 256, 100),
    ("aws", "p5.48xlarge"): Instance(8, 80, 2048, 3200),
}
"""By cloud and type."""


def instance_of(cloud: str, kind: str) -> Instance:
    """Return what is known of a type."""
    return INSTANCES.get((cloud, kind), Instance())
