"""The model of docs/planning.md ("The model, exactly") by plain enumeration.

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


@dataclass(frozen=True)
class Enumerated:
    """A plan: time, money and what it is."""

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
        stands_still: whether the strategy's regions stand still for each exchange (always), only
            for one that is late (when_late), or never.
        last: whether there is an exchange after the last step: always, or for a rest of steps.
        fragments: parts of the model that are exchanged one by one.
        hidden_steps: steps that hide an exchange (when_late); None: those until the next.
        bounded: whether regions may be only so many exchanges ahead of the slowest (never).
        together: whether a region that stands still holds up all of them.
        one_by_one: whether regions are answered one by one, and not in rounds.
    """

    config: Mapping[str, Any]
    prices: Sequence[Mapping[str, Any]]
    rates: Sequence[Mapping[str, Any]]
    links: Mapping[tuple[str, str], tuple[float, float]]
    num_params: int
    stands_still: str = "always"
    last: str = "rest"
    fragments: int = 1
    hidden_steps: float | None = None
    bounded: bool = False
    together: bool = True
    one_by_one: bool = False

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

    def usd_of_hours(self, record: Mapping[str, Any], hours: float) -> float:
        billed, begin, factor = 0.0, 0.0, 1.0
        for tier in record.get("age_tiers", []):
            if hours <= tier["after_h"]:
                break
            billed += factor * (tier["after_h"] - begin)
            begin, factor = tier["after_h"], tier["factor"]
        return self.in_usd(record) * (billed + factor * (hours - begin))

    def usd_per_gb(self, src: str, dst: str) -> float:
        here, there = (self.config["plan"]["regions"][name] for name in (src, dst))
        if here["cloud"] != there["cloud"]:
            return self.in_usd(self.price(here, item="egress", to="internet"))
        own = [r for r in self.prices if r.get("to") == there["at"] and r["region"] == here["at"]]
        record = own[0] if own else self.price(here, item="egress", to="*")
        return self.in_usd(record) / (324 if record["unit"] == "Mbps-month" else 1)


_DEFAULT = {"item": "instance", "market": "on_demand"}


@dataclass(frozen=True)
class Rented:
    """Machines of a region: how long a step takes, and (record, how many)."""

    step_s: float
    machines: tuple[tuple[Mapping[str, Any], int], ...]
    lost_share: float


def step_of(rows: int, speeds: Sequence[float]) -> float:
    """The last machine's seconds if whole rows, one at least on each, are shared out best."""
    ends_s = sorted({k / speed for speed in speeds for k in range(1, rows + 1)})
    for end_s in ends_s:
        done = [math.floor(end_s * speed * (1 + 1e-9)) for speed in speeds]
        if min(done) >= 1 and sum(done) >= rows:
            return end_s
    raise AssertionError("one machine can do all rows")


def rented(question: Question, name: str) -> Iterator[Rented]:
    """Every choice of machines of a region."""
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
            kinds.append((record, speed, 0 if record.get("stock") == "none" else machine["cap"]))
    for counts in itertools.product(*(range(cap + 1) for _, _, cap in kinds)):
        number = sum(counts)
        if not 1 <= number <= rows:
            continue
        speeds = [s for (_, s, _), n in zip(kinds, counts, strict=True) for _ in range(n)]
        step_s = step_of(rows, speeds) + plan["step_overhead_s"]
        step_s += plan["lan_s_per_machine"] * number
        chosen = tuple((r, n) for (r, _, _), n in zip(kinds, counts, strict=True) if n)
        yield Rented(step_s, chosen, lost * sum(n for r, n in chosen if r["market"] == "spot"))


def loss_of(question: Question, interval: int, codec: str | None) -> float:
    loss = LOSS[codec] + (0.0 if question.stands_still == "always" else LOSS_OF_DELAY)
    for (low, less), (high, more) in itertools.pairwise(LOSS_OF_INTERVAL):
        if low <= interval <= high:
            share = math.log(interval / low) / math.log(high / low)
            return loss + less + share * (more - less)
    return loss + LOSS_OF_INTERVAL[-1][1] * math.log(interval) / math.log(500)


def hosts(question: Question) -> list[str]:
    rules = question.config["plan"].get("residency", {})
    allowed = question.names
    for kind in ("gradients", "checkpoints"):
        for places in rules.get(kind, {}).values():
            allowed = [name for name in allowed if name in places]
    return allowed


@dataclass(frozen=True)
class Way:
    """A way to exchange: seconds and egress of one, by region."""

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
    question: Question, interval: int, one: Way, steps_s: Mapping[str, float]
) -> tuple[float, float]:
    """Seconds from the first step to the end of the last, and the egress of exchanges on the way.

    Args:
        question: what a user gives.
        interval: steps in which the whole model is exchanged once.
        one: exchange of a fragment.
        steps_s: of a step, by region.
    """
    steps, every = question.config["train"]["steps"], interval / question.fragments
    rounds = math.floor(steps / every + 1e-9)
    ends_s, counts = {}, {}
    for name, step_s in steps_s.items():
        one_s = one.seconds[name]
        counts[name] = rounds
        if question.stands_still == "always":
            late_s = rounds * one_s
        elif question.stands_still == "when_late":
            hides = every if question.hidden_steps is None else question.hidden_steps
            since = min(hides, steps - rounds * every)
            late_s = (rounds - 1) * max(0.0, one_s - hides * step_s)
            late_s = late_s + max(0.0, one_s - since * step_s) if rounds else 0.0
        else:
            apart = max(every, math.ceil(one_s / step_s - 1e-9))
            counts[name] = 1 + math.floor((steps - every) / apart + 1e-9) if rounds else 0
            since = steps - every - (counts[name] - 1) * apart
            late_s = max(0.0, one_s - since * step_s) if rounds else 0.0
        ends_s[name] = steps * step_s + late_s
    if question.stands_still == "never" and question.bounded:
        apart_s = {
            name: step_s * max(every, math.ceil(one.seconds[name] / step_s - 1e-9))
            for name, step_s in steps_s.items()
        }
        longest_s = steps * max(steps_s.values())
        counts = dict.fromkeys(steps_s, math.floor(longest_s / max(apart_s.values()) + 1e-9))
    return max(ends_s.values()), sum(counts[name] * one.usd[name] for name in steps_s)


def every_plan(question: Question) -> Iterator[Enumerated]:
    """All plans that keep the loss budget and the residency; limits are not looked at."""
    plan, names = question.config["plan"], question.names
    steps = question.config["train"]["steps"]
    stands: list[Callable[[float], float]] = []  # dollars for so many hours
    for name in names:
        place = plan["regions"][name]
        if place.get("server"):
            record = question.price(
                place, item="instance", type=place["server"], market="on_demand"
            )
            stands.append(partial(question.usd_of_hours, record))
        if place.get("disk"):
            month = question.in_usd(question.price(place, item="disk", type=place["disk"]))
            stands.append(partial(operator.mul, month * place["disk_gb"] / 730))
    ways = []
    for averager, codec in itertools.product(hosts(question), plan["codecs"]):
        one = way(question, averager, BITS[codec], question.fragments)
        last_bits = LAST_BITS_ONE_BY_ONE if question.one_by_one else LAST_BITS
        exact = way(question, averager, last_bits[codec], 1)
        for interval in plan["intervals"]:
            if loss_of(question, interval, codec) <= plan["loss_budget"]:
                ways.append((averager, codec, interval, one, exact))
    for chosen in itertools.product(*(list(rented(question, name)) for name in names)):
        for averager, codec, interval, one, exact in ways:
            steps_s = {name: each.step_s for name, each in zip(names, chosen, strict=True)}
            trained_s, usd = trained(question, interval, one, steps_s)
            shares = [each.lost_share for each in chosen]
            lost = min(0.9, sum(shares) if question.together else max(shares))
            seconds = plan["startup_s"] + trained_s / (1 - lost)
            is_rest = steps * question.fragments % interval > 0
            if question.last == "always" or (question.last == "rest" and is_rest):
                seconds += max(exact.seconds.values())
                usd += sum(exact.usd.values())
            hours = seconds / 3600
            usd += sum(cost(hours) for cost in stands)
            for each in chosen:
                usd += sum(n * question.usd_of_hours(record, hours) for record, n in each.machines)
            yield Enumerated(seconds, usd, (averager, codec, interval, *chosen))
