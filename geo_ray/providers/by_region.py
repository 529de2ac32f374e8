"""Several clouds as one provider: each region belongs to one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from geo_ray.errors import GeoRayError, ProviderRefusedError
from geo_ray.providers.base import (
    LaunchFailure,
    LaunchRequest,
    Machine,
    MachineProvider,
    Pool,
    Stock,
)


class RegionProviders:
    """See `MachineProvider`.

    A machine is ended by the cloud that has listed it; one that none has is asked of all.

    Args:
        providers: by the cloud's name of a region.
    """

    def __init__(self, providers: Mapping[str, MachineProvider]) -> None:
        self._by_region = dict(providers)
        self._all = list({id(each): each for each in providers.values()}.values())
        self._owner: dict[str, MachineProvider] = {}

    @property
    def name(self) -> str:
        """See `MachineProvider.name`."""
        return "+".join(sorted({each.name for each in self._all}))

    def list_machines(self, cluster: str) -> Sequence[Machine]:
        """See `MachineProvider.list_machines`; if one cloud does not answer, nothing is known."""
        found: list[Machine] = []
        for provider in self._all:
            for machine in provider.list_machines(cluster):
                self._owner[machine.id] = provider
                found.append(machine)
        return found

    def launch(self, request: LaunchRequest) -> Sequence[LaunchFailure]:
        """See `MachineProvider.launch`."""
        return self._of(request.pool.region).launch(request)

    def terminate(self, machine_ids: Sequence[str]) -> None:
        """See `MachineProvider.terminate`; one cloud that fails keeps no other from it."""

        def end(provider: MachineProvider) -> None:
            mine = [one for one in machine_ids if self._owner.get(one, provider) is provider]
            if mine:
                provider.terminate(mine)

        self._each(end)

    def poll_failures(self, cluster: str) -> Sequence[LaunchFailure]:
        """See `MachineProvider.poll_failures`."""
        return [each for provider in self._all for each in provider.poll_failures(cluster)]

    def stock(self, pools: Sequence[Pool]) -> Sequence[Stock]:
        """See `MachineProvider.stock`."""
        found: dict[Pool, Stock] = {}
        for provider in self._all:
            mine = [pool for pool in pools if self._of(pool.region) is provider]
            if mine:
                found |= zip(mine, provider.stock(mine), strict=True)
        return [found[pool] for pool in pools]

    def _of(self, region: str) -> MachineProvider:
        provider = self._by_region.get(region)
        if provider is None:
            raise ProviderRefusedError(
                f"no cloud is named for region '{region}'",
                fix="Name the cloud of every region in plan.regions.",
            )
        return provider

    def _each(self, step: Callable[[MachineProvider], None]) -> None:
        failed: GeoRayError | None = None
        for provider in self._all:
            try:
                step(provider)
            except GeoRayError as error:
                failed = error
        if failed is not None:
            raise failed
