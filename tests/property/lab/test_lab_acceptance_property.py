"""The rule of acceptance against a judge that looks at every single packet.

Packets pass the relay's own mesh at times that hypothesis draws. The other judge knows only how
late each packet was taken and given, and the two delays of its link: it keeps lists instead of
counters and computes in whole nanoseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from hypothesis import assume, given
from hypothesis import strategies as st

from geo_ray.lab.mesh import Mesh, Station
from geo_ray.lab.plan import CapShape, LinkShape, prefixes_of
from geo_ray.lab.stats import LinkStats, LinkTimes, judge

MS_NS = 1_000_000


@dataclass
class Seen:
    """Lateness of each packet of a direction, in nanoseconds."""

    trip_ns: int
    taken_ns: list[int] = field(default_factory=list)
    given_ns: list[int] = field(default_factory=list)


def is_in_time(links: Sequence[Seen]) -> bool:
    """The second judge."""
    busy = [[seen] for seen in links if len(seen.taken_ns) >= 100]
    few = [seen for seen in links if len(seen.taken_ns) < 100]
    for group in [*busy, few]:
        mean = Fraction(0)
        for side in ("taken_ns", "given_ns"):
            packets = [(seen.trip_ns, ns) for seen in group for ns in getattr(seen, side)]
            late = [ns for trip_ns, ns in packets if ns > max(MS_NS, Fraction(trip_ns, 50))]
            if len(late) * 20 > len(packets):
                return False
            total = sum(
                ns / max(Fraction(MS_NS), Fraction(trip_ns, 100)) for trip_ns, ns in packets
            )
            mean += Fraction(total) / max(1, len(packets))
        assume(abs(mean - 1) > Fraction(1, 10**6))  # both answers are right to rounding
        if mean > 1:
            return False
    return True


delays_ms = st.integers(0, 200)
# off the bounds of whole milliseconds by half a microsecond, where rounding decides nothing
lateness_ns = st.one_of(st.just(0), st.integers(1001, 12_000).map(lambda us: us * 1000 + 500))
batches = st.lists(
    st.tuples(st.integers(1, 60), st.integers(0, 1), lateness_ns, lateness_ns), max_size=12
)


@given(delays_ms, delays_ms, batches)
def test_counters_give_the_same_verdict_as_all_packets(
    there_ms: int, back_ms: int, sent: list[tuple[int, int, int, int]]
) -> None:
    stations = [
        Station("AB"[index], prefixes_of(index), CapShape(), CapShape(), lambda packet: None)
        for index in range(2)
    ]
    shapes = {(0, 1): LinkShape(delay_s=there_ms / 1e3), (1, 0): LinkShape(delay_s=back_ms / 1e3)}
    mesh = Mesh(stations, {pair: (shape, 1) for pair, shape in shapes.items()})
    trip_ns = (there_ms + back_ms) * MS_NS
    seen = {pair: Seen(trip_ns) for pair in shapes}
    for number, (count, src, taken_ns, given_ns) in enumerate(sent):
        now_s = float(number)
        packet = bytes([0x45]) + bytes(15) + bytes([10, 2 - src, 0, 1])
        stations[src].accept([packet] * count, now_s, taken_ns * 1e-9)
        delay_s = (there_ms, back_ms)[src] / 1e3
        at_s = now_s + delay_s + given_ns * 1e-9 + 1e-12
        mesh.advance(lambda at_s=at_s: at_s)
        seen[src, 1 - src].taken_ns += [taken_ns] * count
        seen[src, 1 - src].given_ns += [given_ns] * count
    links = {
        str(pair): LinkStats(rate_mbps=None, delay_s=0.0, loss=0.0, **link.books(99.0)).times
        for pair, link in mesh.links.items()
    }
    assert judge(links).accepted is is_in_time(list(seen.values()))


counts = st.integers(0, 5000)


@st.composite
def link_times(draw: st.DrawFn) -> LinkTimes:
    """Possible counters: no more late packets than packets."""
    taken, given = draw(counts), draw(counts)
    return LinkTimes(
        draw(st.floats(0.0, 1.0)),
        taken, draw(st.integers(0, taken)), taken * draw(st.floats(0.0, 0.01)),
        given, draw(st.integers(0, given)), given * draw(st.floats(0.0, 0.01)),
    )  # fmt: skip


@given(st.lists(link_times(), max_size=4), st.data())
def test_more_lateness_never_makes_a_run_acceptable(
    links: list[LinkTimes], data: st.DataObject
) -> None:
    assume(links and not judge(dict(zip("abcd", links, strict=False))).accepted)
    which = data.draw(st.integers(0, len(links) - 1))
    link = links[which]
    links[which] = replace(
        link,
        given_late=data.draw(st.integers(link.given_late, link.given)),
        given_late_sum_s=link.given_late_sum_s * data.draw(st.floats(1.0, 10.0)),
    )
    assert not judge(dict(zip("abcd", links, strict=False))).accepted


@given(link_times(), st.integers(1, 10))
def test_a_longer_link_bears_more_and_bears_in_proportion(link: LinkTimes, factor: int) -> None:
    if judge({"a": link}).accepted:
        assert judge({"a": replace(link, round_trip_s=link.round_trip_s * factor)}).accepted
    long = replace(link, round_trip_s=0.1 + link.round_trip_s)  # beyond the bound of 1 ms
    scaled = replace(
        long,
        round_trip_s=long.round_trip_s * factor,
        taken_late_sum_s=long.taken_late_sum_s * factor,
        given_late_sum_s=long.given_late_sum_s * factor,
    )
    assume(abs(judge({"a": long}).mean_over_bound - 1) > 1e-9)
    assert judge({"a": scaled}).accepted is judge({"a": long}).accepted
