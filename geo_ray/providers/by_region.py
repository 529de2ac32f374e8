"""Several clouds as one provider: each region belongs to one of them.

All are asked at the same time. One that fails, or hangs, keeps nobody from the others: what these
say comes with the error that names the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from geo_ray.errors import (
    GeoRayError,
    ProviderRefusedError,
    ProviderUnreachableError,
    RegionsSilentError,
)
from geo_ray.providers.base import (
    LaunchFailure,
    LaunchRequest,
    Machine,
    MachineProvider,
    Pool,
    Stock,
)
from geo_ray.util.bounded_calls import BoundedCalls

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Part:
    provider: MachineProvider
    regions: tuple[str, ...]
    calls: BoundedCalls
    quotes: BoundedCalls  # prices have a service of their own, which may hang alone


class RegionProviders:
    """See `MachineProvider`.

    A machine is ended by the cloud that has listed it; one that none has is asked of all. What
    fails in some regions only raises ``RegionsSilentError``, with what the others have answered.

    Args:
        providers: by the cloud's name of a region; several may have the same.
        longest_s: longest wait for an answer; None: until the cloud itself gives up.
    """

    def __init__(
        self, providers: Mapping[str, MachineProvider], longest_s: float | None = None
    ) -> None:
        self._parts: list[_Part] = []
        for provider in {id(each): each for each in providers.values()}.values():
            regions = tuple(name for name, each in providers.items() if each is provider)
            where = ", ".join(regions)
            late = ProviderUnreachableError
            calls, quotes = (BoundedCalls(where, longest_s, late) for _ in range(2))
            self._parts.append(_Part(provider, regions, calls, quotes))
        self._by_region = {name: part for part in self._parts for name in part.regions}
        self._owner: dict[str, _Part] = {}

    @property
    def name(self) -> str:
        """See `MachineProvider.name`."""
        return "+".join(sorted({part.provider.name for part in self._parts}))

    def list_machines(self, cluster: str) -> Sequence[Machine]:
        """See `MachineProvider.list_machines`."""
        waits = [(part, part.calls.begin(_listing(part.provider, cluster))) for part in self._parts]
        answers, failed = _gathered(waits)
        found: list[Machine] = []
        for part, machines in answers:
            self._owner |= {machine.id: part for machine in machines}
            found += machines
        return self._told(found, failed)

    def launch(self, request: LaunchRequest) -> Sequence[LaunchFailure]:
        """See `MachineProvider.launch`."""
        part = self._by_region.get(request.pool.region)
        if part is None:
            raise _no_cloud(request.pool.region)
        return part.calls.begin(lambda: part.provider.launch(request))()

    def terminate(self, machine_ids: Sequence[str]) -> None:
        """See `MachineProvider.terminate`; one cloud that fails keeps no other from it."""
        waits = []
        for part in self._parts:
            mine = [one for one in machine_ids if self._owner.get(one, part) is part]
            if mine:
                waits.append((part, part.calls.begin(_ending(part.provider, mine))))
        _, failed = _gathered(waits)
        errors = [error for _, error in failed]
        errors.sort(key=lambda error: not isinstance(error, ProviderRefusedError))
        if errors:
            raise errors[0]

    def poll_failures(self, cluster: str) -> Sequence[LaunchFailure]:
        """See `MachineProvider.poll_failures`."""
        waits = [(part, part.calls.begin(_polling(part.provider, cluster))) for part in self._parts]
        answers, failed = _gathered(waits)
        return self._told([each for _, told in answers for each in told], failed)

    def stock(self, pools: Sequence[Pool]) -> Sequence[Stock]:
        """See `MachineProvider.stock`."""
        waits = []
        for part in self._parts:
            mine = [pool for pool in pools if pool.region in part.regions]
            if mine:
                waits.append((part, part.quotes.begin(_pricing(part.provider, mine))))
        answers, failed = _gathered(waits)
        stocks = {stock.pool: stock for _, found in answers for stock in found}
        unknown = {pool.region for pool in pools} - self._by_region.keys()
        strange = [((region,), _no_cloud(region)) for region in sorted(unknown)]
        return self._told([stocks[pool] for pool in pools if pool in stocks], [*failed, *strange])

    # ------------------------------------------------------------------ parts

    def _told(self, found: list[T], failed: Sequence[tuple[tuple[str, ...], Exception]]) -> list[T]:
        if not failed:
            return found
        if len(self._by_region) == 1:
            raise failed[0][1]
        silent = {name: _words(error) for names, error in failed for name in names}
        first = failed[0][1]
        fix = first.fix if isinstance(first, GeoRayError) else None
        text = "; ".join(f"{name}: {why}" for name, why in silent.items())
        error = RegionsSilentError(text, fix=fix)
        error.found, error.silent = tuple(found), silent
        raise error from first


def _gathered(
    waits: Sequence[tuple[_Part, Callable[[], T]]],
) -> tuple[list[tuple[_Part, T]], list[tuple[tuple[str, ...], Exception]]]:
    """Wait for all; return what was answered, and what failed by its regions."""
    answers: list[tuple[_Part, T]] = []
    failed: list[tuple[tuple[str, ...], Exception]] = []
    for part, wait in waits:
        try:
            answers.append((part, wait()))
        except Exception as error:  # whatever it is: it is of these regions alone
            failed.append((part.regions, error))
    return answers, failed


def _listing(provider: MachineProvider, cluster: str) -> Callable[[], Sequence[Machine]]:
    return lambda: provider.list_machines(cluster)


def _ending(provider: MachineProvider, ids: Sequence[str]) -> Callable[[], None]:
    return lambda: provider.terminate(ids)


def _polling(provider: MachineProvider, cluster: str) -> Callable[[], Sequence[LaunchFailure]]:
    return lambda: provider.poll_failures(cluster)


def _pricing(provider: MachineProvider, pools: Sequence[Pool]) -> Callable[[], Sequence[Stock]]:
    return lambda: provider.stock(pools)


def _words(error: Exception) -> str:
    return error.message if isinstance(error, GeoRayError) else f"{type(error).__name__}: {error}"


def _no_cloud(region: str) -> ProviderRefusedError:
    return ProviderRefusedError(
        f"no cloud is named for region '{region}'",
        fix="Name the cloud of every region in plan.regions.",
    )
