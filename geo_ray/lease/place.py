"""A folder with a few small values that are changed on condition: a directory, or in a bucket."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from geo_ray.lease.local_store import LocalConditionalStore
from geo_ray.lease.s3_store import LEASE_LIMITS, S3ConditionalStore
from geo_ray.lease.store import ConditionalStore
from geo_ray.stores.bucket import Bucket
from geo_ray.stores.uri import is_s3, parse_s3


@dataclass(frozen=True, slots=True)
class StorePlace:
    """See the module.

    Attributes:
        uri: a directory's path, or an ``s3://`` address.
    """

    uri: str

    @property
    def is_far(self) -> bool:
        """Whether it lies in a bucket."""
        return is_s3(self.uri)

    @property
    def shown(self) -> str:
        """How people would type it."""
        if self.is_far:
            return self.uri
        path, here = Path(self.uri), Path.cwd()
        return str(path.relative_to(here) if path.is_relative_to(here) else path)

    def store(self, below: str = "") -> ConditionalStore:
        """Return what reads and writes there; nothing is contacted yet.

        Args:
            below: name of a folder in it; empty: itself.

        Raises:
            StoreError: the address is none.
        """
        if not self.is_far:
            return LocalConditionalStore(Path(self.uri) / below)
        address = parse_s3(self.uri)
        folder = "".join(f"{part}/" for part in (address.prefix, below) if part)
        return S3ConditionalStore(Bucket(address, LEASE_LIMITS), folder)
