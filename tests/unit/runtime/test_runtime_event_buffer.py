"""The journal of one process: events in order, with the run's clock, taken once."""

from __future__ import annotations

import threading
import time

from geo_ray.telemetry.event_buffer import EventBuffer


def test_events_carry_region_and_time_and_come_in_order() -> None:
    event_buffer = EventBuffer("eu", time.time() - 100.0)
    event_buffer.add("step", step=1)
    event_buffer.add("step", step=2)
    first, second = event_buffer.take()
    assert first == {"kind": "step", "t_s": first["t_s"], "region": "eu", "step": 1}
    assert 100.0 <= first["t_s"] <= second["t_s"] <= event_buffer.now_s()


def test_events_are_taken_once_and_in_small_lots() -> None:
    event_buffer = EventBuffer("eu", time.time())
    for number in range(7):
        event_buffer.add("step", step=number)
    lots = [event_buffer.take(limit=3) for _ in range(4)]
    assert [[event["step"] for event in lot] for lot in lots] == [[0, 1, 2], [3, 4, 5], [6], []]


def test_no_event_is_lost_between_threads() -> None:
    event_buffer = EventBuffer("eu", time.time())
    taken: list[int] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            taken.extend(event["n"] for event in event_buffer.take(limit=10))

    reader = threading.Thread(target=read)
    reader.start()
    writers = [
        threading.Thread(
            target=lambda k=k: [event_buffer.add("x", n=k * 500 + i) for i in range(500)]
        )
        for k in range(4)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    done.set()
    reader.join()
    taken.extend(event["n"] for event in event_buffer.take(limit=10_000))
    assert sorted(taken) == list(range(2000))


def test_taken_events_are_repeated_to_the_next_reader() -> None:
    event_buffer = EventBuffer("eu", time.time())
    for number in range(5000):
        event_buffer.add("stats" if number == 2 else "step", n=number)
    while event_buffer.take():
        pass
    event_buffer.add("step", n=5000)
    event_buffer.recall()
    told = event_buffer.take(limit=10_000)
    assert [event["n"] for event in told] == [2, *range(3000, 5001)], "evaluations for longer"
    event_buffer.recall()
    assert len(event_buffer.take(limit=10_000)) == len(told) - 1, "no more than is kept"
