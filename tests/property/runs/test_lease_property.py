"""Drivers that come, pause, die and wake with clocks of their own: never two may write to a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from geo_ray.base.errors import LeaseLostError, RunDirectoryError, RunHeldError
from geo_ray.runs import lease
from geo_ray.runs.lease import PATIENCE, LeaseKeeper, LeaseSeeker, Owner, decode_record
from geo_ray.storage.conditional_store import StoredValue

LEASE_S = 10.0
SKEW_S = 600.0
MOST_DRIVERS = 6
OLD, NEW = "lost on the way there", "lost on the way back"


class Store:
    """A conditional store whose answers may get lost, before or after the write was done."""

    def __init__(self) -> None:
        self.value: StoredValue | None = None
        self.fault: str | None = None
        self.is_held = False
        self.pause: Callable[[], None] | None = None  # between a decision and what comes of it
        self.tokens: list[int] = []

    def read(self, key: str) -> StoredValue | None:
        return self.value

    def write(self, key: str, data: bytes, expected: str | None) -> str | None:
        self.meanwhile()
        if self.is_held or self.fault == OLD:
            raise RunDirectoryError("not written")
        if (None if self.value is None else self.value.tag) != expected:
            return None
        self.value = StoredValue(data, data.decode())
        self.tokens.append(decode_record(data).token)
        if self.fault == NEW:
            raise RunDirectoryError("written, and the answer got lost")
        return self.value.tag

    def meanwhile(self) -> None:
        pause, self.pause = self.pause, None
        if pause is not None:
            pause()

    @contextmanager
    def unchanged(self, key: str, tag: str) -> Iterator[bool]:
        self.meanwhile()
        assert not self.is_held
        self.is_held = True
        try:
            yield self.value is not None and self.value.tag == tag
        finally:
            self.is_held = False


@dataclass
class World:
    """True time, which nobody knows."""

    now_s: float = 0.0


@dataclass
class SkewedClock:
    """A machine's own clock."""

    world: World
    offset_s: float
    rate: float

    def now_s(self) -> float:
        return self.offset_s + self.rate * self.world.now_s

    def sleep_s(self, duration_s: float) -> None:
        raise AssertionError("nobody sleeps here")


@dataclass
class Driver:
    """A process that wants to drive the run, or does."""

    seeker: LeaseSeeker
    is_near: bool  # on a machine where its end is seen
    keeper: LeaseKeeper | None = None
    log: list[int] | None = None
    is_judged: bool = False  # it has found that it may write an event, and has not written it
    is_over: bool = field(default=False)


class Drivers(RuleBasedStateMachine):
    """Anything may happen to anybody at any time; who is not chosen for long has paused."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.store = Store()
        self.drivers: list[Driver] = []
        self.log: list[int] = []  # tokens of the events that count
        self.commits: list[int] = []
        self.patched = lease.has_ended
        lease.has_ended = self.has_ended

    def teardown(self) -> None:
        """Whatever has happened: when nobody is heard any more, the next one gets the run."""
        try:
            self.store.fault = None
            before = 0 if self.store.value is None else decode_record(self.store.value.data).token
            last = self.driver(0.0, 1.0, is_near=False)
            self.look(last)
            if last.keeper is None:
                self.world.now_s += PATIENCE * LEASE_S
                self.look(last)
            assert last.keeper is not None and last.keeper.token == before + 1
        finally:
            lease.has_ended = self.patched

    def has_ended(self, owner: Owner) -> bool | None:
        found = next(d for d in self.drivers if d.seeker.claim.owner == owner)
        return found.is_over if found.is_near else None

    def driver(self, offset_s: float, rate: float, *, is_near: bool) -> Driver:
        clock = SkewedClock(self.world, offset_s, rate)
        seeker = LeaseSeeker(self.store, "run", lambda text: None, lives_s=LEASE_S, clock=clock)
        made = Driver(seeker, is_near)
        self.drivers.append(made)
        return made

    def look(self, driver: Driver) -> None:
        try:
            found = driver.seeker.try_acquire()
        except RunHeldError:
            driver.is_over = True
        except RunDirectoryError:
            driver.is_over = True
        else:
            if isinstance(found, LeaseKeeper):
                if found.from_unknown:
                    self.log = list(self.log)  # as `detach` does
                driver.keeper, driver.log = found, self.log

    def lost(self, driver: Driver) -> None:
        """Nobody is told so while the lease is its own."""
        driver.is_over = True
        assert self.store.value is not None
        assert decode_record(self.store.value.data).owner != driver.seeker.claim.owner

    def take_over(self, wait_s: float, rate: float) -> None:
        if len(self.drivers) < MOST_DRIVERS:
            driver = self.driver(SKEW_S, rate, is_near=False)
            self.look(driver)
            if not driver.is_over and driver.keeper is None:
                self.world.now_s += wait_s
                self.look(driver)

    def some(self, data: st.DataObject, **wanted: bool) -> Driver | None:
        found = [
            driver
            for driver in self.drivers
            if not driver.is_over
            and (driver.keeper is not None) == wanted["holds"]
            and driver.is_judged == wanted.get("is_judged", False)
        ]
        return data.draw(st.sampled_from(found)) if found else None

    # ------------------------------------------------------------------ what may happen

    @rule(duration_s=st.sampled_from([0.1, 1.0, 2.0, 5.0, 9.0, 10.0, 11.0, 12.5, 14.0, 100.0]))
    def pass_time(self, duration_s: float) -> None:
        self.world.now_s += duration_s

    @precondition(lambda self: len(self.drivers) < MOST_DRIVERS)
    @rule(
        offset_s=st.sampled_from([-SKEW_S, 0.0, SKEW_S]),
        rate=st.sampled_from([0.9, 1.0, 1.1]),
        is_near=st.booleans(),
    )
    def arrive(self, offset_s: float, rate: float, is_near: bool) -> None:
        self.look(self.driver(offset_s, rate, is_near=is_near))

    @rule(wait_s=st.sampled_from([9.0, 9.5, 12.5, 14.0]), rate=st.sampled_from([0.9, 1.0, 1.1]))
    def take_over_from_silent(self, wait_s: float, rate: float) -> None:
        self.take_over(wait_s, rate)

    @rule(data=st.data())
    def look_again(self, data: st.DataObject) -> None:
        driver = self.some(data, holds=False)
        if driver is not None:
            self.look(driver)

    @rule(data=st.data(), fault=st.sampled_from([None, None, OLD, NEW]), pauses=st.booleans())
    def renew(self, data: st.DataObject, fault: str | None, pauses: bool) -> None:
        driver = self.some(data, holds=True)
        if driver is None or driver.keeper is None:
            return
        self.store.fault = fault
        self.store.pause = (lambda: self.take_over(14.0, 1.0)) if pauses and not fault else None
        try:
            driver.keeper.renew()
        except LeaseLostError:
            self.lost(driver)
        except RunDirectoryError:
            assert fault is not None
        finally:
            self.store.fault = None

    @rule(data=st.data())
    def judge_event(self, data: st.DataObject) -> None:
        driver = self.some(data, holds=True)
        if driver is None or driver.keeper is None:
            return
        try:
            driver.keeper.check()
            driver.is_judged = True
            assert driver.keeper.may_write()
        except LeaseLostError:
            self.lost(driver)

    @rule(data=st.data())
    def write_event(self, data: st.DataObject) -> None:
        """However late after it was judged."""
        driver = self.some(data, holds=True, is_judged=True)
        if driver is not None and driver.keeper is not None and driver.log is not None:
            driver.log.append(driver.keeper.token)
            driver.is_judged = False

    @rule(data=st.data())
    def judge_and_write_event(self, data: st.DataObject) -> None:
        driver = self.some(data, holds=True)
        if driver is not None and driver.keeper is not None and driver.log is not None:
            try:
                driver.keeper.check()
                driver.log.append(driver.keeper.token)
            except LeaseLostError:
                self.lost(driver)

    @rule(data=st.data(), pauses=st.booleans())
    def commit(self, data: st.DataObject, pauses: bool) -> None:
        driver = self.some(data, holds=True)
        if driver is None or driver.keeper is None:
            return
        self.store.pause = (lambda: self.take_over(14.0, 1.0)) if pauses else None
        try:
            with driver.keeper.writing():
                self.commits.append(driver.keeper.token)
                assert self.store.value is not None
                assert decode_record(self.store.value.data).owner == driver.seeker.claim.owner
                if len(self.drivers) < MOST_DRIVERS:  # somebody wants it just now
                    self.look(self.driver(0.0, 1.0, is_near=False))
        except LeaseLostError:
            self.lost(driver)

    @rule(data=st.data(), holds=st.booleans(), kindly=st.booleans())
    def end(self, data: st.DataObject, holds: bool, kindly: bool) -> None:
        driver = self.some(data, holds=holds)
        if driver is not None:
            driver.is_over = True
            if kindly and driver.keeper is not None:
                driver.keeper.close()

    # ------------------------------------------------------------------ what must hold

    @invariant()
    def one_may_write_at_most(self) -> None:
        able = [
            driver
            for driver in self.drivers
            if not driver.is_over and driver.keeper is not None and driver.keeper.may_write()
        ]
        assert len(able) <= 1

    @invariant()
    def what_counts_is_in_the_order_of_holders(self) -> None:
        assert self.log == sorted(self.log)
        assert self.commits == sorted(self.commits)
        assert self.store.tokens == sorted(self.store.tokens)

    @invariant()
    def every_holder_has_its_own_token(self) -> None:
        tokens = [d.keeper.token for d in self.drivers if d.keeper is not None]
        assert len(tokens) == len(set(tokens))


TestDrivers = Drivers.TestCase
TestDrivers.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
