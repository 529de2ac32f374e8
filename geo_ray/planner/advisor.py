"""Chooses strategy, interval and codec from measured steps and links, for `auto` and for plans.

Every candidate is a strategy family, an interval H and a codec. For each, the advisor predicts the
fraction of the regions' time spent computing, and the cost in loss (`geo_ray.planner.loss`). Of the
candidates within the loss budget it chooses the one that computes most; among those that compute
nearly as much, the one with the smallest loss.

Transfer time of a round: ``max over regions of (bytes up / goodput to the averager + bytes down /
goodput from it + round trip)``. Links are measured one at a time, so the prediction is optimistic
by up to the number of regions on the averager's link.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, Literal

from geo_ray.base.errors import ConfigError
from geo_ray.codecs.registry import CODECS, sections_of
from geo_ray.planner.loss import (
    BITS_PER_PARAM,
    LOSS_BY_CODEC,
    LOSS_OF_ASYNCHRONY,
    LOSS_OF_DELAY,
    loss_of_interval,
    outer_of,
)
from geo_ray.strategies.registry import STRATEGIES
from geo_ray.strategies.traits import Traits
from geo_ray.transport.links import LinkTable

Family = Literal["bsp", "diloco", "one_step_delay", "async_local_sgd"]
_FAMILIES: Final[tuple[Family, ...]] = ("diloco", "one_step_delay", "async_local_sgd")
_INTERVALS: Final = tuple(2**n for n in range(10))
_AS_GOOD: Final = 0.97  # relative to the best candidate; above it the smaller loss decides


@dataclass(frozen=True, slots=True)
class Situation:
    """Measurements for a choice.

    Attributes:
        num_params: parameters of the model.
        step_s: seconds of a local step by region.
        links: goodput and round trip to and from the averager's region.
        averager: region of the averager.
        loss_budget: acceptable loss relative to plain training.
        inner_momentum: whether the regions' optimizer has momentum.
        is_served: whether regions join or are groups. They exchange no gradients: `sma` with an
            interval of one step takes the place of `bsp`.
    """

    num_params: int
    step_s: Mapping[str, float]
    links: LinkTable
    averager: str
    loss_budget: float
    inner_momentum: bool = False
    is_served: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """A candidate and its prediction.

    Attributes:
        family: the strategy.
        interval: local steps between exchanges.
        codec: codec in both directions where possible; None: none.
        compute_fraction: fraction of the regions' time spent computing.
        transfer_s: seconds of one exchange.
        loss: relative loss against synchronous training without codecs.
    """

    family: Family
    interval: int
    codec: str | None
    compute_fraction: float
    transfer_s: float
    loss: float


def advise(situation: Situation, vetoed: Collection[tuple[Family, int]] = ()) -> Choice:
    """Return the best candidate.

    Args:
        situation: the measurements.
        vetoed: excluded pairs of family and interval.

    Raises:
        ConfigError: there is only one region.
        LinkUnknownError: a link was not measured.
    """
    if len(situation.step_s) < 2:
        raise ConfigError(
            "strategy auto: a single region needs no synchronization",
            fix="Set `strategy: {kind: bsp}`.",
        )
    found = [c for c in candidates(situation) if (c.family, c.interval) not in vetoed]
    affordable = [c for c in found if c.loss <= situation.loss_budget] or [
        min(found, key=attrgetter("loss"))
    ]
    most = max(choice.compute_fraction for choice in affordable)
    good = [choice for choice in affordable if choice.compute_fraction >= _AS_GOOD * most]
    return min(good, key=_cost)


def _cost(choice: Choice) -> tuple[float, float, int]:
    return choice.loss, -choice.compute_fraction, choice.interval


def candidates(situation: Situation) -> Iterator[Choice]:
    """Return every combination of family, interval and codec."""
    for codec in BITS_PER_PARAM:
        transfer_s = transfer_time_s(situation, codec)
        for steps in _INTERVALS:
            for family in ("bsp",) if steps == 1 else _FAMILIES:
                traits = STRATEGIES[family]().traits
                waits_for_all = traits.in_rounds and traits.exchange.blocking == "always"
                if not (waits_for_all or _suits_answers(codec)):
                    continue
                loss = loss_of_interval(steps) + LOSS_BY_CODEC[codec] + _loss_of(traits)
                fraction = _compute_fraction(situation, traits, steps, transfer_s)
                yield Choice(family, steps, codec, fraction, transfer_s, loss)


def _compute_fraction(situation: Situation, traits: Traits, steps: int, transfer_s: float) -> float:
    """Return the fraction of the regions' time spent computing, for an interval."""
    slowest_s = max(situation.step_s.values())
    rate = sum(1 / step_s for step_s in situation.step_s.values())
    if not traits.in_rounds:
        return sum(steps / (steps * s + transfer_s) for s in situation.step_s.values()) / rate
    evenness = len(situation.step_s) / slowest_s / rate  # rounds wait for the slowest
    if traits.exchange.blocking == "always":
        return evenness * steps * slowest_s / (steps * slowest_s + transfer_s)
    return evenness * min(1.0, steps * slowest_s / transfer_s)


def _loss_of(traits: Traits) -> float:
    """Return the loss caused by how the strategy merges updates."""
    if not traits.in_rounds:
        return LOSS_OF_ASYNCHRONY
    return 0.0 if traits.exchange.blocking == "always" else LOSS_OF_DELAY


def _suits_answers(codec: str | None) -> bool:
    return codec is None or CODECS[codec]().traits.suits_answers


def transfer_time_s(situation: Situation, codec: str | None) -> float:
    """Return the seconds of one exchange of the slowest region."""
    up, down = BITS_PER_PARAM[codec]
    averager, links = situation.averager, situation.links
    times_s = []
    for region in situation.step_s:
        if region == averager:
            continue
        there, back = links.get(region, averager), links.get(averager, region)
        mbit = situation.num_params * 1e-6
        sent_s = mbit * up / max(there.goodput_mbps, 1e-9)
        times_s.append(sent_s + mbit * down / max(back.goodput_mbps, 1e-9) + there.rtt_s)
    return max(times_s)


def sections(choice: Choice, situation: Situation) -> dict[str, dict[str, object]]:
    """Return the configuration sections of a choice."""
    kind = _kind(choice, situation)
    plainest = STRATEGIES[kind]()
    strategy: dict[str, object] = {"kind": kind}
    if plainest.traits.exchange.interval is not None:
        strategy["interval"] = choice.interval
    if _follows_link(choice.family):
        strategy["compute_fraction"] = min(0.95, max(0.5, round(choice.compute_fraction, 2)))
    if hasattr(plainest, "merge"):
        strategy["merge"] = "correct"
    momentum = situation.inner_momentum
    outer = outer_of(plainest.traits, choice.interval, inner_momentum=momentum)
    if outer is not None:
        strategy["outer"] = dict(outer)
    return {"strategy": strategy, "codec": {**sections_of(choice.codec)}}


def _kind(choice: Choice, situation: Situation) -> str:
    return "sma" if choice.family == "bsp" and situation.is_served else choice.family


def _follows_link(family: Family) -> bool:
    return hasattr(STRATEGIES[family](), "compute_fraction")


def explain(choice: Choice, situation: Situation) -> str:
    """Explain a choice in one paragraph, with the numbers."""
    plain_s = transfer_time_s(situation, None)
    slowest_s, fastest_s = max(situation.step_s.values()), min(situation.step_s.values())
    codec = f"codec {choice.codec}" if choice.codec else "no codec"
    text = (
        f"A step takes {fastest_s:.3g} to {slowest_s:.3g} s and the model has "
        f"{4e-6 * situation.num_params:.3g} MB: one exchange as fp32 takes {plain_s:.3g} s on the "
        f"slowest link. With {codec} it takes {choice.transfer_s:.3g} s. "
        f"{_kind(choice, situation)} with {choice.interval} steps per exchange is predicted to "
        f"spend {choice.compute_fraction:.0%} of the regions' time computing, at {choice.loss:.1%} "
        f"of loss where {situation.loss_budget:.1%} is allowed."
    )
    if not STRATEGIES[choice.family]().traits.in_rounds:
        text += (
            f" Regions do not wait for each other, since the slowest takes "
            f"{slowest_s / fastest_s:.1f} times as long as the fastest."
        )
    if _follows_link(choice.family):
        text += " The interval adapts to the link while training."
    return text
