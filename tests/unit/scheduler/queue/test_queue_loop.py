"""A queue over a cluster on a virtual clock: lives of jobs, and restarts of the queue."""

from __future__ import annotations

from pathlib import Path

import pytest

from geo_ray.base.errors import LeaseLostError
from geo_ray.scheduler.queue.inbox import key_of
from geo_ray.scheduler.queue.job_spec import ValueChange
from geo_ray.scheduler.queue.journal import QueueJournal
from geo_ray.scheduler.queue.loop import AskMachines, AskStop, ChangeMember, Submit, target_of
from geo_ray.scheduler.queue.report import report_of, utility_of_end
from geo_ray.scheduler.queue.state import state_of
from tests.support.queue_support import SLOT_S, TOKENS, SimQueue, job, sim_queue

TWO = ("us", "eu")


def outcome(queue: SimQueue, name: str) -> tuple[str, str | None]:
    end = queue.state.jobs[name].end
    assert end is not None, queue.state.jobs[name]
    return end.outcome, end.code


def test_jobs_run_one_after_the_other_where_there_is_room_for_one(tmp_path: Path) -> None:
    queue = sim_queue(tmp_path, capacity=2.0)  # a worker, and servers with a bridge
    queue.tick()
    for name in ("a", "b"):
        queue.submit("red", job(name, seconds=15.0))
    queue.run(60.0)
    assert outcome(queue, "a") == outcome(queue, "b") == ("finished", None)
    a, b = queue.state.jobs["a"], queue.state.jobs["b"]
    assert a.end is not None
    assert b.progress.segments[0].since_unix_s >= a.end.unix_s
    assert queue.state.attempts == {"a": 1, "b": 1}


def test_what_is_asked_counts_once_and_only_with_its_token(tmp_path: Path) -> None:
    queue = sim_queue(tmp_path)
    first = queue.submit("red", job("a", seconds=100.0))
    queue.tick()
    assert queue.state.answers[first].refused is None
    again = queue.submit("red", job("a"))
    stolen = CancelAs(queue).ask("blue", "a")
    other = queue.cancel("blue", "a")
    unknown = queue.cancel("red", "nobody")
    errors = queue.tick()
    answers = queue.state.answers
    assert answers[again].code == "QUEUE_REQUEST"
    assert answers[other].code == "QUEUE_DENIED"
    assert answers[unknown].code == "QUEUE_REQUEST"
    assert stolen not in answers
    assert any("not signed" in text for text in errors)
    assert queue.state.jobs["a"].end is None
    mine = queue.cancel("boss", "a")
    queue.run(20.0)
    assert queue.state.answers[mine].refused is None
    assert outcome(queue, "a") == ("cancelled", None)


class CancelAs:
    """A request in another tenant's name."""

    def __init__(self, queue: SimQueue) -> None:
        self.queue = queue

    def ask(self, really: str, name: str) -> str:
        from geo_ray.scheduler.queue.job_spec import CancelRequest

        asked = CancelRequest(id="stolen", sent_unix_s=0.0, job=name)
        return self.queue.ask("red", asked, TOKENS[really])


def test_a_job_that_waits_is_cancelled_at_once(tmp_path: Path) -> None:
    queue = sim_queue(tmp_path, capacity=2.0)
    queue.tick()
    queue.submit("red", job("a", seconds=50.0))
    queue.submit("red", job("b"))
    queue.run(12.0)
    queue.cancel("red", "b")
    queue.tick()
    assert outcome(queue, "b") == ("cancelled", None)
    assert queue.state.attempts == {"a": 1}


@pytest.mark.parametrize(
    ("quota", "asked", "code"),
    [
        ({"most_jobs": 0}, job("a"), "TENANT_QUOTA"),
        ({"max_value": 5.0}, job("a", value=6.0), "TENANT_QUOTA"),
        ({"most_workers": 1}, job("a", TWO), "TENANT_QUOTA"),
        ({}, job("a", ("mars",)), "QUEUE_REQUEST"),
        ({}, job("a", workers=1), None),
    ],
)
def test_quotas_and_what_does_not_fit(
    tmp_path: Path, quota: dict[str, object], asked: object, code: str | None
) -> None:
    tenants = {"red": {"key": key_of(TOKENS["red"]), **quota}}
    queue = sim_queue(tmp_path, tenants=tenants)
    id = queue.submit("red", asked)  # type: ignore[arg-type]
    queue.tick()
    assert queue.state.answers[id].code == code


def test_a_job_larger_than_the_cluster_is_refused(tmp_path: Path) -> None:
    queue = sim_queue(tmp_path, regions={"us": {"cpus": 1.5}})
    id = queue.submit("red", job("a"))
    queue.tick()
    assert "larger than the cluster" in str(queue.state.answers[id].refused)


def test_a_tenant_has_no_more_workers_than_it_may(tmp_path: Path) -> None:
    keys = {name: {"key": key_of(token)} for name, token in TOKENS.items()}
    keys["red"]["most_workers"] = 1  # type: ignore[assignment]
    queue = sim_queue(tmp_path, tenants=keys)
    for name in ("a", "b"):
        queue.submit("red", job(name, seconds=15.0))
    queue.submit("blue", job("c", seconds=15.0))
    queue.run(5.0)
    assert {j.name for j in queue.state.living() if j.attempt} == {"a", "c"}
    assert "tenant red has 1 of 1 workers" in str(report_of(queue.state).job("b"))
    queue.run(60.0)
    assert outcome(queue, "b") == ("finished", None)


def test_a_preempted_job_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    """Tiresias: the job with the least service comes first."""
    queue = sim_queue(tmp_path, capacity=2.0, policy="tiresias", slot_s=200.0)
    queue.world.step_s = 2.0
    queue.submit("red", job("a", seconds=5000.0))
    queue.run(3500.0, every_s=50.0)
    before = queue.world.runs["a"].done
    assert before > 0.2
    queue.submit("red", job("b", seconds=15.0))
    queue.run(3700.0, every_s=10.0)
    assert outcome(queue, "b") == ("finished", None)
    assert AskStop("a") in queue.world.acts
    queue.run(6000.0, every_s=50.0)
    assert outcome(queue, "a") == ("finished", None)
    assert queue.state.attempts["a"] == 2


def test_a_region_that_is_drained_leaves_and_comes_back(tmp_path: Path) -> None:
    queue = sim_queue(tmp_path)
    queue.submit("red", job("a", TWO, seconds=90.0, least=1))
    queue.run(15.0)
    queue.world.capacity["eu"] = (0.0, 0.0)
    queue.run(25.0)
    assert ChangeMember("a", "drain", "eu") in queue.world.acts
    assert queue.world.runs["a"].members == {"us": "member", "eu": "left"}
    queue.world.capacity["eu"] = (0.0, 8.0)
    queue.run(45.0)
    assert ChangeMember("a", "add", "eu") in queue.world.acts
    assert queue.world.runs["a"].members == {"us": "member", "eu": "member"}
    queue.run(120.0)
    assert outcome(queue, "a") == ("finished", None)
    assert queue.state.attempts["a"] == 1  # nothing was started anew


def test_the_averagers_region_takes_a_restart(tmp_path: Path) -> None:
    queue = sim_queue(tmp_path)
    queue.submit("red", job("a", TWO, seconds=60.0, least=1))
    queue.run(15.0)
    queue.world.capacity["us"] = (0.0, 0.0)
    queue.run(30.0)
    attempt = queue.state.jobs["a"].attempt
    assert attempt is not None
    assert (attempt.number, attempt.averager, attempt.workers) == (2, "eu", {"eu": 1})
    assert AskStop("a") in queue.world.acts


def test_a_job_that_needs_all_its_regions_waits_for_them(tmp_path: Path) -> None:
    queue = sim_queue(tmp_path)
    queue.submit("red", job("a", TWO, seconds=40.0))
    queue.run(15.0)
    queue.world.capacity["eu"] = (0.0, 0.0)
    queue.run(35.0)
    assert queue.state.jobs["a"].state == "waiting"
    assert report_of(queue.state).jobs[0].message == "its regions have no capacity"
    queue.world.capacity["eu"] = (0.0, 8.0)
    queue.run(90.0)
    assert outcome(queue, "a") == ("finished", None)
    assert queue.state.attempts["a"] == 2


def test_a_job_that_lies_about_its_speed_is_found_out(tmp_path: Path) -> None:
    queue = sim_queue(tmp_path)
    queue.world.speed["a"] = 0.5
    queue.submit("red", job("a", seconds=40.0))
    queue.run(50.0)
    progress = queue.state.jobs["a"].progress
    assert progress.factor == pytest.approx(0.5, rel=0.05)
    assert "0.5 times the declared speed" in report_of(queue.state).jobs[0].message
    queue.run(100.0)
    assert outcome(queue, "a") == ("finished", None)


def test_a_job_that_overruns_is_ended(tmp_path: Path) -> None:
    queue = sim_queue(tmp_path, patience={"overrun": 2.0, "save_s": 30.0})
    queue.world.speed["a"] = 0.1
    queue.submit("red", job("a", seconds=20.0))
    queue.run(80.0)
    assert outcome(queue, "a") == ("overran", "JOB_OVERRAN")
    assert 0.0 < queue.world.runs["a"].done < 1.0
    assert not queue.world.living("a")


def test_a_job_that_never_takes_a_step_is_ended(tmp_path: Path) -> None:
    queue = sim_queue(tmp_path, patience={"stall_s": 30.0})
    queue.world.speed["a"] = 0.0
    queue.submit("red", job("a"))
    queue.run(60.0)
    assert outcome(queue, "a") == ("stalled", "JOB_STALLED")
    assert not queue.world.living("a")


def test_a_job_that_fails_is_tried_again_and_given_up(tmp_path: Path) -> None:
    queue = sim_queue(tmp_path, patience={"attempts": 3})
    queue.world.fails = {"a": 2, "b": 99}
    queue.submit("red", job("a", seconds=15.0))
    queue.submit("red", job("b", seconds=15.0))
    queue.run(100.0)
    assert outcome(queue, "a") == ("finished", None)
    assert queue.state.attempts["a"] == 3
    assert outcome(queue, "b") == ("failed", "JOB_FAILED")
    end = queue.state.jobs["b"].end
    assert end is not None
    assert "TASK: it broke" in end.message
    slots = [s.since_unix_s // SLOT_S for s in queue.state.jobs["b"].progress.segments]
    assert len(set(slots)) == 3  # not again in the same slot


def test_a_job_that_does_not_save_in_time_is_ended_all_the_same(tmp_path: Path) -> None:
    queue = sim_queue(tmp_path, patience={"save_s": 5.0})
    queue.world.save_s = 1e9
    queue.submit("red", job("a", seconds=100.0))
    queue.run(15.0)
    queue.cancel("red", "a")
    queue.run(25.0)
    assert outcome(queue, "a") == ("cancelled", None)
    assert not queue.world.living("a")


def test_prices_reject_jobs_that_cannot_be_in_time(tmp_path: Path) -> None:
    queue = sim_queue(tmp_path, policy="pd_ors", capacity=2.0)
    queue.submit("red", job("a", seconds=100.0, deadline_s=20.0, urgency=6.0))
    queue.submit("red", job("b", seconds=20.0, deadline_s=100.0))
    queue.run(60.0)
    assert outcome(queue, "a") == ("rejected", "VALUE_TOO_LOW")
    assert outcome(queue, "b") == ("finished", None)
    assert utility_of_end(queue.state.jobs["a"]) == 0.0


def test_the_achieved_value_is_independent_of_later_slot_lengths(tmp_path: Path) -> None:
    queue = sim_queue(tmp_path)
    queue.submit("red", job("a", seconds=40.0, deadline_s=30.0))
    queue.run(80.0)
    value = utility_of_end(queue.state.jobs["a"])
    assert value is not None and 0.0 < value < queue.state.jobs["a"].request.value.value
    queue.die()
    queue.config = queue.config.model_copy(update={"slot_s": 3 * SLOT_S})
    queue.run(200.0)
    assert queue.state.config is not None and queue.state.config.slot_s == 3 * SLOT_S
    assert utility_of_end(queue.state.jobs["a"]) == value


def test_places_count_where_order_does(tmp_path: Path) -> None:
    queue = sim_queue(tmp_path, capacity=2.0)
    queue.submit("blue", job("a", seconds=15.0))
    queue.run(3.0)
    for name in ("b", "c", "d"):
        queue.submit("red", job(name, seconds=15.0))
    queue.tick()
    refused = queue.move("red", "d", position="first")
    queue.move("red", "d", position="before", before="b")
    queue.tick()
    assert queue.state.answers[refused].code == "QUEUE_DENIED"  # it would pass blue's
    assert [j.name for j in queue.state.living()] == ["a", "d", "b", "c"]
    queue.move("red", "b", position="last")
    queue.move("boss", "c", position="first")
    queue.tick()
    assert [j.name for j in queue.state.living()] == ["c", "a", "d", "b"]
    nothing = queue.move("red", "d")
    itself = queue.move("red", "d", position="before", before="d")
    nobody = queue.move("red", "d", position="before", before="z")
    queue.tick()
    assert {queue.state.answers[i].code for i in (nothing, itself, nobody)} == {"QUEUE_REQUEST"}
    queue.run(120.0)
    ends = {j.name: j.end.unix_s for j in queue.state.jobs.values() if j.end}
    assert sorted(ends, key=lambda name: ends[name]) == ["a", "c", "d", "b"]


def test_a_changed_value_is_shown_to_the_policy(tmp_path: Path) -> None:
    queue = sim_queue(tmp_path, capacity=2.0, policy="pd_ors")
    queue.submit("red", job("a", seconds=30.0, value=50.0, deadline_s=300.0))
    queue.run(3.0)
    queue.submit("red", job("b", seconds=20.0, value=1.0, deadline_s=300.0))
    queue.run(11.0)
    queue.move("red", "b", value=ValueChange(value=80.0))
    queue.run(21.0)
    slot = queue.state.generation.slots[-1]
    assert "b" in slot.arrived
    assert "b" in slot.gone
    assert slot.jobs["b"].value.value == 80.0
    queue.run(120.0)
    assert outcome(queue, "b") == ("finished", None)


def test_jobs_continue_in_a_new_policy_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("geo_ray.scheduler.queue.loop.GENERATION_SLOTS", 3)
    for policy in ("fifo", "pd_ors"):
        queue = sim_queue(tmp_path / policy, policy=policy)
        (tmp_path / policy).mkdir()
        queue.submit("red", job("a", seconds=75.0, deadline_s=40.0))
        queue.run(100.0)
        assert queue.state.generation.number >= 3
        assert outcome(queue, "a") == ("finished", None)
        assert queue.state.attempts["a"] == 1


def test_a_changed_configuration_begins_a_policy_generation(tmp_path: Path) -> None:
    queue = sim_queue(tmp_path)
    queue.submit("red", job("a", seconds=40.0))
    queue.run(15.0)
    queue.die()
    queue.config = queue.world.config = queue.config.model_copy(update={"policy": "drf"})
    queue.run(70.0)
    assert queue.state.generation.number == 2
    assert outcome(queue, "a") == ("finished", None)
    assert queue.state.attempts["a"] == 1


def test_orphan_submissions_are_ended(tmp_path: Path) -> None:
    queue = sim_queue(tmp_path)
    request = job("a", seconds=100.0)
    queue.world.act(Submit("a.0123abcd", "red", request, 7, {"us": 1}, "us"))
    queue.submit("red", request)
    queue.tick()
    queue.run(5.0)
    assert queue.world.submissions["geoq-q.a.0123abcd.7"].is_over
    assert len(queue.world.living("a")) == 1


def test_without_observations_no_decision_is_made(tmp_path: Path) -> None:
    queue = sim_queue(tmp_path)
    queue.submit("red", job("a"))
    queue.world.is_down = True
    assert any("nobody answers" in text for text in queue.tick())
    assert not queue.state.generation.slots
    assert "a" in queue.state.jobs  # taken in all the same
    queue.world.is_down = False
    queue.run(40.0)
    assert outcome(queue, "a") == ("finished", None)


def test_a_cluster_without_machines_has_no_slots_yet(tmp_path: Path) -> None:
    queue = sim_queue(tmp_path, capacity=0.0)
    queue.submit("red", job("a"))
    queue.run(30.0)
    assert not queue.state.generation.slots
    queue.world.capacity = dict.fromkeys(queue.world.capacity, (0.0, 8.0))
    queue.run(90.0)
    assert outcome(queue, "a") == ("finished", None)


def test_an_overtaken_queue_does_nothing_more(tmp_path: Path) -> None:
    old, new = sim_queue(tmp_path), sim_queue(tmp_path)
    new.world = old.world
    old.tick()
    new.token = 1
    new.tick()
    new.submit("red", job("a"))
    with pytest.raises(LeaseLostError):
        old.tick()
    assert not old.world.acts


def test_machines_are_asked_for_while_jobs_pay_for_them(tmp_path: Path) -> None:
    machine = {"type": "m5", "at": "us-east-1", "cap": 3, "cpus": 4.0, "usd_per_hour": 3600.0}
    regions = {"us": {"machines": machine}}
    queue = sim_queue(tmp_path, capacity=12.0, regions=regions, autoscaler="c", value_per_usd=1.0)
    queue.submit("red", job("cheap", seconds=20.0, value=1.0))
    queue.submit("red", job("dear", seconds=20.0, value=100.0))
    queue.run(5.0)
    target = target_of(queue.state, queue.config)
    assert target.regions[0].rows_per_s == 1.0  # one machine, of one row a second as it is reckoned
    assert AskMachines(target) in queue.world.acts
    assert "its machines cost" in str(report_of(queue.state).job("cheap"))
    queue.run(60.0)
    assert outcome(queue, "dear") == ("finished", None)
    assert target_of(queue.state, queue.config).regions[0].rows_per_s == 0.0


def test_a_job_of_data_anywhere_grows_and_shrinks_by_members(tmp_path: Path) -> None:
    queue = sim_queue(tmp_path, policy="drf", capacity=2.0)
    queue.submit("red", job("a", seconds=300.0, anywhere=True, most=3))
    queue.run(15.0)
    assert {n for n, s in queue.world.runs["a"].members.items() if s == "member"} == {
        "us", "eu", "asia"
    }  # fmt: skip
    queue.submit("blue", job("b", ("eu",), seconds=30.0))
    queue.run(25.0)
    assert queue.world.runs["a"].members["eu"] == "left"
    queue.run(75.0)
    assert outcome(queue, "b") == ("finished", None)
    assert queue.world.runs["a"].members["eu"] == "member"
    assert queue.state.attempts["a"] == 1


def test_the_report_is_what_the_journal_comes_to(tmp_path: Path) -> None:
    queue = sim_queue(tmp_path, capacity=2.0)
    queue.submit("red", job("a", seconds=12.0, value=8.0, deadline_s=30.0, urgency=1.0))
    queue.submit("red", job("b", seconds=12.0))
    queue.run(17.0)
    report = report_of(state_of(QueueJournal(queue.store).read()))
    assert report == report_of(queue.state)
    a, b = report.jobs[-1], report.jobs[0]
    assert (a.name, a.state, a.outcome, b.name) == ("a", "ended", "finished", "b")
    # Its slot of arrival is the one in which it came; it ended in the second: 1 slot later.
    assert a.utility == pytest.approx(8.0 / (1 + 2.718281828 ** (1 * (1 - 3))))


def test_a_job_that_is_starting_is_let_start(tmp_path: Path) -> None:
    """Starts take far longer than expected: no job is preempted before it could train."""
    queue = sim_queue(tmp_path, capacity=2.0, policy="pd_ors")
    queue.world.start_s = 45.0
    for name in ("a", "b"):
        queue.submit("red", job(name, seconds=20.0, deadline_s=300.0))
    queue.run(44.0)
    first = next(each for each in queue.state.living() if each.attempt is not None)
    assert first.state == "starting"
    queue.run(300.0)
    assert outcome(queue, "a") == outcome(queue, "b") == ("finished", None)
    assert queue.state.attempts == {"a": 1, "b": 1}
    assert queue.state.start_s == pytest.approx(46.0, abs=3.0)  # which later ones are planned with
