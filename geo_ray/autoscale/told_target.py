"""What an autoscaler was told after it was started: to follow another target, or to end all.

It lies beside the journal, so that the next one goes on with that and not with what it was started
with. Whoever told it may do so again at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from pydantic import TypeAdapter, ValidationError

from geo_ray.autoscale.target import ClusterTarget
from geo_ray.errors import RunDirectoryError
from geo_ray.lease.record import MAX_RECORD_BYTES
from geo_ray.lease.store import ConditionalStore

TOLD_KEY: Final = "told.json"


@dataclass(frozen=True, slots=True)
class ToldTarget:
    """See the module's docstring.

    Attributes:
        made: of which cluster of the name: how often one was made.
        target: that is followed; None: the one that it was started with.
        is_over: whether nothing is to run any more.
        number: how often it was written.
    """

    made: int
    target: ClusterTarget | None = None
    is_over: bool = False
    number: int = 0


_READER: Final = TypeAdapter(ToldTarget)


def read_told(store: ConditionalStore, made: int) -> ToldTarget:
    """Return what was told; nothing, if all that there is was told of another cluster.

    Raises:
        RunDirectoryError: it cannot be read.
    """
    return _read(store, made)[0]


def write_told(
    store: ConditionalStore, made: int, change: Callable[[ToldTarget], ToldTarget]
) -> None:
    """Change what was told.

    Args:
        store: where it lies.
        made: how often a cluster of the name was made.
        change: gives the new from the old; may be called again, if somebody else writes.

    Raises:
        RunDirectoryError: it cannot be written, or is too long.
    """
    while True:
        before, tag = _read(store, made)
        after = change(before)
        if after == before:
            return
        data = _READER.dump_json(replace(after, number=before.number + 1))
        if len(data) > MAX_RECORD_BYTES:
            raise RunDirectoryError(
                f"a target of {len(data)} bytes is too long",
                fix="Name fewer regions, zones and types of machines.",
            )
        if store.write(TOLD_KEY, data, tag) is not None:
            return


def _read(store: ConditionalStore, made: int) -> tuple[ToldTarget, str | None]:
    found = store.read(TOLD_KEY)
    if found is None:
        return ToldTarget(made), None
    try:
        told = _READER.validate_json(found.data)
    except ValidationError as error:
        raise RunDirectoryError(
            f"what the autoscaler was told cannot be read: {TOLD_KEY}",
            fix=f"Remove {TOLD_KEY} from the cluster's folder, and tell it again.",
        ) from error
    return (told if told.made == made else ToldTarget(made, number=told.number)), found.tag
