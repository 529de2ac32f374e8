"""`geo-ray queue`, without a cluster: what is asked lies in the box, what is written is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from geo_ray.api.queue import queue_report
from geo_ray.base.errors import (
    ConfigError,
    QueueDeniedError,
    QueueMissingError,
    QueueRequestError,
    TenantQuotaError,
)
from geo_ray.cli.main import root
from geo_ray.scheduler.queue import inbox
from tests.support.queue_support import TOKENS, SimQueue, job, sim_queue

ROOT = Path(__file__).resolve().parents[3]
CONFIG = str(ROOT / "configs" / "quickstart.yaml")


def run(*words: object, token: str | None = TOKENS["red"]) -> Result:
    env = {} if token is None else {"GEO_RAY_QUEUE_TOKEN": token}
    return CliRunner().invoke(root, ["queue", *map(str, words)], env=env)


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimQueue:
    """A queue with a job that runs, one that waits, and one that has ended."""
    place = tmp_path / "q"
    place.mkdir()
    made = sim_queue(place, capacity=2.0)
    made.submit("blue", job("short", seconds=5.0, value=3.0, deadline_s=60.0))
    made.run(15.0)
    made.submit("red", job("long", seconds=500.0, deadline_s=1e9))
    made.submit("red", job("next", seconds=10.0))
    made.run(40.0)
    # The queue's clock began at 0: the wall clock's time would be far in its future.
    monkeypatch.setattr("geo_ray.api.queue.time.time", lambda: 40.0)
    return made


def test_what_a_job_says_neither_controls_the_terminal_nor_breaks_the_table(
    queue: SimQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = queue_report(str(queue.root))
    message = "\x1b]0;owned\x07\x9b2J [/tmp/x] is not there"
    rows = tuple(row.model_copy(update={"message": message}) for row in report.jobs)
    odd = report.model_copy(update={"jobs": rows, "name": "\x1b[2Jq"})
    monkeypatch.setattr("geo_ray.api.queue.queue_report", lambda _: odd)
    for words in (("list", queue.root), ("show", queue.root, "long")):
        shown = run(*words)
        assert shown.exit_code == 0, shown.output
        assert not set("\x1b\x07\x9b") & set(shown.output)
        assert r"\x1b]0;owned\x07\x9b2J [/tmp/x]" in " ".join(shown.output.split())


def test_the_table_says_who_runs_who_waits_and_why(queue: SimQueue) -> None:
    shown = run("list", queue.root)
    assert shown.exit_code == 0, shown.output
    lines = {line.split()[0]: line for line in shown.output.splitlines() if line.strip()}
    assert "running" in lines["long"]
    assert "1 in us" in lines["long"]
    assert "waiting" in lines["next"]
    assert "finished" in lines["short"]
    assert "after 1:00" in lines["short"]
    assert "fifo, slot" in shown.output
    message = json.loads(run("list", queue.root, "--json").stdout)
    assert [each["name"] for each in message["jobs"]] == ["long", "next", "short"]
    assert message["jobs"][2]["utility"] == pytest.approx(3.0, rel=1e-3)


def test_a_page_of_it_is_written(queue: SimQueue, tmp_path: Path) -> None:
    page = tmp_path / "queue.html"
    shown = run("list", queue.root, "--page", page)
    assert shown.exit_code == 0, shown.output
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert "Jobs over time" in text
    assert "long" in text


def test_a_job_is_shown_with_what_it_had_and_will_have(queue: SimQueue) -> None:
    shown = run("show", queue.root, "long").output
    assert "job      long of tenant red: was running" in shown, "the queue is not served"
    assert "had " in shown
    assert "runs/q/long" in shown
    assert json.loads(run("show", queue.root, "short", "--json").stdout)["outcome"] == "finished"
    missing = run("show", queue.root, "nobody")
    assert isinstance(missing.exception, QueueRequestError)
    assert "long, next, short" in missing.exception.message


def test_what_is_asked_while_nobody_serves_lies_in_the_box(queue: SimQueue) -> None:
    words = ("submit", queue.root, CONFIG, "--name", "mine", "--value", 7, "--deadline", 60)
    message = run(*words, "--tenant", "red", "--wait", 0)
    assert message.exit_code == 0, message.output
    assert "the queue is not being served" in message.output
    (asked,) = inbox.look(queue.store, "red")
    request: Any = json.loads(asked.text)
    assert request["job"]["name"] == "mine"
    assert request["job"]["value"] == {"value": 7.0, "deadline_s": 60.0, "urgency": 2.0}
    run("cancel", queue.root, "next", "--tenant", "red", "--wait", 0)
    run("move", queue.root, "long", "--last", "--tenant", "red", "--wait", 0)
    queue.tick()
    assert queue.state.jobs["next"].end is not None
    # Its regions are not those of this queue, so it is refused, and says so.
    assert queue.state.answers[asked.id].code == "QUEUE_REQUEST"


def test_who_asks_must_have_a_token(queue: SimQueue, tmp_path: Path) -> None:
    without = run("cancel", queue.root, "long", "--tenant", "red", token=None)
    assert isinstance(without.exception, QueueDeniedError)
    nonsense = tmp_path / "token"
    nonsense.write_text("nonsense\n")
    wrong = run("cancel", queue.root, "long", "--tenant", "red", "--token-file", nonsense)
    assert isinstance(wrong.exception, QueueDeniedError)
    nobody = run("cancel", queue.root, "long", "--tenant", "green", "--wait", 0)
    assert isinstance(nobody.exception, QueueRequestError)
    assert "no tenant green" in nobody.exception.message
    assert run("cancel", queue.root, "long").exit_code == 2  # whose name?


def test_another_tenants_token_is_refused_at_once_and_leaves_nothing(queue: SimQueue) -> None:
    words = ("cancel", queue.root, "long", "--tenant", "red", "--wait", 0)
    others = run(*words, token=TOKENS["blue"])
    assert isinstance(others.exception, QueueDeniedError)
    assert "token of tenant red" in others.exception.message
    assert inbox.look(queue.store, "red") == []


def test_what_a_move_does_not_name_stays(queue: SimQueue) -> None:
    message = run("move", queue.root, "long", "--value", 7, "--tenant", "red", "--wait", 0)
    assert message.exit_code == 0, message.output
    queue.tick()
    value = queue.state.jobs["long"].request.value
    assert (value.value, value.deadline_s, value.urgency) == (7.0, 1e9, 2.0)
    run("move", queue.root, "long", "--deadline", 90, "--tenant", "red", "--wait", 0)
    run("move", queue.root, "long", "--urgency", 3, "--tenant", "red", "--wait", 0)
    queue.tick()
    value = queue.state.jobs["long"].request.value
    assert (value.value, value.deadline_s, value.urgency) == (7.0, 90.0, 3.0)
    shown = run("show", queue.root, "long").output
    assert "value    7, half of it after 1:30" in shown


@pytest.mark.parametrize("name", ["bad name/x", "-a", "A", "a" * 41])
def test_a_name_that_no_job_may_have_is_told(queue: SimQueue, name: str) -> None:
    message = run("submit", queue.root, CONFIG, "--name", name, "--tenant", "red", "--wait", 0)
    assert isinstance(message.exception, QueueRequestError)
    assert repr(name) in message.exception.message and "--name" in message.exception.fix


def test_a_queue_that_nobody_serves_says_so(queue: SimQueue) -> None:
    from geo_ray.cli.queue import job_lines, queue_line
    from geo_ray.scheduler.queue.report import report_of

    assert "not served" in run("list", queue.root).output, "it has no lease"
    assert "was running" in run("list", queue.root).output
    assert "not served" in run("show", queue.root, "long").output
    assert "not served" not in run("show", queue.root, "short").output, "it is over anyway"
    for is_served in (True, None):
        report = report_of(queue.state).model_copy(update={"is_served": is_served})
        row = report.job("long")
        assert row is not None
        assert "served" not in queue_line(report) + "".join(job_lines(report, row))


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("QUEUE_DENIED", QueueDeniedError),
        ("TENANT_QUOTA", TenantQuotaError),
        ("QUEUE_REQUEST", QueueRequestError),
    ],
)
def test_a_refusal_is_an_error_of_its_kind(code: str, kind: type[Exception]) -> None:
    from geo_ray.api.queue import _raise_refused
    from geo_ray.scheduler.queue.job_spec import CancelRequest
    from geo_ray.scheduler.queue.journal import RequestEntry

    asked = CancelRequest(id="r", sent_unix_s=0.0, job="a")
    with pytest.raises(kind, match="because"):
        _raise_refused(
            RequestEntry(unix_s=0.0, tenant="red", request=asked, code=code, refused="because")
        )


def test_what_is_no_queue_is_said_to_be_none(tmp_path: Path) -> None:
    assert isinstance(run("list", tmp_path).exception, QueueMissingError)
    asked = run("cancel", tmp_path, "a", "--tenant", "red")
    assert isinstance(asked.exception, QueueMissingError)
    bad = tmp_path / "queue.yaml"
    bad.write_text("name: q\npolcy: fifo\n")
    assert isinstance(run("list", bad).exception, ConfigError)


def test_a_token_is_made_with_its_key() -> None:
    from geo_ray.scheduler.queue.inbox import key_of

    lines = dict(line.split() for line in run("token").stdout.splitlines()[:2])
    assert key_of(lines["token"]) == lines["key"]


def test_the_queue_is_watched_in_the_terminal(queue: SimQueue) -> None:
    shown = CliRunner().invoke(root, ["watch", str(queue.root), "--terminal"])
    assert shown.exit_code == 0, shown.output
    lines = [line for line in shown.output.splitlines() if "long" in line]
    assert any("1 in us" in line for line in lines), lines  # the whole row in one line
