"""The cluster's head on Ray: starts the autoscaler, queries it, and stops runs and jobs.

`RunStops` asks the runs of a name to save and stop, once for each driver of a run. A run that
cannot be read or asked does not keep the others from being asked.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ray
from ray.job_submission import JobSubmissionClient

from geo_ray.base.errors import ClusterError, GeoRayError
from geo_ray.cloud.autoscaler.actions import AutoscalerStatus
from geo_ray.cloud.autoscaler.actor import (
    AutoscaleOrder,
    autoscaler_name,
    end_autoscalers,
    start_autoscaler,
)
from geo_ray.cloud.autoscaler.run_work import runs_named
from geo_ray.experiment.cluster import ExistingClusterConfig
from geo_ray.ray_cluster import ray_internals
from geo_ray.ray_cluster.connect import connect
from geo_ray.ray_cluster.detached import NAMESPACE, Handle, end_queues
from geo_ray.runs import requests
from geo_ray.runs.status import StatusReader

_NO_DRIVER: Final = -1
_log = logging.getLogger(__name__)


class RunStops:
    """See the module.

    Args:
        path: of the first run of the name.
        since_unix_s: runs to which nobody has written since then are over.
    """

    def __init__(self, path: Path, since_unix_s: float) -> None:
        self._path, self._since_unix_s = path, since_unix_s
        self._readers: dict[Path, StatusReader] = {}
        self._asked: dict[Path, int] = {}  # the epoch of the driver that was asked

    def ask(self) -> list[Path]:
        """Ask those that go on, or may, and were not asked yet; return these."""
        asked = []
        for path in self._there():
            try:
                epoch = self._going(path)
                if epoch is None or self._asked.get(path) == epoch:
                    continue
                requests.request_stop(path)
            except Exception as error:  # of this run alone, whatever it is
                _log.warning("the run in %s is not stopped: %s", path, error)
                continue
            self._asked[path] = epoch
            asked.append(path)
        return asked

    def any_going(self) -> bool:
        """Whether one that was asked has not ended, or may not have."""
        for path in self._asked:
            try:
                if self._readers[path].read().is_going is not False:
                    return True
            except Exception as error:  # as above
                _log.warning("how the run in %s stands is not known: %s", path, error)
        return False

    def _there(self) -> list[Path]:
        try:
            return [found.path for found in runs_named(self._path, self._since_unix_s)]
        except GeoRayError as error:
            _log.warning("runs in %s are not stopped: %s", self._path.parent, error.message)
            return []

    def _going(self, path: Path) -> int | None:
        """Return the epoch of a run's driver; None: it is over, or a run of another name.

        Whether a driver on another computer lives takes a while to see: till then it may.
        """
        if path not in self._readers:
            self._readers[path] = StatusReader(path)
        reader = self._readers[path]
        if reader.config.name != self._path.name:
            return None
        status = reader.read()
        if status.is_going is False:
            return None
        return _NO_DRIVER if status.driver is None else status.driver.epoch


_ANSWER_S: Final = 30.0
_LOOK_S: Final = 0.5


@dataclass(slots=True)
class ServedCluster:
    """A cluster whose head this process serves.

    Attributes:
        job_server: address of its job server; None: it has none.
        node_id: the head's.
        actor: the autoscaler; None: it is not started yet.
    """

    job_server: str | None
    node_id: str
    actor: Handle | None = None

    def start(self, order: AutoscaleOrder) -> None:
        """Start the autoscaler, unless it is there; that of an earlier cluster ends."""
        end_autoscalers(order.cluster, NAMESPACE, autoscaler_name(order.cluster, order.made))
        self.actor = start_autoscaler(order, NAMESPACE, self.node_id)

    def status(self) -> AutoscalerStatus:
        """What the autoscaler tells.

        Raises:
            ClusterError: it does not.
        """
        found = self._ask("status")
        if not isinstance(found, AutoscalerStatus):
            raise ClusterError("the autoscaler tells nothing that makes sense")
        return found

    def release(self) -> None:
        """Let the autoscaler end all machines."""
        self._ask("release")

    def allow(self, budget_usd: float | None) -> None:
        """Tell the autoscaler what its machines may cost in all."""
        self._ask("allow", budget_usd)

    def end(self, cluster: str) -> None:
        """End the autoscaler of a cluster: the head lives on, and its cluster does not."""
        end_autoscalers(cluster, NAMESPACE)
        self.actor = None

    def stop_jobs(self, longest_s: float, tell: Callable[[str | None], None]) -> None:
        """Ask all jobs to stop, which saves the runs they drive, and wait for their ends.

        Args:
            longest_s: longest wait.
            tell: told which jobs there are, and that they are still waited for.
        """
        for queue in end_queues():
            tell(f"{queue} is served no more")  # else it would start anew what is stopped
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
                tell(f"stopping job {job}, which saves its run first")
                asked.add(job)
                try:
                    client.stop_job(job)
                except Exception as error:  # of this job alone: it may have just ended
                    tell(f"job {job} cannot be stopped: {error}")
            tell(None)
            time.sleep(_LOOK_S)

    def _ask(self, what: str, *said: object) -> Any:
        if self.actor is None:
            raise ClusterError("the autoscaler is not started yet")
        try:
            return ray.get(getattr(self.actor, what).remote(*said), timeout=_ANSWER_S)
        except Exception as error:  # of many kinds; it may be starting anew
            raise ClusterError(f"the autoscaler does not answer: {error}") from error


def _await_server(address: str, longest_s: float) -> None:
    """Wait until the job server listens, which it does some time after the head."""
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
        address: host:port of it.
        job_server: its address.
        longest_s: longest wait for the head.

    Raises:
        ClusterError: it does not answer.
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
            raise ClusterError(f"the head at {address} has no node of its own yet")
        yield ServedCluster(job_server, nodes[0])
