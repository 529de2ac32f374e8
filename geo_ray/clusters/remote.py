"""A cluster's clouds and journal as they travel to the autoscaler: opened where they arrive."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from geo_ray.clusters.clouds import open_clouds
from geo_ray.clusters.head import find_head, head_address, listed_for_head
from geo_ray.clusters.state import ClusterState
from geo_ray.errors import ClusterStateError
from geo_ray.lease.store import ConditionalStore, StoredValue
from geo_ray.providers.base import (
    LaunchFailure,
    LaunchRequest,
    Machine,
    MachineProvider,
    Pool,
    Stock,
)


@dataclass(slots=True)
class RemoteProvider:
    """See `MachineProvider`.

    Connections and credentials do not travel; the state's address does.

    Attributes:
        state: where the cluster is written down.
        made: of which cluster of the name: how often one was made.
    """

    state: ClusterState
    made: int
    _opened: MachineProvider | None = None
    _knows_head: bool = False

    @property
    def name(self) -> str:
        """See `MachineProvider.name`."""
        return self._listing().name

    def list_machines(self, cluster: str) -> Sequence[Machine]:
        """See `MachineProvider.list_machines`."""
        return self._listing().list_machines(cluster)

    def launch(self, request: LaunchRequest) -> Sequence[LaunchFailure]:
        """See `MachineProvider.launch`; of a cluster that is to end nothing is launched.

        An autoscaler may outlive its cluster, on a head that stays: it rents nothing for the next.
        """
        record = self.state.known()
        if record.phase != "up" or record.made != self.made:
            raise ClusterStateError(f"{self.state.name} is being taken down: nothing is rented")
        return self._launching().launch(request)

    def terminate(self, machine_ids: Sequence[str]) -> None:
        """See `MachineProvider.terminate`; needs no head."""
        self._listing().terminate(machine_ids)

    def poll_failures(self, cluster: str) -> Sequence[LaunchFailure]:
        """See `MachineProvider.poll_failures`."""
        return self._listing().poll_failures(cluster)

    def stock(self, pools: Sequence[Pool]) -> Sequence[Stock]:
        """See `MachineProvider.stock`."""
        return self._listing().stock(pools)

    def _listing(self) -> MachineProvider:
        found = self._opened
        if found is None:
            record = self.state.known()
            longest_s = record.autoscale.answer_s
            self._opened = found = open_clouds(record, self.state, longest_s=longest_s)
        return found

    def _launching(self) -> MachineProvider:
        """The clouds with the head's address, which new machines join; kept once it is known."""
        found = self._listing()
        if not self._knows_head:
            record = self.state.known()
            head = find_head(listed_for_head(found, record), record)
            address = head_address(head, record)
            if address is not None:
                found = open_clouds(record, self.state, address, record.autoscale.answer_s)
                self._opened, self._knows_head = found, True
        return found


@dataclass(slots=True)
class RemoteStore:
    """See `ConditionalStore`.

    Attributes:
        state: where the cluster is written down.
    """

    state: ClusterState
    _opened: ConditionalStore | None = None

    def read(self, key: str) -> StoredValue | None:
        """See `ConditionalStore.read`."""
        return self._store().read(key)

    def write(self, key: str, data: bytes, expected: str | None) -> str | None:
        """See `ConditionalStore.write`."""
        return self._store().write(key, data, expected)

    def remove(self, key: str) -> None:
        """See `ConditionalStore.remove`."""
        self._store().remove(key)

    def unchanged(self, key: str, tag: str) -> AbstractContextManager[bool]:
        """See `ConditionalStore.unchanged`."""
        return self._store().unchanged(key, tag)

    def _store(self) -> ConditionalStore:
        if self._opened is None:
            self._opened = self.state.store()
        return self._opened
