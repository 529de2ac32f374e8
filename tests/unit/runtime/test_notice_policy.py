"""Which regions leave for a notice, held against the rule as it is documented, by itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from geo_ray.runtime.regions import AT_ONCE_S, leave_on_notice

NAMES = ("a", "b", "c", "d")
some = st.sets(st.sampled_from(NAMES))


def test_a_region_is_asked_to_leave_at_once_and_given_up_before_its_machine_goes() -> None:
    assert leave_on_notice({"b": 120.0}, NAMES, (), ()) == {"b": "leave"}
    assert leave_on_notice({"b": AT_ONCE_S + 0.1}, NAMES, ("b",), ()) == {}
    assert leave_on_notice({"b": AT_ONCE_S}, NAMES, ("b",), ()) == {"b": "lose"}
    assert leave_on_notice({"b": -5.0}, NAMES, (), ()) == {"b": "leave"}  # a border may be near


def test_one_region_stays_if_all_have_notices_and_so_do_needed_ones() -> None:
    left_s = {"a": 30.0, "b": 20.0, "c": 20.0}
    assert leave_on_notice(left_s, ("a", "b", "c"), (), ()) == {"b": "leave", "c": "leave"}
    assert leave_on_notice(left_s, ("a", "b", "c"), (), ("b",)) == {"c": "leave", "a": "leave"}
    assert leave_on_notice({"b": 0.0}, ("a", "b"), ("b",), ("b",)) == {}
    assert leave_on_notice({"gone": 9.0}, ("a", "b"), (), ()) == {}


@given(st.dictionaries(st.sampled_from(NAMES), st.floats(-10, 200)), some, some, some)
def test_any_notices_are_heeded_by_the_rule(
    left_s: dict[str, float], members: set[str], asked: set[str], needed: set[str]
) -> None:
    leaving = asked & members
    answers = leave_on_notice(left_s, sorted(members), leaving, needed)
    lost = {name for name, answer in answers.items() if answer == "lose"}
    assert lost == {n for n in (leaving - needed) & set(left_s) if left_s[n] <= AT_ONCE_S}
    sent = set(answers) - lost
    may = (members & set(left_s)) - leaving - needed
    assert sent <= may
    stay = len(members - leaving)
    assert len(sent) == min(len(may), max(0, stay - 1))
    assert all(left_s[a] <= left_s[b] for a in sent for b in may - sent)
