"""What a lease says: who holds it, the how manieth holder that is, and for how long it counts."""

from __future__ import annotations

from pydantic import Field, ValidationError

from geo_ray.config.base import StrictModel
from geo_ray.errors import RunDirectoryError

LEASE_KEY = "lease.json"
MAX_RECORD_BYTES = 65_536


class Owner(StrictModel):
    """A process that drives a run, or did.

    Its times of day are for people; nothing is decided by them.
    """

    host: str = Field(description="name of its machine")
    pid: int = Field(ge=1, description="process id there")
    machine: str = Field(
        default="", description="the machine since its last start, and which of its process ids"
    )
    started: str = Field(default="", description="of the process, as its system counts")
    token: str = Field(description="of this holder alone")
    since: str = Field(description="when it took the lease, by its own clock")

    @property
    def text(self) -> str:
        """``host h, process 123, since 2026-01-01T10:00:00+00:00``."""
        return f"host {self.host}, process {self.pid}, since {self.since}"


class LeaseRecord(StrictModel):
    """The lease of one run. Every write of it is another record."""

    epoch: int = Field(ge=1, description="grows by one with every holder")
    renewal: int = Field(ge=0, description="grows by one with every write of the same holder")
    owner: Owner
    lives_s: float = Field(gt=0, description="how long it counts after its newest renewal")
    released: bool = Field(default=False, description="whether its holder has given it back")
    doing: str = Field(default="", description="what the holder was last doing, for people")


def encode_record(record: LeaseRecord) -> bytes:
    """Write a record as `decode_record` reads it."""
    return record.model_dump_json(indent=1).encode() + b"\n"


def decode_record(data: bytes) -> LeaseRecord:
    """Read a record.

    Raises:
        RunDirectoryError: the bytes are no record.
    """
    try:
        return LeaseRecord.model_validate_json(data)
    except ValidationError as error:
        raise RunDirectoryError(
            f"the run's {LEASE_KEY} cannot be read: {error.error_count()} things in it are wrong",
            fix=f"If no process drives the run any more, remove {LEASE_KEY} from its directory.",
        ) from error
