"""Events of the server of a run that regions join: they name an address, and no region."""

from __future__ import annotations

import pytest

from geo_ray.telemetry.events import MEMBER_KINDS, conform
from geo_ray.telemetry.participation import Participation
from geo_ray.telemetry.totals import RunTotals
from geo_ray.telemetry.view import note_text

VALUES = {"address": "geo-ray://10.0.0.2:7448", "term": 2, "took_s": 0.5, "cause": "killed"}
FIELDS = {
    "server_replaced": ("address", "term", "took_s", "cause"),
    "server_standby_ready": ("address", "term"),
    "server_standby_lost": ("address", "cause"),
}


@pytest.mark.parametrize("kind", FIELDS)
def test_every_reader_takes_them(kind: str) -> None:
    event = conform(kind, 3.0, {name: VALUES[name] for name in FIELDS[kind]})
    RunTotals().feed(event)
    participation = Participation()
    if kind in MEMBER_KINDS:
        participation.feed(event)
        assert participation.marks == [(3.0, "the standby serves the run at " + VALUES["address"])]
    assert note_text(event).startswith(kind.replace("_", " ") + ": geo-ray://10.0.0.2:7448")
