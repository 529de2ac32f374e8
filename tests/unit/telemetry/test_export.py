"""A run's events in other programs: they never hold a run up, and their books are true."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.observe.made_run import MadeRun, made_run
from geo_ray.api.live import export_events
from geo_ray.base.errors import ConfigError, RunDirectoryError
from geo_ray.base.load import load_text
from geo_ray.cli.events import events as command
from geo_ray.telemetry.event_log import read_events
from geo_ray.telemetry.events import Event
from geo_ray.telemetry.export.base import ExportOrder, ObserveConfig, ScalarFold
from geo_ray.telemetry.export.exporters import ExportQueue, check_exports, exporting
from tests.support.live_support import until
from tests.support.observe_support import (
    evaluation,
    events,
    exchange,
    small_run,
    started,
    step,
    wan,
)
from tests.support.tensorboard_support import tensorboard_hyperparameters, tensorboard_values


class Kept:
    """An exporter that keeps what it is given, and does what a test wants."""

    def __init__(self, does: Callable[[Event], None] = lambda event: None) -> None:
        self.does = does
        self.events: list[Event] = []
        self.flushed = self.closed = 0

    def feed(self, event: Event) -> None:
        self.does(event)
        self.events.append(event)

    def flush(self) -> None:
        self.flushed += 1

    def close(self) -> None:
        self.closed += 1


EVENTS = events(small_run())


# ------------------------------------------------------------------ the run goes on


def test_all_events_come_in_order_and_the_end_waits_for_them() -> None:
    kept = Kept(lambda event: time.sleep(0.002))
    exports = ExportQueue({"kept": kept})
    for event in EVENTS:
        exports.feed(event)
    exports.close()
    exports.close()
    assert kept.events == EVENTS
    assert kept.closed == 1
    assert not [each for each in threading.enumerate() if each.name == "export"]


def test_one_that_hangs_holds_nobody_up() -> None:
    gate, told = threading.Event(), []
    exports = ExportQueue(
        {"slow": Kept(lambda event: gate.wait(30) and None)},
        most=5,
        close_s=0.1,
        notify=told.append,
    )
    for event in EVENTS * 20:
        exports.feed(event)  # returns, whatever the other does
    assert exports.lost >= len(EVENTS) * 20 - 7
    exports.close()
    assert told == [
        "observe.export: slow did not accept all events of the run in time",
        f"observe.export: {exports.lost:,} events were lost, because they came too fast",
    ]
    gate.set()
    until(lambda: not [each for each in threading.enumerate() if each.name == "export"])


def test_errors_are_told_once_and_others_go_on() -> None:
    def fails(event: Event) -> None:
        raise OSError("no route\nto host")

    good, told = Kept(), []
    exports = ExportQueue({"bad": Kept(fails), "good": good}, notify=told.append)
    for event in EVENTS:
        exports.feed(event)
    exports.close()
    assert told == [
        "observe.export: bad fails, the run continues without it: OSError: no route to host"
    ]
    assert good.events == EVENTS


def test_what_failed_for_a_while_is_given_the_next_events() -> None:
    left = [3]

    def fails_at_first(event: Event) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise ConnectionError("not yet")

    kept = Kept(fails_at_first)
    exports = ExportQueue({"kept": kept}, notify=lambda text: None)
    for event in EVENTS:
        exports.feed(event)
    exports.close()
    assert kept.events == EVENTS[3:]


def test_without_exporters_there_is_no_thread() -> None:
    before = threading.active_count()
    exports = ExportQueue({})
    exports.feed(EVENTS[0])
    assert threading.active_count() == before
    exports.close()


def test_an_error_that_ends_the_run_is_told_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept()
    monkeypatch.setattr(
        "geo_ray.telemetry.export.exporters.open_exporters", lambda *_: {"kept": kept}
    )
    order = ExportOrder(tmp_path, tmp_path, time.time())
    with pytest.raises(RunDirectoryError), exporting((), order) as exports:
        exports.feed(EVENTS[0])
        raise RunDirectoryError("the disk is full")
    assert [event.kind for event in kept.events] == ["run_started", "run_failed"]
    assert kept.events[1]["code"] == "RUN_DIRECTORY"
    assert kept.closed == 1


def test_a_package_that_is_missing_is_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # as Python does for what cannot be imported
    monkeypatch.delitem(sys.modules, "geo_ray.telemetry.export.wandb", raising=False)
    config = load_text("export: [{kind: wandb}]", [], ObserveConfig, "x")
    with pytest.raises(ConfigError, match="wandb needs a package"):
        check_exports(config.export)


@pytest.mark.parametrize(
    "text",
    ["{kind: nonsense}", "{kind: otlp, endpoint: 'file:///x'}", "{kind: otlp, header: x}", "{}"],
)
def test_what_is_wrong_in_the_configuration_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        load_text(f"export: [{text}]", [], ObserveConfig, "x")


# ------------------------------------------------------------------ scalars


def test_scalars_are_what_the_events_say() -> None:
    rows = [
        started(),
        step("east", 1, 1.0, loss=0.5, compute_s=0.75, wait_s=0.25),
        step("east", 2, 1.5, loss=0.25),
        step("west", 1, 1.5, loss=float("nan")),
        exchange("east", 1, 2.0),
        wan("west", "east", 2.0, update=100, control=1),
        wan("west", "east", 4.0, update=300, control=1),
        evaluation(2, 4.0, accuracy=0.5),
        evaluation(2, 4.1, "east", accuracy=0.75),
    ]
    fold = ScalarFold(every_s=1.0)
    found = [(v.name, v.value, v.step) for event in events(rows) for v in fold.feed(event)]
    assert found == [
        ("loss/east", 0.5, 1),
        ("wait_share/east", 0.25, 1),
        ("batch_size/east", 32.0, 1),
        ("wait_share/west", pytest.approx(1 / 3), 1),
        ("batch_size/west", 32.0, 1),
        ("exchange_s/east", 0.25, 2),
        ("staleness/east", 0.0, 2),
        ("wan_bytes", 101.0, 2),
        ("wan_bytes", 301.0, 2),
        ("eval/accuracy", 0.5, 2),
        ("batch_size/east", 32.0, 2),  # left out before
        ("eval/accuracy/east", 0.75, 2),
    ]


def test_learning_rate_and_batch_size_are_given_at_least_at_evaluations() -> None:
    rows = [
        started(),
        *(step("east", n, n / 10, learning_rate=1 / n, samples=8 * n) for n in range(1, 6)),
        step("west", 1, 0.1, learning_rate=None),
        evaluation(5, 0.6, accuracy=0.5),
        step("east", 6, 0.7, learning_rate=1 / 6),
        step("east", 7, 1.2, learning_rate=1 / 7),
        evaluation(7, 1.3, accuracy=0.5),
    ]
    fold = ScalarFold(every_s=1.0)
    found = [(v.name, v.value, v.step) for event in events(rows) for v in fold.feed(event)]
    rates = [(step, value) for name, value, step in found if name == "learning_rate/east"]
    assert rates == [(1, 1.0), (5, 1 / 5), (7, 1 / 7)]
    sizes = [(step, value) for name, value, step in found if name == "batch_size/east"]
    assert sizes == [(1, 8.0), (5, 40.0), (7, 32.0)]
    assert not [name for name, _, _ in found if name == "learning_rate/west"]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[MadeRun]:
    made = made_run(tmp_path, 3)
    made.begin()
    made.go_on(8)
    made.write(("eval", 16.5, {"step": 32, "region": None, "metrics": {"acc": 0.5}, "samples": 9}))
    made.finish()
    yield made
    made.close()


def losses_of(made: MadeRun, region: str) -> list[tuple[int, float]]:
    return [
        (event["step"], event["loss"])
        for event in read_events(made.path / "events.jsonl")
        if event.kind == "step" and event["region"] == region
    ]


def test_tensorboard_has_every_curve(made: MadeRun) -> None:
    ran = CliRunner().invoke(
        command, [str(made.path), "--export", "{kind: tensorboard, every_s: 0}"]
    )
    assert (ran.exit_code, ran.output) == (0, f"exported {1 + 8 * 19 + 2} events\n")
    values = tensorboard_values(made.path / "tensorboard")
    wanted = losses_of(made, "eu-west")
    assert [step for step, _ in values["loss/eu-west"]] == [step for step, _ in wanted]
    assert [v for _, v in values["loss/eu-west"]] == pytest.approx([v for _, v in wanted])
    assert values["eval/acc"] == [(32, 0.5)]
    assert values["wan_bytes"][-1][1] == pytest.approx(8e6 * (2 + 3) * 1.5)
    assert values["batch_size/eu-west"][0] == (1, 32.0)
    found = tensorboard_hyperparameters(made.path / "tensorboard")
    assert found["optimizer.lr"] == 0.1 and found["regions.us-east.workers"] == 1.0
    assert found["strategy.kind"] == "sma" and "cluster.kind" not in found


def test_mlflow_has_the_run_and_goes_on_with_it(
    made: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip(
        "mlflow", reason="mlflow-skinny, of the extra `export`, is missing"
    )
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    to: dict[str, Any] = {"kind": "mlflow", "tracking_uri": uri, "experiment": "e", "every_s": 0}
    for _ in range(2):  # a run that is resumed is the same run there
        export_events(made.path, [to])
    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("e")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["strategy"] == "sma"
    assert run.data.params["regions"] == "us-east eu-west ap-south"
    history = {m.step: m.value for m in client.get_metric_history(run.info.run_id, "loss/eu-west")}
    assert list(history.items()) == losses_of(made, "eu-west")
    sizes = client.get_metric_history(run.info.run_id, "batch_size/eu-west")
    assert {m.value for m in sizes} == {32.0}
    assert run.data.params["optimizer.lr"] == "0.1" and len(run.data.params) > 50
    config = made.path / "config.lock.yaml"
    config.write_text(config.read_text().replace("lr: 0.1\n", "lr: 0.01\n"))
    export_events(made.path, [to])
    (resumed,) = client.search_runs([experiment.experiment_id])
    assert resumed.data.params == run.data.params, "MLflow's parameters cannot change"
    assert resumed.data.tags["geo_ray.changed.optimizer.lr"] == "0.01"


def test_weights_and_biases_keeps_the_run_for_later(
    made: MadeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="wandb, of the extra `export`, is not installed")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    export_events(made.path, ["{kind: wandb, mode: offline, every_s: 0}"])
    (kept,) = (made.path / "wandb").glob("offline-run-*/run-*.wandb")
    wanted = (b"loss/eu-west", b"eval/acc", b"batch_size/eu-west")
    hyperparameters = (b"optimizer.lr", b"regions.us-east.workers")

    def is_written() -> bool:
        data = _payload(kept.read_bytes())
        return all(each in data for each in (*wanted, *hyperparameters))

    until(is_written)  # by a process of its own


def _payload(log: bytes) -> bytes:
    """What a log in LevelDB's format holds, also where a record continues in the next block."""
    header_bytes, block_bytes, found = 7, 32768, []
    at = header_bytes  # the file has a header, too
    while at + header_bytes <= len(log):
        if block_bytes - at % block_bytes < header_bytes:
            at += block_bytes - at % block_bytes
            continue
        size = int.from_bytes(log[at + 4 : at + 6], "little")
        found.append(log[at + header_bytes : at + header_bytes + size])
        at += header_bytes + size
    return b"".join(found)
