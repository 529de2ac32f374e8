"""``python -m geo_ray.cloud.cluster.serve STATE [--stays]``: runs beside the head, while it lives.

Starts the cluster's autoscaler, writes down what it tells, and hears by the cluster's record that
it is to end: then runs are stopped, which saves them, and all machines are drained and ended. The
head itself is ended by whoever takes the cluster down, unless it stays: then this waits for the
next cluster that is written there. If this process dies, it is started again, or the cluster is
taken down without it.
"""

from __future__ import annotations

import argparse
import logging
import math
import time
from pathlib import Path
from typing import Final

from geo_ray.base.errors import GeoRayError, RegionsSilentError
from geo_ray.cloud.autoscaler.actions import AutoscalerStatus
from geo_ray.cloud.autoscaler.actor import AutoscaleOrder
from geo_ray.cloud.autoscaler.run_work import NamedRun
from geo_ray.cloud.autoscaler.serving import RunStops, ServedCluster, served
from geo_ray.cloud.cluster.head import find_head, head_address, job_server_of, listed_for_head
from geo_ray.cloud.cluster.providers import RemoteProvider, RemoteStore, open_clouds
from geo_ray.cloud.cluster.state import ClusterRecord, ClusterState
from geo_ray.cloud.cluster.status import ALL_ENDED, ToldStatus, read_status, tell_status
from geo_ray.cloud.provider import MachineState

_HEAD_S: Final = 300.0
_AGAIN_S: Final = 1.0
_SAVE_S: Final = 180.0
_NEAR_LOOK_S: Final = 0.5
_MOST_TOLD: Final = 50
_log = logging.getLogger(__name__)


class ClusterServer:
    """See the module.

    Args:
        state: where the cluster is written down.
        cluster: its head.
        record: what it is.
    """

    def __init__(self, state: ClusterState, cluster: ServedCluster, record: ClusterRecord) -> None:
        self._state, self._cluster, self._record = state, cluster, record
        self._store = state.store()
        self._provider = open_clouds(record, state, longest_s=record.autoscale.answer_s)
        _, self._tag = read_status(self._store, record.made)
        self._did: tuple[str, ...] = ()
        self._written_s = -math.inf
        self._is_released = self._is_short = False
        where = record.run.dir
        self._runs = None if where is None else RunStops(Path(where), record.began_unix_s)
        self._status = AutoscalerStatus(False)

    def run(self) -> None:
        """Serve until the cluster is down."""
        record = self._record
        self._cluster.start(order_of(record, self._state))
        self._cluster.allow(record.target.budget_usd)
        allowed_usd = record.target.budget_usd
        every_s = record.autoscale.every_s if self._state.is_far else _NEAR_LOOK_S
        while True:
            found = self._state.known()
            # It may have gone, and another one have come, between two looks.
            phase = found.phase if found.made == record.made else "down"
            if phase == "down":
                if record.head.standing is not None:
                    self._cluster.end(record.name)
                return
            if phase == "up" and found.target.budget_usd != allowed_usd:
                allowed_usd = found.target.budget_usd
                self._cluster.allow(allowed_usd)
            if phase == "ending" and not self._is_released:
                self._stop_runs()
                self._cluster.release()
                self._is_released = True
                self._say("runs have stopped; draining and ending machines")
            elif self._is_released and not self._living():
                self._say(ALL_ENDED)
            else:
                self._say()
                self._save_runs()
            time.sleep(min(every_s, _AGAIN_S) if self._is_released else every_s)

    def _living(self) -> bool:
        try:
            machines = self._provider.list_machines(self._record.name)
        except RegionsSilentError:
            return True  # as far as anybody knows
        head = find_head(machines, self._record)
        return any(m.state is not MachineState.ENDED and m is not head for m in machines)

    def _save_runs(self) -> None:
        """Have runs saved and stopped while there is money for that; who comes again, again."""
        if not self._status.saves:
            if self._is_short:
                self._is_short, self._did = False, ()  # there is a larger budget
            return
        if not self._is_short:
            self._is_short = True
            self._tell("the budget is nearly used up")
        self._ask_runs()

    def _stop_runs(self) -> None:
        """Stop what trains, so that it is saved."""
        self._tell("stopping runs")
        deadline_s = time.monotonic() + _SAVE_S
        self._ask_runs()
        while self._runs is not None and self._runs.any_going():
            if time.monotonic() > deadline_s:
                break
            time.sleep(_AGAIN_S)
            self._tell()
        self._cluster.stop_jobs(max(1.0, deadline_s - time.monotonic()), self._tell)

    def _ask_runs(self) -> None:
        """Ask first and tell afterwards: what keeps this from telling saves no run."""
        for path in [] if self._runs is None else self._runs.ask():
            self._tell(f"stopping the run in {path}, which saves it first")

    def _say(self, news: str | None = None) -> None:
        """Write down how the cluster stands, and what has been done about its end."""
        self._note(news)
        self._status = self._cluster.status()
        self._write()

    def _tell(self, news: str | None = None) -> None:
        """Write down what has been done, or that this lives; what fails now is told the next time.

        Who takes the cluster down ends machines itself if it hears nothing for a while.
        """
        self._note(news)
        if news is None and time.monotonic() - self._written_s < _AGAIN_S:
            return
        try:
            self._write()
        except GeoRayError as error:
            _log.warning("%s", error.message)

    def _note(self, news: str | None) -> None:
        if news is not None and self._did[-1:] != (news,):
            self._did = (*self._did, news)[-_MOST_TOLD:]

    def _write(self) -> None:
        made = self._record.made
        told = ToldStatus(unix_s=time.time(), made=made, did=self._did, status=self._status)
        tag = tell_status(self._store, told, self._tag)
        if tag is None:
            _, tag = read_status(self._store, made)  # of the process that served before
        self._tag, self._written_s = tag, time.monotonic()


def order_of(record: ClusterRecord, state: ClusterState) -> AutoscaleOrder:
    """Return what the autoscaler is to look after."""
    where, run = record.run.dir, None
    if where is not None and record.provider.rent == "plan":
        run = NamedRun(Path(where), record.plan, record.began_unix_s)
    return AutoscaleOrder(
        record.name,
        RemoteProvider(state, record.made),
        RemoteStore(state),
        record.autoscale,
        record.target,
        run,
        record.made,
        record.id,
    )


def serve(state: ClusterState, *, stays: bool = False) -> None:
    """Serve a cluster's head until the cluster is down; whatever fails is tried again.

    Args:
        state: where the cluster is, or will be, written down.
        stays: whether the head outlives its cluster: then this waits for the next one.
    """
    is_clean = False
    while True:
        try:
            record, _ = state.read()
            if record is None or record.phase == "down":
                if not stays and record is not None:
                    return
                if record is not None and not is_clean:
                    _forget(record)
                    is_clean = True
                time.sleep(state.look_s)
                continue
            is_clean = False
            clouds = open_clouds(record, state, longest_s=record.autoscale.answer_s)
            head = find_head(listed_for_head(clouds, record), record)
            address = head_address(head, record)
            if address is not None:
                with served(address, job_server_of(address, record), _HEAD_S) as cluster:
                    ClusterServer(state, cluster, record).run()
                if not stays:
                    return
        except GeoRayError as error:
            _log.warning("%s", error.message)
        except Exception:  # whatever it is: a cluster without this is not looked after
            _log.exception("serving the cluster failed")
        time.sleep(_AGAIN_S)


def _forget(record: ClusterRecord) -> None:
    """End the autoscaler of a cluster that has gone, if the process before this one could not."""
    address = head_address(None, record)
    if address is not None:
        with served(address, None, _HEAD_S) as cluster:
            cluster.end(record.name)


def main() -> None:
    """Serve the cluster that is named on the command line."""
    parser = argparse.ArgumentParser(prog="geo_ray.cloud.cluster.serve")
    parser.add_argument("state", help="the cluster's folder")
    parser.add_argument("--stays", action="store_true", help="the head outlives its clusters")
    asked = parser.parse_args()
    out = logging.StreamHandler()
    out.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logging.getLogger("geo_ray").addHandler(out)
    serve(ClusterState.at(asked.state), stays=asked.stays)


if __name__ == "__main__":
    main()
