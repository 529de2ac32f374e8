"""What an autoscaler was told after it was started: to follow another target, or to end all.

It lies beside the journal, so that the next one goes on with that and not with what it was started
with. Whoever told it may do so again at any time; so what cannot be read, torn or of another
release, counts as nothing told, and the next who tells something writes over it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from geo_ray.autoscale.target import ClusterTarget
from geo_ray.errors import RunDirectoryError
from geo_ray.lease.record import MAX_RECORD_BYTES
from geo_ray.lease.store import ConditionalStore

TOLD_KEY: Final = "told.json"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ToldTarget:
    """See the module's docstring.

    Attributes:
        made: of which cluster of the name: how often one was made.
        target: that is followed; None: the one that it was started with.
        is_over: whether nothing is to run any more.
        number: how often it was written.
        is_followed: whether the target is another than that it was started with, and is needed
            whatever is left of the run; else it only has another budget.
    """

    made: int
    target: ClusterTarget | None = None
    is_over: bool = False
    number: int = 0
    is_followed: bool = False


_READER: Final = TypeAdapter(ToldTarget)


def read_told(
    store: ConditionalStore, made: int, note: Callable[[str], None] = _log.warning
) -> ToldTarget:
    """Return what was told; nothing, if all that there is was told of another cluster.

    Args:
        store: where it lies.
        made: how often a cluster of the name was made.
        note: told if something was told of this cluster and makes no sense.

    Raises:
        RunDirectoryError: its store does not answer.
    """
    return _read(store, made, note)[0]


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
        before, tag = _read(store, made, _log.warning)
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


def _read(
    store: ConditionalStore, made: int, note: Callable[[str], None]
) -> tuple[ToldTarget, str | None]:
    found = store.read(TOLD_KEY)
    if found is None:
        return ToldTarget(made), None
    row = _row(found.data)
    number = row.get("number")
    # Numbers go on: every write is to be another one than all before.
    nothing = ToldTarget(made, number=number if isinstance(number, int) else 0)
    if row.get("made", made) != made:
        return nothing, found.tag
    try:
        return _READER.validate_json(found.data), found.tag
    except ValidationError:
        note(f"what the autoscaler was told cannot be read, and counts as not told: {TOLD_KEY}")
        return nothing, found.tag


def _row(data: bytes) -> dict[str, Any]:
    """Return what was written as far as it is a row of JSON at all."""
    try:
        row = json.loads(data)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}
