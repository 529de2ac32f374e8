"""Autoscaler state persisted between iterations.

Machines are what the clouds list. The state holds only what no list says: launches that have
not been seen yet, why a machine was rented and for how much, what it has cost by region and
reason, which machines are leaving, and what was learned of pools. It is written before anything
is done.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from typing import Final

from pydantic import TypeAdapter, ValidationError

from geo_ray.base.errors import RunDirectoryError
from geo_ray.cloud.provider import LaunchRequest, Machine, Pool

_BETWEEN: Final = "\t"


@dataclass(slots=True)
class SpendRow:
    """Dollars of one region for one reason.

    Attributes:
        machine_h: hours of machines.
        quoted_usd: what they would have cost at the price of the moment they were rented at.
        paid_usd: what they cost, at the prices of the time.
    """

    machine_h: float = 0.0
    quoted_usd: float = 0.0
    paid_usd: float = 0.0


@dataclass(slots=True)
class SpendLedger:
    """All rows.

    Attributes:
        rows: by region and reason.
    """

    rows: dict[str, SpendRow] = field(default_factory=dict)

    def add(
        self, region: str, reason: str, hours: float, quoted_usd: float, paid_usd: float
    ) -> None:
        """Book some hours of a machine."""
        row = self.rows.setdefault(f"{region}{_BETWEEN}{reason}", SpendRow())
        row.machine_h += hours
        row.quoted_usd += quoted_usd
        row.paid_usd += paid_usd

    def move(self, region: str, reason: str, to_reason: str, row: SpendRow) -> None:
        """Book what was booked for one reason for another one."""
        mine = self.rows.setdefault(f"{region}{_BETWEEN}{reason}", SpendRow())
        mine.machine_h = max(0.0, mine.machine_h - row.machine_h)
        mine.quoted_usd = max(0.0, mine.quoted_usd - row.quoted_usd)
        mine.paid_usd = max(0.0, mine.paid_usd - row.paid_usd)
        self.add(region, to_reason, row.machine_h, row.quoted_usd, row.paid_usd)

    def row(self, region: str, reason: str) -> SpendRow:
        """Return one row."""
        return self.rows.get(f"{region}{_BETWEEN}{reason}", SpendRow())

    def by_region_and_reason(self) -> list[tuple[str, str, SpendRow]]:
        """Return all rows, sorted."""
        found = []
        for key in sorted(self.rows):
            region, _, reason = key.partition(_BETWEEN)
            found.append((region, reason, self.rows[key]))
        return found

    @property
    def paid_usd(self) -> float:
        """All that was paid so far."""
        return sum(row.paid_usd for row in self.rows.values())

    @property
    def quoted_usd(self) -> float:
        """The same at the prices of the moments that machines were rented at."""
        return sum(row.quoted_usd for row in self.rows.values())


_TAKEN_IN: Final = "it was there when the journal could not be read"
_MOST_BYTES: Final = 64 * 1024 * 1024


@dataclass(slots=True)
class Intent:
    """Machines that were asked for and are not all there yet.

    Attributes:
        request: what was sent, or is to be.
        reason: why.
        usd_per_hour: of one, as quoted then.
        since_unix_s: when it was decided.
        sent_unix_s: when it was last sent.
        failed: machines of it that were never made.
        ended: those that came, or were to start, and are gone again.
        sends: how often it was sent.
    """

    request: LaunchRequest
    reason: str
    usd_per_hour: float
    since_unix_s: float
    sent_unix_s: float
    failed: int = 0
    ended: tuple[str, ...] = ()
    sends: int = 1


@dataclass(slots=True)
class Parting:
    """A machine that is to go.

    Attributes:
        reason: why.
        until_unix_s: when it is taken at the latest; None: it is not drained yet, as something
            else is to take its place first.
        epoch: of the autoscaler that drains it.
        only_idle: whether it stays if anything runs there all the same.
        successor: where nothing is planned: the machine that has taken its place; None: none yet.
    """

    reason: str
    until_unix_s: float | None = None
    epoch: int = 0
    only_idle: bool = False
    successor: str | None = None


@dataclass(slots=True)
class Duty:
    """A machine that the autoscaler has rented.

    Attributes:
        machine: as it was last listed, with the pool that it counts to: where the target names no
            zones, that without one.
        reason: why it was rented.
        usd_per_hour: as quoted then.
        paid_unix_s: until when its cost is in the ledger.
        seen_unix_s: when it was last listed, or its region did not answer.
        unready_unix_s: since when it has no node; None: it has one.
        parting: set when it is to go.
        has_joined: whether its node was ever there.
        starting: what it has cost before it was.
        idle_unix_s: where nothing is planned, or the target has no such region or role: since when
            the machine is of no use; None: it is of use.
        is_awaited: there too: whether at the last look something waited for it.
    """

    machine: Machine
    reason: str
    usd_per_hour: float
    paid_unix_s: float
    seen_unix_s: float
    unready_unix_s: float | None
    parting: Parting | None = None
    has_joined: bool = False
    starting: SpendRow = field(default_factory=SpendRow)
    idle_unix_s: float | None = None
    is_awaited: bool = True


@dataclass(slots=True)
class PoolRecord:
    """What was learned of a pool.

    Attributes:
        pool: which.
        usd_per_hour: the last price; None: none was seen.
        refusals: in a row.
        until_unix_s: until when it is left alone.
        preemptions: seen there, older ones counting less.
        hours: that machines ran there, older ones counting less.
        as_of_unix_s: of the two.
        taken_unix_s: when a machine of it was last taken back.
        unjoined: launches in a row of which a machine came and its node never did.
        unjoined_request: the last of them; each counts once.
    """

    pool: Pool
    usd_per_hour: float | None = None
    refusals: int = 0
    until_unix_s: float = 0.0
    preemptions: float = 0.0
    hours: float = 0.0
    as_of_unix_s: float = 0.0
    taken_unix_s: float = 0.0
    unjoined: int = 0
    unjoined_request: str | None = None


@dataclass(slots=True)
class RegionMemory:
    """What was done in a region.

    Attributes:
        moved_unix_s: when machines were last rented there.
        surplus_unix_s: since when there are too many; None: there are not.
    """

    moved_unix_s: float = 0.0
    surplus_unix_s: float | None = None


@dataclass(slots=True)
class PaceRecord:
    """What was decided of deadline and budget, and holds until it is known better.

    Attributes:
        only_on_demand: whether the deadline leaves no time for a preemption.
        stopped_at_usd: the budget at which all was stopped; None: it was not.
        speed: times the target's, at which the job finishes for the least.
        speed_unix_s: when that was last chosen.
        done_unix_s: since when nothing is left of the job; None: something is.
    """

    only_on_demand: bool = False
    stopped_at_usd: float | None = None
    speed: float = 1.0
    speed_unix_s: float = 0.0
    done_unix_s: float | None = None


@dataclass(slots=True)
class AutoscalerMemory:
    """All that the autoscaler must remember between two looks, and beyond its own death.

    Machines are what the clouds list; this says only what no list says: what was asked for and has
    not been seen yet, why a machine was rented and for how much, what it has cost, what is leaving,
    and what was learned of pools. It is written before anything is done.

    Attributes:
        epoch: how manieth holder of the lease wrote it.
        launches: how many requests were ever made; part of their ids.
        intents: by request id.
        duties: by machine id.
        regions: by name.
        pools: by `pool_key`.
        ledger: what was spent.
        resources: by type of machine, what Ray found on the last ones.
        heads: by machine id, machines of Ray's head, which are only paid here.
        pace: what was decided of deadline and budget.
        called_off: by request id, when what was called off was last sent, of requests of which
            machines may still come: clouds list new ones late.
        unseen: by the cloud's name, regions that were silent when this began, as what there was
            before could not be read: machines of theirs are taken in once they answer.
        booked_unix_s: where what there was before could not be read: until when all costs are in
            the ledger in one sum, whatever machine they were of.
    """

    epoch: int = 0
    launches: int = 0
    intents: dict[str, Intent] = field(default_factory=dict)
    duties: dict[str, Duty] = field(default_factory=dict)
    regions: dict[str, RegionMemory] = field(default_factory=dict)
    pools: dict[str, PoolRecord] = field(default_factory=dict)
    ledger: SpendLedger = field(default_factory=SpendLedger)
    pace: PaceRecord = field(default_factory=PaceRecord)
    resources: dict[str, dict[str, float]] = field(default_factory=dict)
    heads: dict[str, Duty] = field(default_factory=dict)
    called_off: dict[str, float] = field(default_factory=dict)
    unseen: tuple[str, ...] = ()
    booked_unix_s: float = 0.0

    def copied(self) -> AutoscalerMemory:
        """Return a copy that shares nothing that changes."""
        return replace(
            self,
            intents={key: replace(each) for key, each in self.intents.items()},
            duties={
                key: replace(
                    each,
                    parting=each.parting and replace(each.parting),
                    starting=replace(each.starting),
                )
                for key, each in self.duties.items()
            },
            regions={key: replace(each) for key, each in self.regions.items()},
            pace=replace(self.pace),
            pools={key: replace(each) for key, each in self.pools.items()},
            ledger=SpendLedger({key: replace(row) for key, row in self.ledger.rows.items()}),
            resources={key: dict(each) for key, each in self.resources.items()},
            heads={key: replace(each) for key, each in self.heads.items()},
            called_off=dict(self.called_off),
        )

    def pool(self, pool: Pool) -> PoolRecord:
        """Return what is known of a pool; a new record if nothing is."""
        return self.pools.setdefault(pool_key(pool), PoolRecord(pool))

    def region(self, name: str) -> RegionMemory:
        """Return what was done in a region."""
        return self.regions.setdefault(name, RegionMemory())


def set_with_clock(memory: AutoscalerMemory, by_s: float) -> AutoscalerMemory:
    """Return a copy by a clock that was set: all that was noted by it is as long ago as before.

    What clouds have noted (when a machine began, when it ends) is by their own clocks.
    """

    def at(when_unix_s: float) -> float:
        return when_unix_s + by_s if when_unix_s else 0.0  # 0: never

    def since(when_unix_s: float | None) -> float | None:
        return None if when_unix_s is None else at(when_unix_s)

    memory = memory.copied()
    memory.booked_unix_s = at(memory.booked_unix_s)
    memory.called_off = {key: at(when) for key, when in memory.called_off.items()}
    memory.pace.speed_unix_s = at(memory.pace.speed_unix_s)
    memory.pace.done_unix_s = since(memory.pace.done_unix_s)
    for intent in memory.intents.values():
        intent.since_unix_s, intent.sent_unix_s = at(intent.since_unix_s), at(intent.sent_unix_s)
    for duty in (*memory.duties.values(), *memory.heads.values()):
        duty.paid_unix_s, duty.seen_unix_s = at(duty.paid_unix_s), at(duty.seen_unix_s)
        duty.unready_unix_s, duty.idle_unix_s = since(duty.unready_unix_s), since(duty.idle_unix_s)
        if duty.parting is not None:
            duty.parting.until_unix_s = since(duty.parting.until_unix_s)
    for region in memory.regions.values():
        region.moved_unix_s = at(region.moved_unix_s)
        region.surplus_unix_s = since(region.surplus_unix_s)
    for pool in memory.pools.values():
        pool.until_unix_s, pool.taken_unix_s = at(pool.until_unix_s), at(pool.taken_unix_s)
        pool.as_of_unix_s = at(pool.as_of_unix_s)
    return memory


def unbooked_unix_s(memory: AutoscalerMemory, machine: Machine, now_unix_s: float) -> float:
    """Return since when a machine that comes into the books costs, and that is not in them yet."""
    return min(max(machine.launched_unix_s, memory.booked_unix_s), now_unix_s)


def taken_in(memory: AutoscalerMemory, machine: Machine, now_unix_s: float) -> Duty:
    """Return a machine that is there, with what can be known where no journal tells of it."""
    since_s = unbooked_unix_s(memory, machine, now_unix_s)
    return Duty(machine, _TAKEN_IN, 0.0, since_s, now_unix_s, now_unix_s)


def pool_key(pool: Pool) -> str:
    """Return a pool in one word."""
    return f"{pool.region}/{pool.zone or '*'}/{pool.type}/{pool.market.value}"


def outstanding(memory: AutoscalerMemory, intent: Intent) -> int:
    """Return the machines of a request that may still come."""
    request = intent.request
    came = sum(
        duty.machine.request_id == request.request_id and name not in intent.ended
        for name, duty in memory.duties.items()
    )
    return request.count - came - intent.failed - len(intent.ended)


_READER: Final = TypeAdapter(AutoscalerMemory)


def encode_memory(memory: AutoscalerMemory) -> bytes:
    """Write it as `decode_memory` reads it."""
    return zlib.compress(_READER.dump_json(memory))


def decode_memory(data: bytes) -> AutoscalerMemory:
    """Read it.

    Raises:
        RunDirectoryError: the bytes are nothing of the kind.
    """
    try:
        reader = zlib.decompressobj()
        text = reader.decompress(data, _MOST_BYTES)
        if not reader.eof:
            raise ValueError("cut off, or too long")
        return _READER.validate_json(text)
    except (ValidationError, ValueError, zlib.error) as error:
        raise RunDirectoryError(
            "the autoscaler's journal cannot be read",
            fix="End all machines of the cluster, then remove the journal from its directory.",
        ) from error
