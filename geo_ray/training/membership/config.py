"""The ``members`` section of a configuration: who is there at the start, and who may be missing."""

from __future__ import annotations

from pydantic import Field

from geo_ray.codecs.config import CodecConfig
from geo_ray.config.base import StrictModel


class MembersConfig(StrictModel):
    """Which losses of regions a run survives, and which regions are not there from the start."""

    min: int | None = Field(
        None,
        ge=1,
        description="a run goes on without lost regions while so many are left, the averager's "
        "among them; null: it waits for every region that is lost, until that is back",
    )
    rejoin: bool = Field(
        True,
        description="regions that are lost are brought back by themselves, as copies of others; "
        "where that cannot be, or if false, fewer than min end the run",
    )
    wait_s: float = Field(
        600.0,
        ge=0,
        description="longest pause with fewer regions than are needed; then the run is saved and "
        "ends",
    )
    follow_plan: bool = Field(
        True,
        description="a run that follows a plan changes its interval by itself, when others take "
        "part and that pays; if false, it only says so",
    )
    absent: tuple[str, ...] = Field(
        (), description="regions that are not there at the start, and may join later"
    )

    def check(
        self,
        shards: dict[str, int],
        hosts: tuple[str, str | None],
        overlay: str,
        codec: CodecConfig,
        *,
        has_transfers: bool,
    ) -> None:
        """Refuse what regions cannot be lost from.

        Args:
            shards: by region of the run.
            hosts: where the averager lives, and where its standby does.
            overlay: its kind.
            codec: the run's codecs.
            has_transfers: whether updates take turns.

        Raises:
            ValueError: naming the key.
        """
        self._check_absent(shards, hosts)
        if self.min in {None, len(shards)}:
            return
        fixed = why_fixed(overlay, codec, has_transfers=has_transfers)
        if fixed is not None:
            raise ValueError(f"members.min: {fixed}, or leave it out")

    def _check_absent(self, shards: dict[str, int], hosts: tuple[str, str | None]) -> None:
        known = ", ".join(shards)
        if self.min is not None and self.min > len(shards):
            raise ValueError(
                f"members.min: there are {len(shards)} regions: give at most so many, or null"
            )
        for name in self.absent:
            if name not in shards:
                raise ValueError(
                    f"members.absent: there is no region '{name}', regions are {known}"
                )
            if name in hosts:
                raise ValueError(
                    f"members.absent: '{name}' hosts the averager, or stands by for it: it must "
                    "be there"
                )


def why_nobody_joins(shards: dict[str, int]) -> str | None:
    """Why no region can join a run whose members may change, with what to do; None if some can.

    Args:
        shards: by region.
    """
    if len(set(shards.values())) > 1:
        return (
            "a region begins with the copy of another one's shards: give all regions the same "
            "ps_shards"
        )
    return None


def why_fixed(overlay: str, codec: CodecConfig, *, has_transfers: bool) -> str | None:
    """Why a run's members cannot change, with what to do; None if they can."""
    if overlay != "star":
        return (
            f"with overlay {overlay} updates are summed in other regions, which must all be "
            "there: use overlay star"
        )
    if has_transfers:
        return "with transfers updates wait for their turn behind others': leave transfers out"
    if codec.up is not None and codec.up.traits.differential is not None:
        return (
            f"{codec.up.kind} keeps books of blocks with every region to the end: use another codec"
        )
    return None
