"""A cluster's own machines in accounts that others use, too: those that bear its name and its id.

A name is the user's choice, so two clusters may have the same one, written down in two places or by
two people; the id is made up and in no other cluster's record. What bears only the name is another
cluster's, and is neither counted nor ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from geo_ray.errors import ClusterNameTakenError, RegionsSilentError
from geo_ray.providers.base import (
    LaunchFailure,
    LaunchRequest,
    Machine,
    MachineProvider,
    MachineState,
    Pool,
    Stock,
)

_SHOWN = 5


@dataclass(slots=True)
class OwnMachines:
    """See `MachineProvider`.

    Attributes:
        inner: the clouds.
        id: the cluster's; empty: machines without one are its own.
    """

    inner: MachineProvider
    id: str

    @property
    def name(self) -> str:
        """See `MachineProvider.name`."""
        return self.inner.name

    def list_machines(self, cluster: str) -> Sequence[Machine]:
        """See `MachineProvider.list_machines`; none of another cluster of the name."""
        try:
            return self._own(self.inner.list_machines(cluster))
        except RegionsSilentError as error:
            error.found = tuple(self._own(error.found))
            raise

    def launch(self, request: LaunchRequest) -> Sequence[LaunchFailure]:
        """See `MachineProvider.launch`."""
        return self.inner.launch(replace(request, cluster_id=self.id))

    def terminate(self, machine_ids: Sequence[str]) -> None:
        """See `MachineProvider.terminate`."""
        self.inner.terminate(machine_ids)

    def poll_failures(self, cluster: str) -> Sequence[LaunchFailure]:
        """See `MachineProvider.poll_failures`; of others of the name, too: ids are of one alone."""
        return self.inner.poll_failures(cluster)

    def stock(self, pools: Sequence[Pool]) -> Sequence[Stock]:
        """See `MachineProvider.stock`."""
        return self.inner.stock(pools)

    def logs(self, machine_id: str) -> Mapping[str, str]:
        """Return what processes of a machine printed, by process; only the local cloud can tell."""
        told = getattr(self.inner, "logs", None)
        return {} if told is None else dict(told(machine_id))

    def _own(self, machines: Sequence[Machine]) -> list[Machine]:
        return [each for each in machines if each.cluster_id == self.id]


def check_name_is_free(clouds: MachineProvider, name: str, id: str, state: str) -> None:
    """Look whether another cluster of the name lives in the same accounts.

    A region that does not answer may have one, and keeps nobody from its start: ids tell machines
    of the two apart.

    Args:
        clouds: all that bears the name.
        name: of the cluster.
        id: its own.
        state: where it is written down, as people would type it.

    Raises:
        ClusterNameTakenError: one does.
    """
    try:
        listed = clouds.list_machines(name)
    except RegionsSilentError as error:
        listed = error.found
    others = [
        each for each in listed if each.cluster_id != id and each.state is not MachineState.ENDED
    ]
    if not others:
        return
    ids = ", ".join(sorted({each.cluster_id or "without an id" for each in others}))
    shown = ", ".join(f"{each.id} in {each.pool.region}" for each in others[:_SHOWN])
    more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
    raise ClusterNameTakenError(
        f"machines of another cluster called {name} live ({ids}): {shown}{more}. This one is {id}, "
        f"written down in {state}; where the other one is, this command cannot know"
    )
