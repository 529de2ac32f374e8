"""FedAvg, FedAT and FedGSync know how large and how fast sites are."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from geo_ray.strategies.fedat import FedAt
from geo_ray.strategies.fedavg import FedAvg
from geo_ray.strategies.fedgsync import FedGSync, matched
from geo_ray.strategies.global_model import site_fractions
from geo_ray.strategies.state import AveragerState, Reply, Update


class Sites:
    """Sites that speak by hand; each remembers the newest version that it was told."""

    def __init__(self, rule: FedAvg | FedAt | FedGSync, names: str, **state: object) -> None:
        self.rule = rule
        self.state = AveragerState(tuple(names), **state)  # type: ignore[arg-type]
        self._seq, self.version = dict.fromkeys(names, 0), dict.fromkeys(names, 0)

    def say(
        self,
        name: str,
        payload_P: Tensor | None = None,
        step_s: float = 1.0,
        exchange_s: float = 1.0,
        rows: int = 8,
    ) -> list[Reply]:
        """One update; its answers."""
        self._seq[name] += 1
        update = Update(
            name,
            torch.ones(4) if payload_P is None else payload_P,
            rows,
            self.state.version - self.version[name],
            steps=self.rule.interval,
            step_s=step_s,
            # The exchange before this one: there was none before the first.
            exchange_s=exchange_s if self._seq[name] > 1 else 0.0,
        )
        replies = self.rule.on_update(self.state, update)
        for reply in replies:
            self.version[reply.to] = self.state.version
        return replies

    def tiers(self) -> dict[str, float] | None:
        numbers = self.state.numbers
        return (
            {n: numbers[f"tier/{n}"] for n in self.state.members} if "tiered" in numbers else None
        )


# ------------------------------------------------------------------ sizes of data sets


@pytest.mark.parametrize(("weights", "first"), [("data", 0.1), ("samples", 0.75), ("uniform", 0.5)])
def test_fedavg_weighs_sites_by_the_rows_that_they_stand_for(weights: str, first: float) -> None:
    sites = Sites(FedAvg(weights=weights), "ab", data_rows={"a": 100.0, "b": 900.0})  # type: ignore[arg-type]
    assert sites.say("a", torch.tensor([1.0, 0.0]), rows=24) == []
    replies = sites.say("b", torch.tensor([0.0, 1.0]), rows=8)
    for reply in replies:
        assert reply.payload_P.tolist() == pytest.approx([first, 1 - first])
    assert FedAvg().weights == FedAt().weights == "data"


def test_the_rows_of_a_round_stand_in_where_nobody_knows_the_data() -> None:
    updates = [Update(name, torch.ones(1), rows) for name, rows in (("a", 6), ("b", 2))]
    for known in ({}, {"a": 5.0}):
        assert site_fractions(AveragerState(("a", "b"), data_rows=known), updates, "data") == [
            0.75,
            0.25,
        ]


def test_groups_count_by_their_data_and_not_by_what_their_sites_saw_of_late() -> None:
    rows: Mapping[str, float] = {"a": 10.0, "b": 10.0, "c": 490.0, "d": 490.0}
    sites = Sites(FedGSync(regroup_every=99), "abcd", data_rows=rows)
    left, right = torch.eye(4)[0], torch.eye(4)[1]
    sites.say("a", left, rows=999)
    sites.say("b", left)
    sites.say("c", right)
    replies = sites.say("d", right)
    assert sites.state.numbers["group/a"] != sites.state.numbers["group/c"]
    assert replies[0].payload_P.tolist() == pytest.approx([0.02, 0.98, 0.0, 0.0])


# ------------------------------------------------------------------ tiers


def test_tiers_are_made_when_every_site_has_reported_a_whole_round_with_its_exchange() -> None:
    """b computes fast behind a slow link; nobody can know that before its second report."""
    sites = Sites(FedAt(interval=2, tiers=2), "abcd")
    took_s = {"a": (1.0, 1.0), "b": (1.0, 60.0), "c": (9.0, 1.0), "d": (1.0, 2.0)}
    for rnd in range(2):
        for name in "abc":
            assert sites.say(name, None, *took_s[name]) == [], "one tier waits for everybody"
        assert {r.to for r in sites.say("d", None, *took_s["d"])} == set("abcd")
        assert (sites.tiers() is None) == (rnd == 0)
    assert sites.tiers() == {"a": 0.0, "d": 0.0, "c": 1.0, "b": 1.0}
    sites.say("a", None, *took_s["a"])
    assert {reply.to for reply in sites.say("d", None, *took_s["d"])} == {"a", "d"}


def test_whoever_is_released_early_makes_no_tiers_of_sites_that_nobody_heard_of() -> None:
    sites = Sites(FedAt(interval=2, tiers=2), "ab")
    sites.say("b", None, 1.0, 1.0)
    (reply,) = sites.rule.on_release(sites.state)
    assert reply.to == "b" and sites.tiers() is None
    for _ in range(2):
        sites.say("b", None, 1.0, 1.0)
        sites.say("a", None, 50.0, 1.0)
    assert sites.tiers() == {"b": 0.0, "a": 1.0}, "the slow one that came late is not the fastest"


def test_the_mean_while_there_is_one_tier_is_nobodys_when_tiers_begin() -> None:
    sites = Sites(FedAt(interval=2, tiers=2, weights="uniform"), "ab")
    for _ in range(2):
        sites.say("a", torch.full((4,), 1.0), 1.0)
        replies = sites.say("b", torch.full((4,), 3.0), 5.0)
    assert [sites.state.numbers[f"count{m}"] for m in (0, 1)] == [1.0, 1.0]
    # Round one moved both by 2. Then a stands at 3 and b at 5, one round each: the mean is 4.
    assert replies[-1].payload_P.tolist() == pytest.approx([2.0] * 4)
    assert sites.state.memory["moved0"].tolist() == pytest.approx([4.0] * 4)


def started(tiers: int = 2, retier_at: float = 0.25) -> Sites:
    """a and b in the fast tier, c and d in the slow one."""
    sites = Sites(FedAt(interval=2, tiers=tiers, retier_at=retier_at), "abcd")
    for _ in range(2):
        for name, step_s in zip("abcd", (1.0, 1.1, 5.0, 6.0), strict=True):
            sites.say(name, None, step_s)
    assert sites.tiers() == {"a": 0.0, "b": 0.0, "c": 1.0, "d": 1.0}
    return sites


def test_sites_are_sorted_again_when_times_have_moved_for_good() -> None:
    sites = started()
    for times in (1, 2, 3):
        sites.say("a", None, 30.0)
        sites.say("b", None, 1.1)
        assert (sites.tiers() == {"a": 0.0, "b": 0.0, "c": 1.0, "d": 1.0}) == (times < 3)
    assert sites.tiers() == {"b": 0.0, "c": 0.0, "d": 1.0, "a": 1.0}


def test_one_late_packet_and_small_changes_sort_nobody() -> None:
    sites = started()
    for rnd in range(40):
        late_s = 30.0 if rnd % 3 == 0 else 1.0
        sites.say("a", None, late_s * (1.1 if rnd % 2 else 0.95))
        sites.say("b", None, 1.1 * 1.15)
    assert sites.tiers() == {"a": 0.0, "b": 0.0, "c": 1.0, "d": 1.0}
    moved = [sites.state.numbers[f"sorted_s/{name}"] for name in "ab"]
    assert moved == [3.0, 3.2], "they stand as they were sorted"


def test_a_tier_that_is_whole_after_sorting_is_not_left_waiting() -> None:
    """a waits for b, which has become slow; the other tier's sorting sets it free."""
    sites = started()
    assert sites.say("a", None, 1.0) == []
    numbers = sites.state.numbers
    numbers["moved/b"], numbers["round_s/b"] = 3.0, 90.0  # as if b had just reported so
    replies = sites.say("c", None, 5.0)
    assert sites.tiers() == {"a": 0.0, "c": 0.0, "d": 1.0, "b": 1.0}
    assert {reply.to for reply in replies} == {"a", "c"}


# ------------------------------------------------------------------ groups


def directions(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(600, generator=generator) for _ in range(2)]


def grouped(sites: Sites) -> list[set[str]]:
    found: dict[float, set[str]] = {}
    for name in sites.state.members:
        found.setdefault(sites.state.numbers[f"group/{name}"], set()).add(name)
    return [found[number] for number in sorted(found)]


def test_groups_are_made_again_and_keep_their_numbers() -> None:
    """f's data change from one kind to the other."""
    x_P, y_P = directions()
    kinds = dict.fromkeys("abc", x_P) | dict.fromkeys("def", y_P)
    noise = torch.Generator().manual_seed(5)

    def speak(sites: Sites, name: str) -> None:
        sites.say(name, kinds[name] + 0.3 * torch.randn(600, generator=noise))

    sites = Sites(FedGSync(regroup_every=4), "abcdef")
    for name in "abcdef":
        speak(sites, name)
    assert grouped(sites) == [set("abc"), set("def")]
    kinds["f"] = x_P
    while sites.state.version < 4:
        speak(sites, "a")
        speak(sites, "d")
    for name in "badecf":  # nobody is waited for: rounds close meanwhile
        speak(sites, name)
    speak(sites, "d")
    speak(sites, "a")
    assert grouped(sites) == [set("abcf"), set("de")]
    assert not [key for key in sites.state.memory if key.startswith("sketch/")]


def test_matching_keeps_as_many_sites_where_they_were_as_can_be() -> None:
    assert matched([0, 0, 1, 1, 2], [2, 2, 0, 0, 1]) == [0, 0, 1, 1, 2]
    assert matched([0, 0, 0, 1, 1], [0, 1, 1, 2, 2]) == [2, 0, 0, 1, 1]
    assert matched([3, 3, 5, 5], [0, 0, 0, 0]) in ([3] * 4, [5] * 4)
    assert matched([0, 0, 0], [0, 1, 2])[0:1] and len(set(matched([0, 0, 0], [0, 1, 2]))) == 3


@pytest.mark.parametrize("lag", [1, 3, 10])
def test_a_site_that_is_slower_by_any_number_of_rounds_contributes(lag: int) -> None:
    sites = Sites(FedGSync(), "abc")
    ones, other = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    for name in "abc":
        sites.say(name, torch.zeros(2))
    for _ in range(lag):
        sites.say("a", ones)
    before_P = sites.state.memory["moved0"].clone()
    sites.say("c", other)
    # It closes a round by itself, with the weight of its age.
    moved = (sites.state.memory["moved0"] - before_P).tolist()
    assert moved == pytest.approx([0.0, 1 / (1 + lag)])
    strict = Sites(FedGSync(max_lag=2), "abc")
    for name in "abc" + "a" * 3:
        strict.say(name, torch.zeros(2))
    strict.say("c", other)
    assert strict.state.memory["moved0"].tolist() == [0.0, 0.0]


def test_who_is_late_neither_drowns_nor_shrinks_who_is_in_time() -> None:
    sites = Sites(FedGSync(quorum=0.6), "abc")
    for name in "abc":
        sites.say(name, torch.zeros(2))
    for _ in range(3):
        for name in "ab":
            sites.say(name, torch.zeros(2))
    sites.say("a", torch.tensor([1.0, 0.0]))
    replies = sites.say("c", torch.tensor([0.0, 1.0]))  # three rounds late: weighs a quarter
    fresh = next(reply for reply in replies if reply.to == "a")
    assert fresh.payload_P.tolist() == pytest.approx([0.8, 0.2])
