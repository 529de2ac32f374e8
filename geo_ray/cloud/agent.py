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
_UNKNOWN_S: Final = 120.0  # what a notice without a time leaves
_ANSWER_S: Final = 10.0

Drain = Callable[[float, str], bool]
"""Drains this machine's node until a time (unix, s), for a reason; False: there is no node yet."""


@dataclass(slots=True)
class NoticeAgent:
    """Turns notices into one drain; see the module.

    Attributes:
        reader: asks the cloud.
        drain: tells Ray.
        also_risk: whether a mere risk drains the node, too.
    """

    reader: NoticeReader
    drain: Drain
    also_risk: bool = False
    _done: MachineNotice | None = None
    _told: str = ""

    def tick(self, now_unix_s: float) -> MachineNotice | None:
        """Ask once; return the notice that was carried out now, if one was.

        What fails is tried again at the next tick: neither a metadata service nor a head that is
        away for a while may end the agent.
        """
        try:
            notice = self.reader.read()
            if notice is None or notice == self._done:
                return None
            if notice.kind is NoticeKind.RISK and not self.also_risk:
                self._tell(f"{notice.machine} may be taken away; its node goes on")
                return None
            deadline = notice.deadline_unix_s or now_unix_s + _UNKNOWN_S
            if not self.drain(deadline, f"the cloud takes {notice.machine} back"):
                self._tell(f"{notice.machine} is taken away; it has no node to drain")
                return None
        except GeoRayError as error:
            self._tell(error.message)
            return None
        except Exception as error:  # Ray's, of many kinds
            self._tell(f"the node cannot be drained yet: {type(error).__name__}: {error}")
            return None
        self._done = notice
        self._tell(f"{notice.machine} is taken away in {deadline - now_unix_s:.0f} s: draining")
        return notice

    def _tell(self, text: str) -> None:
        """Say something unless it was the last that was said."""
        head, _, _ = text.partition(" in ")
        if head != self._told:
            self._told = head
            log.warning(text)


def drain_by_label(address: str, machine: str) -> Drain:
    """Return what drains the node with a machine's label."""

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
    parser.add_argument("--address", required=True, help="host:port of Ray's head")
    parser.add_argument("--machine", required=True, help="the cloud's name of this machine")
    parser.add_argument("--url", help="of the metadata service, in place of the cloud's")
    parser.add_argument("--file", type=Path, help="of the local cloud's notice")
    parser.add_argument("--also-risk", action="store_true", help="drain also on a mere risk")
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
