"""The agent of a machine: drains its Ray node before the machine is reclaimed.

``python -m geo_ray.cloud.agent`` runs next to the node. Ray schedules nothing on a draining node.
The run actor polls for draining nodes every few seconds and lets their workers leave in order
(docs/guides/workers.md). The agent loads Ray only after it has received a notice, so it stays small
until then.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from geo_ray.base.errors import GeoRayError
from geo_ray.cloud.notices import CLOUDS, MachineNotice, NoticeKind, NoticeReader, open_notices

log = logging.getLogger(__name__)

POLL_S: Final = {"aws": 5.0, "tencent": 5.0, "local": 0.5}
_UNKNOWN_S: Final = 120.0  # drain deadline for a notice that has no time
_ANSWER_S: Final = 10.0

Drain = Callable[[float, str], bool]
"""Drains this machine's node before a unix time (s), with a reason. False: there is no node yet."""


@dataclass(slots=True)
class NoticeAgent:
    """Turns notices into one drain; see the module.

    Attributes:
        reader: reads notices from the cloud.
        drain: asks Ray to drain the node.
        also_risk: whether a rebalance recommendation also drains the node.
    """

    reader: NoticeReader
    drain: Drain
    also_risk: bool = False
    _done: MachineNotice | None = None
    _printed: str = ""

    def tick(self, now_unix_s: float) -> MachineNotice | None:
        """Read once. Return the notice that was carried out now, if any.

        A failure is retried at the next tick: the agent must survive a metadata service or a Ray
        head that is temporarily unavailable.
        """
        try:
            notice = self.reader.read()
            if notice is None or notice == self._done:
                return None
            if notice.kind is NoticeKind.RISK and not self.also_risk:
                self._print(f"{notice.machine} may be reclaimed; its node continues")
                return None
            deadline = notice.deadline_unix_s or now_unix_s + _UNKNOWN_S
            if not self.drain(deadline, f"the cloud reclaims {notice.machine}"):
                self._print(f"{notice.machine} is being reclaimed; it has no node to drain")
                return None
        except GeoRayError as error:
            self._print(error.message)
            return None
        except Exception as error:  # Ray raises exceptions of many types
            self._print(f"the node cannot be drained yet: {type(error).__name__}: {error}")
            return None
        self._done = notice
        self._print(f"{notice.machine} is reclaimed in {deadline - now_unix_s:.0f} s: draining")
        return notice

    def _print(self, text: str) -> None:
        """Print a message unless it repeats the last one."""
        head, _, _ = text.partition(" in ")
        if head != self._printed:
            self._printed = head
            log.warning(text)


def drain_by_label(address: str, machine: str) -> Drain:
    """Return a function that drains the node with the label of a machine."""

    def drain(deadline_unix_s: float, why: str) -> bool:
        from geo_ray.ray_cluster.labels import MACHINE_LABEL
        from geo_ray.ray_cluster.ray_internals import drain_nodes_labelled

        return bool(
            drain_nodes_labelled(
                address, MACHINE_LABEL, machine, deadline_unix_s, why, longest_s=_ANSWER_S
            )
        )

    return drain


def main() -> None:
    """Run until the machine ends."""
    parser = argparse.ArgumentParser(prog="geo_ray.cloud.agent")
    parser.add_argument("--cloud", choices=CLOUDS, required=True)
    parser.add_argument("--address", required=True, help="address of the Ray head, host:port")
    parser.add_argument("--machine", required=True, help="name of this machine in the cloud")
    parser.add_argument("--url", help="metadata service URL to use instead of the cloud's")
    parser.add_argument("--file", type=Path, help="notice file of the local cloud")
    parser.add_argument(
        "--also-risk", action="store_true", help="also drain on a rebalance recommendation"
    )
    asked = parser.parse_args()
    out = logging.StreamHandler()
    out.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log.addHandler(out)
    reader = open_notices(asked.cloud, asked.url, asked.file)
    agent = NoticeAgent(reader, drain_by_label(asked.address, asked.machine), asked.also_risk)
    while True:
        agent.tick(time.time())
        time.sleep(POLL_S[asked.cloud])


if __name__ == "__main__":
    main()
