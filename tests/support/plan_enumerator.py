"""The model of docs/design/planner-model.md by plain enumeration.

Written from that page alone: nothing here is the planner's. Takes a configuration, prices and links
as a user writes them and goes through every plan.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

BITS = {
    None: (32, 32),
    "fp16": (16, 16),
    "int8": (8.125, 8.125),
    "int4": (4.5, 4.5),
    "chunked_topk": (0.234375, 32),
}
LAST_BITS = {  # of strategies in rounds, at the default error of 0.03
    None: (32, 32),
    "fp16": (16, 16),
    "int8": (8.125, 8.125),
    "int4": (8.125, 8.125),
    "chunked_topk": (8.125, 32),
}
LAST_BITS_ONE_BY_ONE = {  # of strategies that answer one by one, at their default of 0.0001
    None: (32, 32),
    "fp16": (16.25, 16.25),
    "int8": (16.25, 16.25),
    "int4": (16.25, 16.25),
    "chunked_topk": (16.25, 32),
}
LOSS = {None: 0.0, "fp16": 0.0002, "int8": 0.001, "int4": 0.003, "chunked_topk": 0.015}
LOSS_OF_INTERVAL = [(1, 0.0), (25, 0.01), (100, 0.025), (500, 0.05)]
LOSS_OF_DELAY = 0.005
OPTIMIZER_COPIES = {"sgd": 0, "momentum": 1, "adamw": 2}
T_95 = [6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833]


@dataclass(frozen=True)
class Enumerated:
    """An enumerated plan: time, money and its choices."""

    seconds: float
    usd: float
    what: tuple[Any, ...]


@dataclass(frozen=True)
class Question:
    """What a user gives.

    Attributes:
        config: the configuration.
        prices: the records of the user's price file.
        rates: its exchange rates.
        links: (from, to) -> (Mbit/s, round trip in seconds).
        num_params: of the model.
        blocking: whether the strategy's regions stand still for each exchange (always), only
            for one that is late (when_late), or never.
        last: whether there is an exchange after the last step: always, or for a rest of steps.
        fragments: parts of the model that are exchanged one by one.
        hidden_steps: steps that hide an exchange (when_late); None: those until the next.
        bound: exchanges that regions may be ahead of the slowest (never).
        synchronous: whether a region that stands still holds up all of them.
        one_by_one: whether regions are answered one by one, and not in rounds.
        by_speed: whether slower regions exchange after fewer steps.
        first_in_full: whether the first exchange has no codec.
        running: what a run that is planned anew has in its regions; None: it is planned first.
        measured: a file of measured losses; None: there is none.
    """

    config: Mapping[str, Any]
    prices: Sequence[Mapping[str, Any]]
    rates: Sequence[Mapping[str, Any]]
    links: Mapping[tuple[str, str], tuple[float, float]]
    num_params: int
    blocking: str = "always"
    last: str = "rest"
    fragments: int = 1
    hidden_steps: float | None = None
    bound: int | None = None
    synchronous: bool = True
    one_by_one: bool = False
    by_speed: bool = False
    first_in_full: bool = False
    running: Running | None = None
    measured: Mapping[str, Any] | None = None

    @property
    def steps(self) -> float:
        """Of the job, or what is left of it."""
        steps = self.config["train"]["steps"]
        return float(steps if self.running is None else self.running.left)

    @property
    def names(self) -> list[str]:
        return [region["name"] for region in self.config["regions"]]

    def price(self, place: Mapping[str, Any], **wanted: Any) -> Mapping[str, Any]:
        found = [
            record
            for record in self.prices
            if (record["cloud"], record["region"]) == (place["cloud"], place["at"])
            and all(record.get(key, _DEFAULT.get(key)) == value for key, value in wanted.items())
        ]
        assert len(found) == 1, (place, wanted, found)
        return found[0]

    def in_usd(self, record: Mapping[str, Any]) -> float:
        if record["currency"] == "USD":
            return float(record["amount"])
        own = [rate for rate in self.rates if rate["currency"] == record["currency"]]
        return float(record["amount"] * max(own, key=lambda rate: rate["on"])["usd"])

    def usd_of_hours(self, record: Mapping[str, Any], age_h: float, hours: float) -> float:
        """Of one that is so old when it begins to be paid for so many hours."""
        now_h, until_h, factor, usd = age_h, age_h + hours, 1.0, 0.0
        for tier in record.get("age_tiers", []):
            usd += factor * max(0.0, min(until_h, tier["after_h"]) - now_h)
            now_h, factor = max(now_h, tier["after_h"]), tier["factor"]
        return self.in_usd(record) * (usd + factor * max(0.0, until_h - now_h))

    def usd_per_gb(self, src: str, dst: str) -> float:
        here, there = (self.config["plan"]["regions"][name] for name in (src, dst))
        if here["cloud"] != there["cloud"]:
            return self.in_usd(self.price(here, item="egress", to="internet"))
        own = [r for r in self.prices if r.get("to") == there["at"] and r["region"] == here["at"]]
        record = own[0] if own else self.price(here, item="egress", to="*")
        return self.in_usd(record) / (324 if record["unit"] == "Mbps-month" else 1)


@dataclass(frozen=True)
class Running:
    """A run that is planned anew.

    Attributes:
        left: steps.
        machines: by region, type and market: how old those that run are, one by one.
        faster: by region and type, by what the speed of the configuration is to be multiplied.
        servers: by region, type and age of the server.
        codec: of the present plan.
    """

    left: float
    machines: Mapping[tuple[str, str, str], Sequence[float]]
    faster: Mapping[tuple[str, str], float]
    servers: Mapping[str, tuple[str, float]]
    codec: str | None


_DEFAULT = {"item": "instance", "market": "on_demand"}


@dataclass(frozen=True)
class Rented:
    """Machines of a region: how long a step takes, and (record, age, how many).

    Attributes:
        rows_s: seconds of a step without the LAN.
        lan_s: seconds of the LAN for gradients and parameters, once.
        stepping: workers that make the optimizer's steps: one, several, or none.
        goes_on: whether they are those that run, all of them and no others.
    """

    rows_s: float
    lan_s: float
    stepping: str
    machines: tuple[tuple[Mapping[str, Any], float, int], ...]
    lost_fraction: float
    goes_on: bool

    def step_s(self, question: Question, every: float) -> float:
        """Return the seconds of a step if there are so many from one exchange to the next."""
        if self.stepping == "none":
            return self.rows_s + self.lan_s
        sends = 1 if question.blocking == "always" else 2 if question.hidden_steps is None else 3
        every, copies = max(1.0, every), 2
        if self.stepping == "one":
            copies += OPTIMIZER_COPIES[question.config["optimizer"]["kind"]]
            sends += math.ceil(every / question.config["train"]["state_every"]) - 1
        return self.rows_s + self.lan_s * copies / 2 * min(1.0, sends / every)


def step_of(rows: int, speeds: Sequence[float], rooms: Sequence[float]) -> float:
    """The last machine's seconds if whole rows, one at least on each, are shared out best.

    Infinite if the machines have no room for the rows.
    """
    ends_s = sorted({k / speed for speed in set(speeds) for k in range(1, rows + 1)})
    pairs = list(zip(speeds, rooms, strict=True))
    for end_s in ends_s:
        done = [min(max_rows, math.floor(end_s * speed * (1 + 1e-9))) for speed, max_rows in pairs]
        if min(done) >= 1 and sum(done) >= rows:
            return end_s
    return math.inf


def lan_of(
    question: Question, place: Mapping[str, Any], used: Sequence[Mapping[str, Any]]
) -> float:
    """Return the LAN time of machines of a region for gradients and parameters, once."""
    plan = question.config["plan"]
    if plan.get("lan_s_per_machine") is not None:
        return float(plan["lan_s_per_machine"] * len(used))
    each_s = [
        (machine.get("accelerators") or 1) * 2 * 32 * question.num_params
        / (machine["network_gbps"] * 1e9)
        if machine.get("network_gbps")
        else 0.0
        for machine in used
    ]  # fmt: skip
    return sum(each_s) - (0.0 if place.get("server") else max(each_s))


def stepping(question: Question, used: Sequence[Mapping[str, Any]]) -> str:
    """Return which workers on machines of a region make the optimizer's steps."""
    is_one = len(used) == 1 and (used[0].get("accelerators") or 1) == 1
    if question.config["plan"].get("lan_s_per_machine") is not None:
        return "none"
    if not may_step(question, alone=is_one):
        return "none"
    return "one" if is_one else "several"


def may_step(question: Question, *, alone: bool) -> bool:
    """Tell whether a worker that is alone, or one of several, makes the optimizer's steps."""
    on = question.config["train"].get("optimizer_on", "auto")
    waits = question.blocking == "always" and not question.one_by_one
    return on == "worker" or (on == "auto" and alone and waits)


def max_rows_of(question: Question, place: Mapping[str, Any], machine: Mapping[str, Any]) -> float:
    """The rows that the memory of a machine has room for."""
    copy = 4 * question.num_params
    row_bytes = question.config["plan"].get("activation_mb_per_row", 0.0) * 1e6
    accelerators = machine.get("accelerators") or 0
    several = 2 if len(question.names) > 1 else 0
    optimizer = OPTIMIZER_COPIES[question.config["optimizer"]["kind"]]
    worker = 2 + (optimizer if may_step(question, alone=accelerators <= 1) else 0)
    host = 0 if place.get("server") else (4 + optimizer + several) * copy
    host += 2 * copy * accelerators if accelerators else worker * copy
    rooms = []
    if machine.get("host_gb") is not None:
        left = machine["host_gb"] * 1e9 - host
        if accelerators:
            rooms.append(math.inf if left >= 0 else 0)
        else:
            rooms.append(left // row_bytes if row_bytes else math.inf)
    if accelerators and machine.get("accelerator_gb") is not None:
        left = machine["accelerator_gb"] * 1e9 - worker * copy
        rooms.append(accelerators * (left // row_bytes) if row_bytes else math.inf)
    return max(0.0, min(rooms, default=math.inf))


def rented(question: Question, name: str) -> Iterator[Rented]:
    """Yield every choice of machines of a region."""
    plan = question.config["plan"]
    place = plan["regions"][name]
    batch = question.config["data"]["batch_size"]
    all_rows = batch * sum(region.get("workers", 1) for region in question.config["regions"])
    data = {each: plan["regions"][each]["rows"] for each in question.names}
    rows = max(1, round(all_rows * data[name] / sum(data.values())))
    lost = plan["spot"]["preemptions_per_h"] * plan["spot"]["lost_s"] / 3600
    kinds = []
    for machine in place["machines"]:
        for market in machine["markets"]:
            record = question.price(place, item="instance", type=machine["type"], market=market)
            speed = machine["rows_per_s"]
            cap, ages_h = machine["cap"], list[float]()
            if question.running is not None:
                speed *= question.running.faster.get((name, machine["type"]), 1.0)
                ages_h = list(question.running.machines.get((name, machine["type"], market), ()))
            max_rows = max_rows_of(question, place, machine)
            has = machine, speed, max_rows
            kinds += [(record, has, ages_h.count(age_h), age_h) for age_h in set(ages_h)]
            new = (
                0
                if record.get("availability") == "none" or not max_rows
                else max(0, cap - len(ages_h))
            )
            kinds.append((record, has, new, None))
    for counts in itertools.product(*(range(cap + 1) for _, _, cap, _ in kinds)):
        number = sum(counts)
        if not 1 <= number <= rows:
            continue
        all_of_them = [kind[1] for kind, n in zip(kinds, counts, strict=True) for _ in range(n)]
        used, speeds, rooms = zip(*all_of_them, strict=True)
        rows_s = step_of(rows, speeds, rooms) + plan["step_overhead_s"]
        if math.isinf(rows_s):
            continue
        lan = lan_of(question, place, used), stepping(question, used)
        chosen = tuple(
            (record, age_h or 0.0, n)
            for (record, _, _, age_h), n in zip(kinds, counts, strict=True)
            if n
        )
        spots = sum(n for record, _, n in chosen if record["market"] == "spot")
        goes_on = all(
            n == (0 if age_h is None else cap)
            for (_, _, cap, age_h), n in zip(kinds, counts, strict=True)
        )
        yield Rented(rows_s, *lan, chosen, lost * spots, goes_on)


def loss_of(question: Question, interval: int, codec: str | None) -> float:
    if question.measured is not None:
        return measured_loss(question.measured, interval, codec)
    late = 0.0 if question.blocking == "always" else LOSS_OF_DELAY
    return rough_loss(interval) + LOSS[codec] + late


def rough_loss(interval: int) -> float:
    for (low, less), (high, more) in itertools.pairwise(LOSS_OF_INTERVAL):
        if low <= interval <= high:
            return on_line(interval, (low, less), (high, more))
    return LOSS_OF_INTERVAL[-1][1] * math.log(interval) / math.log(500)


def on_line(interval: int, *ends: tuple[int, float]) -> float:
    (low, less), (high, more) = ends
    return less + math.log(interval / low) / math.log(high / low) * (more - less)


def upper_end(losses: Sequence[float | None], base: Sequence[float | None]) -> float:
    if None in losses or None in base:
        return math.inf
    shares = [a / b - 1 for a, b in zip(losses, base, strict=True) if a is not None and b]
    n = len(shares)
    mean = sum(shares) / n
    deviation = math.sqrt(sum((share - mean) ** 2 for share in shares) / (n - 1))
    return max(0.0, mean + T_95[min(n, 10) - 2] * deviation / math.sqrt(n))


def measured_loss(measured: Mapping[str, Any], interval: int, codec: str | None) -> float:
    losses = {(point["interval"], point["codec"]): point["losses"] for point in measured["points"]}
    ends = {h: upper_end(losses[h, c], measured["plain"]) for h, c in losses if c is None}
    at = measured["codecs_at"]
    if codec is None:
        added = 0.0
    elif (at, codec) in losses:
        added = upper_end(losses[at, codec], losses[at, None])
    else:
        added = LOSS[codec]
    lower, higher = [h for h in ends if h < interval], [h for h in ends if h > interval]
    if interval in ends:
        return ends[interval] + added
    if not lower:
        return ends[min(ends)] + added
    low = max(lower)
    if higher:
        high = min(higher)
        if math.inf in (ends[low], ends[high]):
            return math.inf
        return on_line(interval, (low, ends[low]), (high, ends[high])) + added
    more = rough_loss(interval) - rough_loss(low)
    before = max((h for h in ends if h < low), default=None)
    if before is not None and math.inf not in (ends[before], ends[low]):
        line = on_line(interval, (before, ends[before]), (low, ends[low])) - ends[low]
        more = max(more, line)
    return ends[low] + more + added


def hosts(question: Question) -> list[str]:
    rules = question.config["plan"].get("residency", {})
    allowed = question.names
    for kind in ("gradients", "checkpoints"):
        for places in rules.get(kind, {}).values():
            allowed = [name for name in allowed if name in places]
    return allowed


@dataclass(frozen=True)
class Way:
    """An exchange option: seconds and egress of one exchange, by region."""

    seconds: Mapping[str, float]
    usd: Mapping[str, float]


def way(question: Question, averager: str, codec_bits: tuple[float, float], fragments: int) -> Way:
    up, down = (question.num_params / fragments * bits / 8 for bits in codec_bits)
    seconds, usd = {}, {}
    for name in question.names:
        if name == averager:
            seconds[name] = usd[name] = 0.0
            continue
        there, back = question.links[name, averager], question.links[averager, name]
        seconds[name] = up * 8e-6 / there[0] + down * 8e-6 / back[0] + there[1]
        usd[name] = up / 1e9 * question.usd_per_gb(name, averager)
        usd[name] += down / 1e9 * question.usd_per_gb(averager, name)
    return Way(seconds, usd)


def trained(
    question: Question, how: Exchanged, steps_s: Mapping[str, float]
) -> tuple[float, float]:
    """Seconds from the first step to the end of the last, and the egress of exchanges on the way.

    Args:
        question: what a user gives.
        how: the exchanges.
        steps_s: of a step, by region.
    """
    one = how.one
    steps, every = question.steps, how.interval / question.fragments
    rounds = exchanges_before_last(question, every, how.codec)
    other = [how.in_full] * (question.first_in_full and how.codec is not None and rounds > 0)
    ends_s, counts = {}, {}
    for name, step_s in steps_s.items():
        one_s = one.seconds[name]
        counts[name] = rounds
        if question.blocking == "always":
            if question.by_speed:
                own = max(1, math.floor(every * min(steps_s.values()) / step_s + 1e-9))
                counts[name] = exchanges_before_last(question, own, how.codec)
            late_s = counts[name] * one_s
            late_s += sum(each.seconds[name] - one_s for each in other)
        elif question.blocking == "when_late":
            hides = every if question.hidden_steps is None else question.hidden_steps
            since = min(hides, steps - rounds * every)
            late_s = (rounds - 1) * max(0.0, one_s - hides * step_s)
            late_s = late_s + max(0.0, one_s - since * step_s) if rounds else 0.0
        else:
            takes = math.ceil(one_s / step_s - 1e-9)
            counts[name], late_s, begins = 0, 0.0, every
            while begins < steps - 1e-9:
                too_late = steps - begins < max(1, takes) - 1e-9
                if counts[name] and too_late:
                    break
                counts[name] += 1
                late_s = max(0.0, one_s - (steps - begins) * step_s)
                begins += max(every, takes)
        ends_s[name] = steps * step_s + late_s
    if question.blocking == "never" and question.bound is not None:
        min_interval_s = {
            name: step_s * max(every, math.ceil(one.seconds[name] / step_s - 1e-9))
            for name, step_s in steps_s.items()
        }
        for name, step_s in steps_s.items():
            # Those of the rarest that have begun before this one ends, and one more than the bound.
            of_rarest = 0
            while (of_rarest + 1) * max(min_interval_s.values()) < steps * step_s - 1e-9:
                of_rarest += 1
            counts[name] = min(counts[name], of_rarest + question.bound + 1)
    usd = sum(counts[name] * one.usd[name] for name in steps_s)
    usd += sum(each.usd[name] - one.usd[name] for each in other for name in steps_s)
    return max(ends_s.values()), usd


def standing(question: Question) -> list[Callable[[float], float]]:
    """Return the cost of servers and disks for a number of hours."""
    found: list[Callable[[float], float]] = []
    running = question.running
    for name in question.names:
        place = question.config["plan"]["regions"][name]
        if place.get("server"):
            record = question.price(
                place, item="instance", type=place["server"], market="on_demand"
            )
            age_h = 0.0
            if running is not None and running.servers.get(name, ("",))[0] == place["server"]:
                age_h = running.servers[name][1]
            found.append(partial(question.usd_of_hours, record, age_h))
        if place.get("disk"):
            month = question.in_usd(question.price(place, item="disk", type=place["disk"]))
            found.append(partial(operator.mul, month * place["disk_gb"] / 730))
    return found


@dataclass(frozen=True)
class Exchanged:
    """Exchanges of a plan: one fragment, and the exchange after the last step."""

    averager: str
    codec: str | None
    interval: int
    one: Way
    last: Way
    in_full: Way

    @classmethod
    def of(cls, question: Question, averager: str, codec: str | None, interval: int) -> Exchanged:
        last_bits = LAST_BITS_ONE_BY_ONE if question.one_by_one else LAST_BITS
        one = way(question, averager, BITS[codec], question.fragments)
        in_full = way(question, averager, (32, 32), question.fragments)
        every = interval / question.fragments
        is_first = question.first_in_full and not exchanges_before_last(question, every, codec)
        last = way(question, averager, (32, 32) if is_first else last_bits[codec], 1)
        return cls(averager, codec, interval, one, last, in_full)


def plan_with(
    question: Question, chosen: Sequence[Rented], how: Exchanged, startup_s: float
) -> Enumerated:
    """Return the plan of these machines and exchanges."""
    names = question.names
    every = how.interval / question.fragments
    steps_s = {name: each.step_s(question, every) for name, each in zip(names, chosen, strict=True)}
    trained_s, usd = trained(question, how, steps_s)
    shares = [each.lost_fraction for each in chosen]
    lost = min(0.9, sum(shares) if question.synchronous else max(shares))
    seconds = startup_s + trained_s / (1 - lost)
    is_rest = question.steps * question.fragments % how.interval > 0
    if ends_apart(question, how.codec) or (question.last == "rest" and is_rest):
        seconds += max(how.last.seconds.values())
        usd += sum(how.last.usd.values())
    hours = seconds / 3600
    usd += sum(cost(hours) for cost in standing(question))
    for each in chosen:
        usd += sum(n * question.usd_of_hours(r, age_h, hours) for r, age_h, n in each.machines)
    return Enumerated(seconds, usd, (how.averager, how.codec, how.interval, *chosen))


def ends_apart(question: Question, codec: str | None) -> bool:
    """Whether what is due at the last step is the last exchange: it is there, or pays a codec."""
    return question.last == "always" or codec is not None


def exchanges_before_last(question: Question, every: float, codec: str | None) -> int:
    """Return the number of exchanges without the last one."""
    steps, due = question.steps, 0
    while True:
        at = (due + 1) * every
        if at > steps + 1e-9 or (ends_apart(question, codec) and at > steps - 1e-9):
            return due
        due += 1


def every_plan(question: Question) -> Iterator[Enumerated]:
    """Yield all plans within the loss budget and the residency rules; limits are ignored."""
    plan, names = question.config["plan"], question.names
    codecs = plan["codecs"] if question.running is None else [question.running.codec]
    hows = [
        Exchanged.of(question, averager, codec, interval)
        for averager, codec in itertools.product(hosts(question), codecs)
        for interval in plan["intervals"]
        if loss_of(question, interval, codec) <= plan["loss_budget"]
    ]
    for chosen in itertools.product(*(list(rented(question, name)) for name in names)):
        for how in hows:
            yield plan_with(question, chosen, how, plan["startup_s"])


def going_on(question: Question, averager: str, interval: int) -> Enumerated:
    """Return the plan of a run that stays unchanged."""
    assert question.running is not None
    chosen = [
        next(each for each in rented(question, name) if each.goes_on) for name in question.names
    ]
    how = Exchanged.of(question, averager, question.running.codec, interval)
    return plan_with(question, chosen, how, 0.0)
