"""``python -m geo_ray.cloud.cluster.serve STATE [--stays]``: cluster service next to the Ray head.

The service starts the autoscaler and writes its status to the cluster's folder. When the record
says that the cluster must end, it stops runs, which saves them, and drains and terminates all
machines. The command that ends the cluster terminates the head itself, unless the head is
permanent: the service then waits for the next cluster. If this process dies it is restarted, or the
cluster is ended without it.
"""

from __future__ import annotations

import argparse
import logging
import math
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ray
from ray.job_submission import JobSubmissionClient

from geo_ray.base.errors import ClusterError, GeoRayError, RegionsUnreachableError
from geo_ray.cloud.autoscaler.actions import AutoscalerStatus
from geo_ray.cloud.autoscaler.actor import (
    AutoscaleOrder,
    autoscaler_name,
    end_autoscalers,
    start_autoscaler,
)
from geo_ray.cloud.autoscaler.run_work import NamedRun, runs_named
from geo_ray.cloud.cluster.head import find_head, head_address, job_server_of, listed_for_head
from geo_ray.cloud.cluster.providers import RemoteProvider, RemoteStore, open_clouds
from geo_ray.cloud.cluster.state import ClusterRecord, ClusterState
from geo_ray.cloud.cluster.status import ALL_ENDED, HeadStatus, read_status, write_status
from geo_ray.cloud.provider import MachineState
from geo_ray.experiment.cluster import ExistingClusterConfig
from geo_ray.ray_cluster import ray_internals
from geo_ray.ray_cluster.connect import connect
from geo_ray.ray_cluster.detached import NAMESPACE, Handle, end_queues
from geo_ray.runs import requests
from geo_ray.runs.status import StatusReader

_HEAD_S: Final = 300.0
_AGAIN_S: Final = 1.0
_SAVE_S: Final = 180.0
_LOCAL_POLL_S: Final = 0.5
_MOST_TOLD: Final = 50
_log = logging.getLogger(__name__)


_NO_RUN_ACTOR: Final = -1


class RunStops:
    """Asks the runs of a name to save and stop, once per run actor.

    An unreadable run does not prevent the others from being asked.

    Args:
        path: directory of the first run of the name.
        since_unix_s: runs without writes since then are over.
    """

    def __init__(self, path: Path, since_unix_s: float) -> None:
        self._path, self._since_unix_s = path, since_unix_s
        self._readers: dict[Path, StatusReader] = {}
        self._asked: dict[Path, int] = {}  # attempt of the run actor that was asked

    def ask(self) -> list[Path]:
        """Ask the runs that are or may be active and were not asked yet; return them."""
        asked = []
        for path in self._there():
            try:
                token = self._going(path)
                if token is None or self._asked.get(path) == token:
                    continue
                requests.request_stop(path)
            except Exception as error:  # an error concerns this run only
                _log.warning("the run in %s cannot be stopped: %s", path, error)
                continue
            self._asked[path] = token
            asked.append(path)
        return asked

    def any_going(self) -> bool:
        """Whether a run that was asked has not ended, or may not have."""
        for path in self._asked:
            try:
                if self._readers[path].read().is_going is not False:
                    return True
            except Exception as error:  # as above
                _log.warning("the state of the run in %s is unknown: %s", path, error)
        return False

    def _there(self) -> list[Path]:
        try:
            return [found.path for found in runs_named(self._path, self._since_unix_s)]
        except GeoRayError as error:
            _log.warning("runs in %s cannot be stopped: %s", self._path.parent, error.message)
            return []

    def _going(self, path: Path) -> int | None:
        """Return the attempt of a run's actor; None: the run is over, or has another name.

        It takes a while to detect that a run actor on another computer has died; until then it
        counts as active.
        """
        if path not in self._readers:
            self._readers[path] = StatusReader(path)
        reader = self._readers[path]
        if reader.config.name != self._path.name:
            return None
        status = reader.read()
        if status.is_going is False:
            return None
        return _NO_RUN_ACTOR if status.run_actor is None else status.run_actor.token


_ANSWER_S: Final = 30.0
_LOOK_S: Final = 0.5


@dataclass(slots=True)
class ServedCluster:
    """The cluster of the head that this process serves.

    Attributes:
        job_server: address of its job server; None: none.
        node_id: node id of the head.
        actor: the autoscaler; None: not started yet.
    """

    job_server: str | None
    node_id: str
    actor: Handle | None = None

    def start(self, order: AutoscaleOrder) -> None:
        """Start the autoscaler unless it runs; that of an earlier cluster ends."""
        end_autoscalers(order.cluster, NAMESPACE, autoscaler_name(order.cluster, order.made))
        self.actor = start_autoscaler(order, NAMESPACE, self.node_id)

    def status(self) -> AutoscalerStatus:
        """Status of the autoscaler.

        Raises:
            ClusterError: the autoscaler does not answer.
        """
        found = self._ask("status")
        if not isinstance(found, AutoscalerStatus):
            raise ClusterError("the autoscaler returned an invalid status")
        return found

    def release(self) -> None:
        """Let the autoscaler end all machines."""
        self._ask("release")

    def allow(self, budget_usd: float | None) -> None:
        """Set the total budget of the autoscaler."""
        self._ask("allow", budget_usd)

    def end(self, cluster: str) -> None:
        """End the autoscaler of a cluster on a head that outlives it."""
        end_autoscalers(cluster, NAMESPACE)
        self.actor = None

    def stop_jobs(self, longest_s: float, notify: Callable[[str | None], None]) -> None:
        """Ask all jobs to stop, which saves their runs, and wait for them to end.

        Args:
            longest_s: timeout.
            notify: called with a message for each job, and with None while waiting.
        """
        for queue in end_queues():
            notify(f"{queue} is no longer served")  # it would restart stopped jobs otherwise
        if self.job_server is None:
            return
        client = JobSubmissionClient(self.job_server)
        deadline_s = time.monotonic() + longest_s
        asked: set[str] = set()
        while True:
            going = [
                job.submission_id
                for job in client.list_jobs()
                if not job.status.is_terminal() and job.submission_id is not None
            ]
            if not going or time.monotonic() > deadline_s:
                return
            for job in set(going) - asked:
                notify(f"stopping job {job}, after its run is saved")
                asked.add(job)
                try:
                    client.stop_job(job)
                except Exception as error:  # an error concerns this job only, which may have ended
                    notify(f"job {job} cannot be stopped: {error}")
            notify(None)
            time.sleep(_LOOK_S)

    def _ask(self, what: str, *said: object) -> Any:
        if self.actor is None:
            raise ClusterError("the autoscaler has not started yet")
        try:
            return ray.get(getattr(self.actor, what).remote(*said), timeout=_ANSWER_S)
        except Exception as error:  # of many kinds; it may be restarting
            raise ClusterError(f"the autoscaler does not answer: {error}") from error


def _await_server(address: str, longest_s: float) -> None:
    """Wait until the job server listens, some time after the head does."""
    host, _, port = address.rpartition("//")[2].rpartition(":")
    deadline_s = time.monotonic() + longest_s
    while True:
        with socket.socket() as probe:
            probe.settimeout(_ANSWER_S)
            if probe.connect_ex((host, int(port))) == 0:
                return
        if time.monotonic() > deadline_s:
            raise ClusterError(f"the job server at {address} does not answer")
        time.sleep(_LOOK_S)


@contextmanager
def served(address: str, job_server: str | None, longest_s: float) -> Iterator[ServedCluster]:
    """Connect to the head that this process serves.

    Args:
        address: address of the head, host:port.
        job_server: address of its job server.
        longest_s: timeout.

    Raises:
        ClusterError: the head does not answer.
    """
    config = ExistingClusterConfig(address=address, connect_timeout_s=longest_s)
    with connect(config, [], namespace=NAMESPACE):
        if job_server is not None:
            _await_server(job_server, longest_s)
        host = address.rpartition(":")[0]
        nodes = [
            node["NodeID"]
            for node in ray_internals.nodes()
            if node["Alive"] and node["NodeManagerAddress"] == host
        ]
        if not nodes:
            raise ClusterError(f"the head at {address} has no node yet")
        yield ServedCluster(job_server, nodes[0])


class ClusterServer:
    """The cluster service; see the module.

    Args:
        state: folder of the cluster.
        cluster: cluster of the head.
        record: record of the cluster.
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
        """Serve until the cluster has ended."""
        record = self._record
        self._cluster.start(order_of(record, self._state))
        self._cluster.allow(record.target.budget_usd)
        allowed_usd = record.target.budget_usd
        every_s = record.autoscale.every_s if self._state.is_remote else _LOCAL_POLL_S
        while True:
            found = self._state.known()
            # The cluster may have been replaced by another one between two iterations.
            phase = found.phase if found.made == record.made else "down"
            if phase == "down":
                if record.head.existing is not None:
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
        except RegionsUnreachableError:
            return True  # assume so
        head = find_head(machines, self._record)
        return any(m.state is not MachineState.ENDED and m is not head for m in machines)

    def _save_runs(self) -> None:
        """Save and stop runs before the budget is used up, also those that are submitted again."""
        if not self._status.saves:
            if self._is_short:
                self._is_short, self._did = False, ()  # the budget was raised
            return
        if not self._is_short:
            self._is_short = True
            self._report("the budget is nearly used up")
        self._ask_runs()

    def _stop_runs(self) -> None:
        """Stop running jobs, so that they are saved."""
        self._report("stopping runs")
        deadline_s = time.monotonic() + _SAVE_S
        self._ask_runs()
        while self._runs is not None and self._runs.any_going():
            if time.monotonic() > deadline_s:
                break
            time.sleep(_AGAIN_S)
            self._report()
        self._cluster.stop_jobs(max(1.0, deadline_s - time.monotonic()), self._report)

    def _ask_runs(self) -> None:
        """Ask first and report afterwards: a failing report must not prevent saving a run."""
        for path in [] if self._runs is None else self._runs.ask():
            self._report(f"stopping the run in {path}, after it is saved")

    def _say(self, news: str | None = None) -> None:
        """Write the status and a progress message."""
        self._note(news)
        self._status = self._cluster.status()
        self._write()

    def _report(self, news: str | None = None) -> None:
        """Write the status as a heartbeat; a failed write is retried the next time.

        Without heartbeats, the command that ends the cluster terminates machines itself.
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
        head_status = HeadStatus(unix_s=time.time(), made=made, did=self._did, status=self._status)
        tag = write_status(self._store, head_status, self._tag)
        if tag is None:
            _, tag = read_status(self._store, made)  # of an earlier process
        self._tag, self._written_s = tag, time.monotonic()


def order_of(record: ClusterRecord, state: ClusterState) -> AutoscaleOrder:
    """Return the specification of the autoscaler."""
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
    """Serve the head of a cluster until the cluster has ended; errors are retried.

    Args:
        state: folder of the cluster, which may not exist yet.
        stays: whether the head is permanent: the service then waits for the next cluster.
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
        except Exception:  # the service must survive any error
            _log.exception("the cluster service failed")
        time.sleep(_AGAIN_S)


def _forget(record: ClusterRecord) -> None:
    """End the autoscaler of a deleted cluster, if an earlier process could not."""
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
