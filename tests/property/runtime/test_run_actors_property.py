"""Whatever drivers hear, write and do not come to write: every event is in the log once, in order.

The buffer and the recorder are the run's. The driver is a plain program that takes, writes some of
what it took, and dies; the next one lets what was taken be told again.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from geo_ray.runs.recorder import Recorder
from geo_ray.telemetry.event_buffer import EventBuffer
from geo_ray.telemetry.event_log import EventLog, read_events

TURNS = st.lists(
    st.tuples(
        st.integers(0, 40),  # events that happen
        st.integers(0, 30),  # how many are taken at most
        st.integers(0, 30),  # how many of these are written
        st.booleans(),  # whether the driver dies
    ),
    max_size=25,
)


def write(log: EventLog, path: Path, lot: list[dict[str, Any]]) -> None:
    recorder = Recorder(log, known=list(read_events(path)))
    for event in lot:
        told = dict(event)
        recorder.emit(told.pop("kind"), told.pop("t_s"), **told)


@settings(max_examples=60, deadline=None)
@given(TURNS)
def test_every_event_is_written_once_and_in_order(turns: list[tuple[int, int, int, bool]]) -> None:
    buffer, happened = EventBuffer("eu", time.time()), 0
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "events.jsonl"
        for new, taken, written, dies in turns:
            for _ in range(new):
                happened += 1
                buffer.add("step_refused", step=happened, cause="")
            with EventLog(path) as log:
                lot = buffer.take(taken)
                write(log, path, lot[:written] if dies else lot)
            if dies:
                buffer.recall()
        with EventLog(path) as log:
            while lot := buffer.take():
                write(log, path, lot)
        assert [event["step"] for event in read_events(path)] == list(range(1, happened + 1))
