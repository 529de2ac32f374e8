"""A run is followed from its directory or its bucket: machines, money, long logs, other drivers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.observe.made_run import MadeRun, eventful, made_run
from geo_ray.api.live import follow_view
from geo_ray.base.errors import RunDirectoryError
from geo_ray.cloud.autoscaler.journal import JOURNAL_KEY, Journal, JournalMachines
from geo_ray.cloud.autoscaler.state import (
    AutoscalerState,
    InstanceState,
    ManagedInstance,
    PendingLaunch,
    PendingTermination,
)
from geo_ray.cloud.provider import LaunchRequest, Machine, MachineState, Market, Pool
from geo_ray.runs.directory import FOLLOWED_FILE
from geo_ray.runs.remote import RunObjects
from geo_ray.runs.report import LiveReader
from geo_ray.runs.uploader import uploading
from geo_ray.storage.conditional_store import LocalConditionalStore
from geo_ray.telemetry.event_log import EVENTS_FILE
from geo_ray.telemetry.view import RunView
from tests.support.s3_support import new_prefix, s3_server, set_credentials

NOW_S = 10_000.0
BOOTING, READY = InstanceState.BOOTING, InstanceState.READY


@pytest.fixture
def made(tmp_path: Path) -> Iterator[MadeRun]:
    made = made_run(tmp_path, 4)
    yield made
    made.close()


def reader_of(made: MadeRun) -> LiveReader:
    return LiveReader(lambda: made.path, JournalMachines(), now_unix_s=lambda: NOW_S)


def instance(number: int, **changes: object) -> ManagedInstance:
    pool = Pool("eu-west-1", "eu-west-1a", "g5.xlarge", Market("spot"))
    labels = {"ray.io/availability-region": "eu-west"}
    machine = Machine(
        f"i-{number}", "as-1", pool, MachineState.RUNNING, NOW_S - 7200.0, labels=labels
    )
    fields: dict[str, object] = {
        "paid_unix_s": NOW_S,
        "observed_unix_s": NOW_S,
        "node_unix_s": NOW_S,
        "state": READY,
        "node": READY,
    }
    fields |= changes
    return ManagedInstance(machine, "cheapest by 12 %", 0.5, **fields)  # type: ignore[arg-type]


def test_machines_are_those_of_the_journal_with_price_and_age(made: MadeRun) -> None:
    made.begin()
    store = LocalConditionalStore(made.path)
    journal = Journal(store, 1)
    memory = journal.read().copied()
    memory.instances = {
        "i-1": instance(1),
        "i-2": instance(2, state=InstanceState.LEAVING, termination=PendingTermination("a notice")),
        "i-3": instance(3, state=BOOTING, node=BOOTING, node_unix_s=NOW_S - 9),
    }
    pool = Pool("us-east-1", None, "g6.xlarge", Market("on_demand"))
    request = LaunchRequest("as-2", "c", pool, 3, {}, None)
    memory.pending_launches = {
        "as-2": PendingLaunch(request, "one is sold out", 0.75, NOW_S, NOW_S, failed=1)
    }
    memory.ledger.add("eu-west", "x", 2.0, 1.0, 1.25)
    journal.write(memory)
    reader = reader_of(made)
    assert reader.read(100) == 1.0
    machines = reader.view().machines
    assert machines is not None
    rows = [(r.region, r.machine, r.type, r.state, r.usd_per_hour, r.age_s) for r in machines.rows]
    assert rows == [
        ("eu-west", "i-1", "g5.xlarge spot", "running", 0.5, 7200.0),
        ("eu-west", "i-2", "g5.xlarge spot", "leaving", 0.5, 7200.0),
        ("eu-west", "i-3", "g5.xlarge spot", "without a node", 0.5, 7200.0),
        ("us-east-1", "2 x", "g6.xlarge on-demand", "asked for", 1.5, None),
    ]
    assert machines.rows[1].note == "a notice"
    assert (machines.paid_usd, machines.usd_per_hour) == (1.25, 3.0)


def test_without_an_autoscaler_machines_are_as_planned(made: MadeRun) -> None:
    made.begin()
    assert JournalMachines().machines(LocalConditionalStore(made.path), NOW_S) is None
    reader = reader_of(made)
    reader.read(100)
    view = reader.view().machines
    assert view is not None and view.source == "plan"
    assert view.usd_per_hour == pytest.approx(1.2 * (1 + 2 + 1 + 2))
    (made.path / FOLLOWED_FILE).unlink()
    reader = reader_of(made)
    reader.read(100)
    assert reader.view().machines is None


def test_a_journal_that_cannot_be_read_is_told_and_the_rest_is_shown(made: MadeRun) -> None:
    eventful(made, 3)
    (made.path / JOURNAL_KEY).write_bytes(b"nonsense")
    reader = reader_of(made)
    reader.read(10_000)
    view = reader.view()
    assert view.machines is None
    assert "the autoscaler's journal cannot be read" in view.problems[0]
    assert view.status.round == 3


def test_dollars_over_time_are_the_plans_prices_for_what_was_done(made: MadeRun) -> None:
    made.begin()
    made.go_on(30)
    reader = reader_of(made)
    reader.read(10_000)
    view = reader.view()
    usd = view.history.usd
    assert usd is not None and view.planned is not None
    machines = 1.2 * (1 + 2 + 1 + 2)  # USD an hour
    egress = 0.0  # a second program, from the log alone: 0.02 USD a GB
    for line in (made.path / EVENTS_FILE).read_text().splitlines():
        row = json.loads(line)
        if row["kind"] == "wan" and row["t_s"] == 60.0:
            egress += 0.02 * sum(row["bytes_by_class"].values()) / 1e9
    assert view.status.spent.usd == pytest.approx(machines * (3 + 60) / 3600 + egress, rel=1e-3)
    assert usd.value[-1] <= view.status.spent.usd
    assert all(a <= b for a, b in zip(usd.value, usd.value[1:], strict=False))


def test_a_long_log_is_read_in_pieces_and_ends_the_same(made: MadeRun) -> None:
    eventful(made, 30)
    whole, pieces = reader_of(made), reader_of(made)
    assert whole.read(1_000_000) == 1.0
    shares = [pieces.read(50)]
    while shares[-1] < 1.0:
        shares.append(pieces.read(50))
    assert len(shares) > 10 and shares == sorted(shares)
    one, two = whole.view(), pieces.view()
    assert one.status == two.status
    assert one.map == two.map
    assert one.history.notes == two.history.notes


def test_there_is_nothing_to_read_of_no_run(tmp_path: Path) -> None:
    def find() -> Path:
        raise RunDirectoryError("there is no run")

    with pytest.raises(RunDirectoryError):
        LiveReader(find).read(1)


def test_memory_holds_no_single_steps(made: MadeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("geo_ray.runs.report._ALL_STEPS", 200)
    monkeypatch.setattr("geo_ray.runs.report._EACH_STEPS", 20)
    made.begin()
    made.go_on(100)
    reader = reader_of(made)
    reader.read(100_000)
    assert reader._reader is not None
    totals = reader._reader.totals
    assert max(len(region.steps.rows) for region in totals.regions.values()) <= 50
    assert reader.view().status.regions[0].step == 400
    assert totals.samples == 4 * 400 * 32


def test_a_run_in_a_bucket_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_credentials(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with s3_server() as endpoint:
        prefix = new_prefix(endpoint)
        made = made_run(tmp_path, 3, where=prefix)
        address = str(made.run.address)
        with uploading(address, made.path, 1, lambda: None):
            eventful(made, 9)
        made.close()
        assert RunObjects(address).is_there()
        view = next(follow_view(address))
        assert isinstance(view, RunView)
        assert view.status.round == 9
        assert view.status.run == address
        assert view.machines is not None
        memory = AutoscalerState(token=1)
        memory.instances = {"i-1": instance(1)}
        elsewhere = tmp_path / "journal"
        elsewhere.mkdir()
        journal = Journal(LocalConditionalStore(elsewhere), 1)
        journal.read()
        journal.write(memory)
        view = next(follow_view(address, machines=elsewhere))
        assert isinstance(view, RunView) and view.machines is not None
        assert [row.machine for row in view.machines.rows] == ["i-1"]
