"""Progress: what is shown on a terminal and elsewhere, and how often."""

from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console

from geo_ray.base.clock import VirtualClock
from geo_ray.telemetry.events import Event
from geo_ray.telemetry.progress import Progress
from tests.support.observe_support import (
    REGIONS,
    Row,
    evaluation,
    events,
    noise,
    small_run,
    started,
    step,
    wan,
)

JOINED = {"view": 3, "round": 1120, "step": 4480, "bytes": 38_000_000, "took_s": 4.12}


def plain_lines(rows: list[Row], clock: VirtualClock, *, total: int = 4) -> list[str]:
    stream = io.StringIO()
    with Progress(total, REGIONS, Console(file=stream, width=200), clock=clock) as progress:
        for event in events(rows):
            clock.advance_to_s(max(clock.now_s(), event.t_s))
            progress.feed(event)
    return stream.getvalue().splitlines()


def shown(progress: Progress, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(progress.render())
    return console.export_text()


def quiet(total: int = 10, clock: VirtualClock | None = None, width: int = 100) -> Progress:
    console = Console(file=io.StringIO(), width=width)
    return Progress(total, REGIONS, console, plain=True, clock=clock or VirtualClock())


def test_plain_lines_come_at_most_every_two_seconds() -> None:
    rows = [started()] + [step("east", n, n / 10, compute_s=0.1) for n in range(1, 101)]
    lines = plain_lines(rows, VirtualClock(), total=100)
    assert [line.split()[0] for line in lines] == ["2", "4", "6", "8", "10"]
    assert "east 20/100 newest loss 0.1" in lines[0]
    assert "about 8 s left" not in lines[0]  # the other region has not begun


def test_the_last_state_is_printed_at_the_end() -> None:
    lines = plain_lines([started(), step("east", 1, 0.5)], VirtualClock())
    assert len(lines) == 1
    assert "east 1/4 newest loss 2 | west 0/4 newest loss -" in lines[0]


def test_a_progress_that_was_never_fed_prints_nothing() -> None:
    assert plain_lines([], VirtualClock()) == []


def test_one_worker_takes_part_and_two_take_part() -> None:
    teams: list[Row] = [
        (
            "active_workers",
            1.0 + workers,
            {"region": "eu", "step": 1, "workers": workers, "rows": rows},
        )
        for workers, rows in ((1, 1), (2, 16))
    ]
    lines = plain_lines([started(), *teams], VirtualClock())
    told = [line for line in lines if line.startswith("workers of")]
    assert told == [
        "workers of eu after step 1: 1 takes part, 1 row per step",
        "workers of eu after step 1: 2 take part, 16 rows per step",
    ]


def test_a_resumed_run_shows_the_step_that_it_continues_from() -> None:
    """Not 0, although the processes of the terminal that resumes it have seen no step."""
    progress = quiet(120, width=200)
    kind, t_s, fields = started()
    progress.feed(*events([(kind, t_s, {**fields, "resumed_step": 40})]))
    assert all("40/120" in row and "starting" in row for row in shown(progress).splitlines()[1:3])
    progress.feed(*events([step("east", 41, 1.0)]))
    east, west = shown(progress).splitlines()[1:3]
    assert "41/120" in east and "starting" not in east
    assert "40/120" in west and "starting" in west


def test_each_kind_of_state_change_is_told_in_its_own_words() -> None:
    rows: list[Row] = [
        ("state_changed", 1.0, {"region": "east", "step": 5, "how": how, "names": f"'{how}'"})
        for how in ("changed", "unfrozen", "frozen", "a kind of a newer release")
    ]
    told = [line for line in plain_lines([started(), *rows], VirtualClock()) if "step 5" in line]
    starts = ["undeclared state changes", "unfrozen but not trained"]
    starts += ["frozen but still trained", "undeclared state changes"]
    assert [line.split(":")[0] for line in told] == starts


def test_status_lines_and_faults_are_printed_once_each() -> None:
    stream = io.StringIO()
    progress = Progress(4, REGIONS, Console(file=stream, width=60), plain=True)
    progress.status("starting cluster: 2 of 4 nodes")
    progress.status("starting cluster: 2 of 4 nodes")
    progress.status("placing [workers]")
    rows: list[Row] = [
        started(),
        ("worker_lost", 1.0, {"region": "east", "worker": 1, "cause": "signal 9 [oom]"}),
        ("worker_replaced", 2.0, {"region": "east", "worker": 1, "attempt": 2}),
        *[("step_refused", 3.0, {"region": "west", "step": n, "cause": "x"}) for n in range(9)],
        ("bridge_replaced", 3.0, {"region": "west", "cause": "signal 9", "took_s": 2.5}),
        ("run_actor_attached", 3.0, {"token": 2, "downtime_s": 4.25}),
        ("region_joined", 3.0, {"region": "west", **JOINED}),
        ("checkpoint", 3.0, {"id": "0001", "step": 4, "bytes": 9}),
        noise(None, 3, 1.0, 2.0, 64),
        ("stop_requested", 4.0, {"cause": "ctrl-c"}),
    ]
    for event in events(rows):
        progress.feed(event)
    lines = stream.getvalue().splitlines()
    assert lines[:2] == ["starting cluster: 2 of 4 nodes", "placing [workers]"]
    assert lines[2] == "worker lost: east worker 1: signal 9 [oom]"
    assert lines[3] == "worker replaced: east worker 1, attempt 2"
    assert len([line for line in lines if line.startswith("step refused")]) == 3
    assert lines[-5] == "bridge replaced: west after 2.5 s: signal 9"
    assert lines[-4] == "run actor attached after 4.2 s without one"
    assert lines[-3] == "west joined at round 1,120, 38 MB, 4.1 s"
    assert lines[-2:] == ["checkpoint 0001 at step 4", "stopping: ctrl-c"]


def test_who_leaves_where_the_averager_goes_and_who_stands_by_is_told() -> None:
    stream = io.StringIO()
    progress = Progress(4, REGIONS, Console(file=stream, width=200), plain=True)
    rows: list[Row] = [
        ("averager_moved", 1.0, {"region": "west", "term": 2}),
        ("standby_ready", 2.0, {"region": "west", "name": "east", "term": 2}),
        ("region_drained", 3.0, {"region": "east", "cause": "asked"}),
        ("region_drained", 3.5, {"region": "west", "cause": "notice"}),
        ("run_resumed", 4.0, {}),
    ]
    for event in events(rows):
        progress.feed(event)
    assert stream.getvalue().splitlines() == [
        "the averager moved to west",
        "east is the averager's standby",
        "east has left",
        "west has left: its machine will be terminated; it will rejoin",
        "going on",
    ]


def test_the_loss_of_a_server_is_told_before_its_replacement() -> None:
    stream = io.StringIO()
    progress = Progress(4, REGIONS, Console(file=stream, width=200), plain=True)
    rows: list[Row] = [
        (
            "server_replaced",
            1.0,
            {"address": "geo-ray://b:1", "term": 2, "took_s": 0.5, "cause": "signal 9"},
        ),
        ("server_standby_ready", 2.0, {"address": "a:1", "term": 2}),
        ("server_standby_lost", 3.0, {"address": "a:1", "cause": "signal 15"}),
    ]
    for event in events(rows):
        progress.feed(event)
    assert stream.getvalue().splitlines() == [
        "the server is lost: signal 9",
        "the standby serves the run at geo-ray://b:1",
        "a standby is ready at a:1",
        "the standby is lost: signal 15",
    ]


def test_a_region_that_joined_in_a_run_of_an_older_release_is_shown_without_its_round() -> None:
    stream = io.StringIO()
    told = {name: JOINED[name] for name in ("view", "bytes", "took_s")}
    progress = Progress(4, REGIONS, Console(file=stream, width=200), plain=True)
    progress.feed(Event("region_joined", 3.0, {"region": "west", **told}))
    assert stream.getvalue().splitlines() == ["west joined, 38 MB, 4.1 s"]


def test_a_wait_says_how_many_are_ready_who_is_awaited_and_how_long() -> None:
    clock = VirtualClock()
    progress = quiet(clock=clock)
    progress.status("starting workers, parameter servers and bridges")
    assert shown(progress).strip().endswith("starting workers, parameter servers and bridges")
    progress.awaiting("starting workers", 0, 10, [f"eu-west/{n}" for n in range(10)])
    clock.sleep_s(12.0)
    progress.awaiting("starting workers", 8, 10, ["eu-west/1", "ap-south/0"])
    expected = "starting workers: 8 of 10 ready, awaiting eu-west/1, ap-south/0 (12 s)"
    assert shown(progress).strip().endswith(expected)
    clock.sleep_s(3.0)
    assert "(15 s)" in shown(progress)  # goes on while nothing is told
    progress.awaiting("starting workers", 1, 10, [f"eu-west/{n}" for n in range(9)])
    expected = "1 of 10 ready, awaiting eu-west/0, eu-west/1, eu-west/2 and 6 more (15 s)"
    assert shown(progress).strip().endswith(expected)
    progress.awaiting("starting workers", 10, 10, [])
    assert shown(progress).strip().endswith("parameter servers and bridges (15 s)")


def test_waits_and_phases_are_shown_until_the_next_and_timed_on_their_own() -> None:
    clock = VirtualClock()
    progress = quiet(clock=clock)
    progress.awaiting("starting workers", 0, 2, ["east/0", "west/0"])
    clock.sleep_s(9.0)
    progress.awaiting("opening bridges", 1, 2, ["west"])
    assert "opening bridges: 1 of 2 ready, awaiting west (0 s)" in shown(progress)
    progress.feed(events([started()])[0])
    assert "opening" not in shown(progress) and "starting" in shown(progress)
    progress.awaiting("connecting regions", 0, 1, ["west to east"])
    assert "connecting regions: 0 of 1 ready, awaiting west to east (0 s)" in shown(progress)
    progress.status("saving")
    clock.sleep_s(1.0)
    assert shown(progress).strip().endswith("saving")
    clock.sleep_s(3.0)
    assert shown(progress).strip().endswith("saving (4 s)")


def test_a_log_gets_a_line_of_a_wait_every_few_seconds() -> None:
    clock, stream = VirtualClock(), io.StringIO()
    with Progress(4, REGIONS, Console(file=stream, width=40), clock=clock) as progress:
        progress.status("starting workers")
        for tick in range(60):  # half a minute
            progress.awaiting("starting [all]", tick // 6, 10, ["east/0", "west/0"])
            clock.sleep_s(0.5)
        progress.awaiting("starting [all]", 10, 10, [])
        progress.feed(events([started()])[0])
        progress.awaiting("connecting", 0, 1, ["west"])
    lines = stream.getvalue().splitlines()
    assert lines[0] == "starting workers"
    assert lines[1] == "starting [all]: 1 of 10 ready, awaiting east/0, west/0 (4 s)"
    waits = [line for line in lines if line.startswith("starting [all]")]
    assert [line.split("(")[1] for line in waits] == [f"{n} s)" for n in (4, 8, 12, 16, 20, 24, 28)]
    assert not [line for line in lines if line.startswith("connecting")]


def test_table_shows_steps_rates_and_states() -> None:
    progress = quiet()
    rows = [
        started(),
        step("east", 1, 1.0, samples=100, loss=0.5),
        step("east", 2, 2.0, samples=100, loss=0.25, wait_s=5.0),
        wan("east", "west", 2.0, update=500_000),
    ]
    for event in events(rows):
        progress.feed(event)
    east, west = (
        next(line.split() for line in shown(progress).splitlines() if line.startswith(name))
        for name in REGIONS
    )
    assert east == ["east", "2/10", "0.25", "100", "2.0", "0.0", "-", "84%", "waiting"]
    assert west == ["west", "0/10", "-", "0", "0.0", "2.0", "-", "0%", "starting"]


@pytest.mark.parametrize("width", [80, 120])
def test_table_fits_a_terminal(width: int) -> None:
    progress = quiet(width=width)
    for event in events(small_run()):
        progress.feed(event)
    text = shown(progress, width)
    assert "…" not in text
    assert "computing" in text


def test_overall_line_has_round_evaluation_and_time_left() -> None:
    clock = VirtualClock()
    progress = quiet(total=10, clock=clock)
    for event in events([*small_run(), evaluation(4, 5.0, accuracy=0.5)]):
        clock.advance_to_s(max(clock.now_s(), event.t_s))
        progress.feed(event)
    line = progress.line()
    assert line.startswith("5 s, about 8 s left, round 2, eval at step 4: accuracy 0.5")
    clock.advance_to_s(25.0)
    assert progress.line().startswith("25 s")  # goes on while nothing is reported


def test_a_resumed_run_guesses_from_the_steps_of_this_stretch() -> None:
    clock = VirtualClock()
    progress = quiet(total=110, clock=clock)
    rows = [started()] + [step(region, 101, 1.0) for region in REGIONS]
    for event in events(rows):
        clock.advance_to_s(event.t_s)
        progress.feed(event)
    assert "about 9 s left" in progress.line()


def test_who_watches_a_run_that_goes_on_hears_the_time_left_from_all_of_its_steps() -> None:
    clock = VirtualClock()
    progress = quiet(total=110, clock=clock)
    rows = [started(), *(step(region, n, float(n)) for n in range(1, 101) for region in REGIONS)]
    for event in events(rows):
        progress.feed(event)  # all that was written before comes at once
    clock.advance_to_s(2.0)
    assert "about 10 s left" in progress.line()


def test_a_region_that_is_gone_is_called_so_and_nobody_waits_for_its_steps() -> None:
    clock = VirtualClock()
    progress = quiet(total=110, clock=clock)
    rows = [started(), *(step("east", n, n / 10) for n in range(1, 101)), step("west", 1, 10.0)]
    for event in events(rows):
        clock.advance_to_s(max(clock.now_s(), event.t_s))
        progress.feed(event)
    assert "about 18:10 left" in progress.line()  # west has begun just now
    progress.feed(events([("region_lost", 10.0, {"region": "west", "cause": "gone"})])[0])
    line = progress.line()
    assert "about 1 s left" in line and line.endswith("west lost at 1/110")
    west = next(row for row in shown(progress).splitlines() if row.startswith("west"))
    assert west.split()[-3:] == ["lost", "1", "fault"]
    progress.feed(events([("region_joined", 10.0, {"region": "west", **JOINED})])[0])
    clock.advance_to_s(11.0)
    for event in events([step("west", n, 10.0 + n / 100) for n in (1, 101)]):
        progress.feed(event)
    assert "about 1 s left" in progress.line()  # 101 steps in the second since it came
    assert "west 101/110 newest loss" in progress.line()
    progress.feed(Event("region_drained", 12.0, {"region": "west"}))
    line = progress.line()
    assert "about 1 s left" in line and line.endswith("west drained at 101/110")


def test_a_run_that_was_resumed_without_a_region_says_so() -> None:
    progress = quiet(total=10)
    for event in events([started(regions=["east"]), step("east", 1, 1.0)]):
        progress.feed(event)
    assert progress.line().endswith("east 1/10 newest loss 2 | west absent at 0/10")


def test_a_simulation_tells_of_no_checkpoint_as_it_writes_none() -> None:
    saved: Row = ("checkpoint", 3.0, {"id": 0, "step": 4, "bytes": 9})
    finished: Row = ("region_lost", 4.0, {"region": "west", "cause": "gone"})
    for simulated in (False, True):
        lines = plain_lines([started(simulated=simulated), saved, finished], VirtualClock())
        assert any("checkpoint" in line for line in lines) == (not simulated)


def test_simulated_time_is_called_that() -> None:
    progress = quiet()
    for event in events([started(simulated=True), step("east", 1, 5000.0)]):
        progress.feed(event)
    assert progress.line().startswith("1:23:20 simulated")


def test_live_table_on_a_terminal_fed_by_threads() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, legacy_windows=False)
    lost = events([("worker_lost", 1.0, {"region": "east", "worker": 1, "cause": "gone"})])[0]
    with Progress(50, REGIONS, console) as progress:
        progress.status("placing")
        progress.feed(events([started()])[0])

        def work(region: str) -> None:
            for event in events(step(region, n, n / 10) for n in range(1, 51)):
                progress.feed(event)
                progress.feed(lost)  # prints above the table while that is drawn

        threads = [threading.Thread(target=work, args=(region,)) for region in REGIONS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        assert "50/50" in shown(progress)
    progress.close()
    assert stream.getvalue().count("gone") == 100
    assert stream.getvalue().rstrip("\r\n").endswith("\x1b[2K")  # the table was wiped
    for thread in threading.enumerate():
        if "Refresh" in type(thread).__name__:
            thread.join(30)  # told to end, nothing waits for it
            assert not thread.is_alive()


def test_feeding_a_terminal_does_not_draw_per_event() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100)
    with Progress(5000, REGIONS, console, clock=VirtualClock()) as progress:
        for event in events([started(), *(step("east", n, n / 10) for n in range(1, 5001))]):
            progress.feed(event)
    assert stream.getvalue().count("samples/s") < 500


def test_a_log_is_never_silent_for_more_than_a_few_seconds() -> None:
    """A phase, and a run whose regions report nothing, are told again with their time."""
    clock, stream = VirtualClock(), io.StringIO()
    progress = Progress(4, REGIONS, Console(file=stream, width=80), plain=True, clock=clock)

    def pass_s(seconds: float) -> list[str]:
        before = len(stream.getvalue())
        for _ in range(int(2 * seconds)):
            clock.sleep_s(0.5)
            progress.tick()
        return stream.getvalue()[before:].splitlines()

    assert pass_s(10) == [], "nothing has begun"
    progress.status("starting the cluster")
    told = [f"starting the cluster ({n} s)" for n in (4, 8, 12)]
    assert pass_s(13) == told
    progress.feed(events([started()])[0])
    assert len(pass_s(9)) == 2
    progress.feed(events([step("east", 1, 1.0)])[0])
    assert all("east 1/4" in line for line in pass_s(9))
    progress.status("writing the model and the summary")
    assert pass_s(4) == ["writing the model and the summary (4 s)"]
    assert 10 < len(pass_s(600)) < 25, "a long wait fills no log"
    progress.close()
