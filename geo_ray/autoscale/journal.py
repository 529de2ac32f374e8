"""The autoscaler's memory, kept where it survives: written before anything is done.

It lies in a conditional store beside the lease, so that who was overtaken cannot write it: a write
is refused if anybody else has written since it was read.
"""

from __future__ import annotations

from typing import Final

from geo_ray.autoscale.memory import AutoscalerMemory, decode_memory, encode_memory
from geo_ray.errors import LeaseLostError, RunDirectoryError
from geo_ray.lease.record import MAX_RECORD_BYTES
from geo_ray.lease.store import ConditionalStore

JOURNAL_KEY: Final = "autoscaler.z"


class Journal:
    """The memory in a store.

    Args:
        store: where it lies.
        epoch: how manieth holder of the lease this is; part of the ids of its requests.
    """

    def __init__(self, store: ConditionalStore, epoch: int) -> None:
        self._store, self._epoch = store, epoch
        self._tag: str | None = None
        self._memory: AutoscalerMemory | None = None

    def read(self) -> AutoscalerMemory:
        """Return the memory; asks the store only once.

        Raises:
            RunDirectoryError: it cannot be read.
        """
        if self._memory is None:
            found = self._store.read(JOURNAL_KEY)
            if found is not None:
                self._tag = found.tag
            self._memory = AutoscalerMemory() if found is None else decode_memory(found.data)
            self._memory.epoch = self._epoch
        return self._memory

    def write(self, memory: AutoscalerMemory) -> None:
        """Replace the memory.

        Raises:
            LeaseLostError: somebody else has written it.
            RunDirectoryError: it cannot be written; the next write finds out what came of it.
        """
        data = encode_memory(memory)
        if len(data) > MAX_RECORD_BYTES:
            raise RunDirectoryError(
                f"the autoscaler's journal would have {len(data)} bytes",
                fix="It is made for some thousand machines: use several clusters.",
            )
        tag = self._store.write(JOURNAL_KEY, data, self._tag)
        if tag is None:
            found = self._store.read(JOURNAL_KEY)
            if found is not None and found.data == data:
                tag = found.tag  # the answer to this very write got lost
            else:
                raise LeaseLostError(
                    "another autoscaler has written the journal of this cluster; this one rents "
                    "and ends nothing any more"
                )
        self._tag, self._memory = tag, memory
