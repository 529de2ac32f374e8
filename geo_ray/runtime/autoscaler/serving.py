"""What the head does for its cluster on Ray: starts the autoscaler, asks it, ends jobs."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import ray
from ray.job_submission import JobSubmissionClient

from geo_ray.autoscale.status import AutoscalerStatus
from geo_ray.config.cluster import ExistingClusterConfig
from geo_ray.errors import ClusterError
from geo_ray.runtime.autoscaler.actor import (
    AutoscaleOrder,
    autoscaler_name,
    end_autoscalers,
    start_autoscaler,
)
from geo_ray.runtime.cluster import ray_private
from geo_ray.runtime.cluster.connect import connect
from geo_ray.runtime.cluster.detached import Handle
from geo_ray.runtime.cluster.served import NAMESPACE
from geo_ray.runtime.queue.serving import end_queues

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
            for node in ray_private.nodes()
            if node["Alive"] and node["NodeManagerAddress"] == host
        ]
        if not nodes:
            raise ClusterError(f"the head at {address} has no node of its own yet")
        yield ServedCluster(job_server, nodes[0])
