"""Configurations as jobs of a queue, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from geo_ray.base.errors import QueueRequestError, SpeedUnknownError
from geo_ray.base.load import load_tree, text_of
from geo_ray.experiment.experiment import Experiment
from geo_ray.runs.build import check_absent
from geo_ray.scheduler.queue.config import QueueConfig
from geo_ray.scheduler.queue.job_config import config_tree, run_tree, spec_of, split_rows
from geo_ray.scheduler.queue.job_spec import JobHints, JobRequest
from geo_ray.scheduler.queue.model import fraction_per_s
from tests.support.queue_support import queue_config

ROOT = Path(__file__).resolve().parents[3]
ELASTIC = ROOT / "configs" / "elastic.yaml"


def experiment(*overrides: str, path: Path = ELASTIC) -> Experiment:
    return load_tree(path, overrides, Experiment)


def queue() -> QueueConfig:
    return queue_config(regions={name: {} for name in ("us-east", "eu-west", "ap-south")})


def test_what_the_schedulers_know_is_what_the_configuration_says() -> None:
    spec = spec_of(experiment(), ROOT / "configs", JobHints(rows_per_s=100.0))
    assert {name: each.workers for name, each in spec.regions.items()} == {
        "us-east": 2, "eu-west": 2, "ap-south": 1
    }  # fmt: skip
    assert spec.rows_per_step == 5 * 16
    assert spec.steps == 600
    assert spec.regions["us-east"].cpus_of(2) == 2 * 1.0 + 2 * 0.5  # a shard, a bridge
    assert spec.regions["us-east"].cpus_of(0) == 0
    assert (spec.averager, spec.least_regions, spec.most_workers) == ("us-east", 1, 5)
    assert spec.speed.row_s == pytest.approx(0.01)
    assert spec.speed.every == 4


@pytest.mark.parametrize(
    ("emulate", "fixed_s", "row_s"),
    [
        ("{step_s: 0.1}", 0.1, 0.0),
        ("{step_s: 0.1, step_s_by_region: {eu-west: 0.4}}", 0.4, 0.0),
        ("{rows_per_s_by_region: {us-east: [50], eu-west: [20, 80], ap-south: [40]}}", 0.0, 0.05),
    ],
)
def test_an_emulated_speed_is_the_slowest(emulate: str, fixed_s: float, row_s: float) -> None:
    spec = spec_of(experiment(f"emulate={emulate}"), ROOT / "configs", JobHints())
    assert (spec.speed.fixed_s, spec.speed.row_s) == pytest.approx((fixed_s, row_s))


def test_a_speed_that_nobody_knows_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(SpeedUnknownError, match="no profile"):
        spec_of(experiment(f"run.dir={tmp_path}", "emulate=null"), ROOT / "configs", JobHints())


def test_a_profile_is_found(tmp_path: Path) -> None:
    from geo_ray.data.tasks.load import load_task
    from geo_ray.planner.profile import Profile, StepPoint, save_profile
    from geo_ray.runs.build import parameter_count
    from geo_ray.runs.follow_plan import model_id

    found = experiment(f"run.dir={tmp_path}", "emulate=null")
    size = parameter_count(load_task(found.task, ROOT / "configs"), found.seed)
    points = tuple(
        StepPoint(
            region=name,
            machine="here",
            workers=1,
            rows=rows,
            step_s=0.02 + 0.001 * rows * (2 if name == "eu-west" else 1),
            spread=0.0,
            steps=5,
        )
        for name in found.region_names
        for rows in (8, 16)
    )
    profile = Profile(model=model_id(found, ROOT / "configs", size), hardware="x", steps=points)
    (tmp_path / "profiles").mkdir()
    save_profile(profile, tmp_path / "profiles" / "elastic.json")
    spec = spec_of(found, ROOT / "configs", JobHints())
    assert spec.speed.fixed_s == pytest.approx(0.02)
    assert spec.speed.row_s == pytest.approx(0.002)


def test_regions_that_are_not_the_clusters_own_are_refused() -> None:
    sites = "[{name: a, at: us-east}, {name: b, at: us-east}]"
    changed = experiment(f"regions={sites}", "members.absent=[]", "averager.region=a")
    with pytest.raises(QueueRequestError, match="must be distinct"):
        spec_of(changed, ROOT / "configs", JobHints(rows_per_s=1.0))


def test_data_anywhere_are_counted_together() -> None:
    with pytest.raises(QueueRequestError, match="total"):
        spec_of(experiment(), ROOT / "configs", JobHints(rows_per_s=1.0, anywhere=True))
    reports_digest = experiment("train.count=total")
    spec = spec_of(reports_digest, ROOT / "configs", JobHints(rows_per_s=1.0, anywhere=True))
    assert spec.least_regions == 1


def tree_of(workers: dict[str, int], averager: str, *overrides: str, **hints: Any) -> Experiment:
    found = experiment(*overrides, *(["train.count=total"] if hints else []))
    spec = spec_of(found, ROOT / "configs", JobHints(rows_per_s=100.0, **hints))
    request = JobRequest(name="mine", config=config_tree(found), spec=spec)
    tree = run_tree(request, "mine.0123abcd", workers, averager, queue())
    return load_tree(text_of(tree, ROOT / "configs"), (), Experiment)


def test_a_step_has_as_many_rows_whoever_computes_them() -> None:
    made = tree_of({"us-east": 3, "ap-south": 1}, "ap-south")
    assert (made.name, made.cluster.kind, made.run.again) == (
        "mine.0123abcd",
        "existing",
        "resume",
    )
    assert made.run.dir.endswith("/runs/q")
    us, eu, asia = made.regions
    assert us.batch_sizes == (11, 11, 10)
    assert eu.workers == 2
    assert asia.batch_sizes is None
    assert made.members.absent == ("eu-west",)
    assert made.members.min == 1
    assert made.averager_region == "ap-south"


def test_who_is_there_takes_part_and_nobody_else() -> None:
    """Attempts of one job: each is told anew who is absent, whatever its owner or another said."""
    everybody = {"us-east": 2, "eu-west": 2, "ap-south": 1}
    assert tree_of(everybody, "us-east").members.absent == ()  # its owner said ap-south
    two = tree_of({"us-east": 2, "ap-south": 1}, "us-east")
    one = tree_of({"ap-south": 1}, "ap-south")
    assert two.members.absent == ("eu-west",) and two.present_names == ("us-east", "ap-south")
    assert one.members.absent == ("us-east", "eu-west") and one.averager_region == "ap-south"
    for each in (two, one):
        check_absent(each)
    waits = tree_of(everybody, "us-east", "members.min=null")
    assert (waits.members.absent, waits.members.min) == ((), None)


@pytest.mark.parametrize(
    ("averager", "there", "leader", "standbys"),
    [
        ("{}", "us-east ap-south", "us-east", ()),
        ("{standby: auto}", "us-east", "us-east", ("auto",)),
        ("{standby: eu-west}", "us-east ap-south", "us-east", ("auto",)),
        ("{standby: eu-west}", "eu-west ap-south", "eu-west", ("auto",)),
        ("{standby: eu-west, next_standbys: [ap-south]}", "us-east ap-south", "us-east",
         ("ap-south",)),
        ("{standby: eu-west, next_standbys: [ap-south]}", "us-east eu-west ap-south", "ap-south",
         ("eu-west",)),
        ("{standby: auto, next_standbys: [ap-south]}", "us-east eu-west ap-south", "us-east",
         ("auto", "ap-south")),
    ],
)  # fmt: skip
def test_who_is_absent_or_hosts_the_averager_does_not_stand_by(
    averager: str, there: str, leader: str, standbys: tuple[str, ...]
) -> None:
    overrides = ("members.absent=[]", f"averager={averager}")
    made = tree_of(dict.fromkeys(there.split(), 1), leader, *overrides)
    config = made.averager
    found = () if config.standby is None else (config.standby, *config.next_standbys)
    assert made.averager_region == leader and found == standbys


def test_a_job_of_data_anywhere_has_all_regions_of_the_queue() -> None:
    made = tree_of({"eu-west": 1}, "eu-west", anywhere=True)
    assert made.region_names == ("us-east", "eu-west", "ap-south")
    assert set(made.members.absent) == {"us-east", "ap-south"}


@pytest.mark.parametrize(("rows", "workers"), [(16, 1), (16, 3), (5, 5), (100, 7)])
def test_rows_are_split_evenly(rows: int, workers: int) -> None:
    found = split_rows(rows, workers)
    assert sum(found) == rows
    assert len(found) == workers
    assert max(found) - min(found) <= 1


def test_the_pace_is_that_of_steps_and_exchanges() -> None:
    """Against the rule written out: a step, and its part of the exchange that is waited for."""
    spec = spec_of(experiment("emulate={step_s: 0.1}"), ROOT / "configs", JobHints())
    config = queue().model_copy(update={"link": queue().link.model_copy(update={"mbps": 8.0})})
    model_bytes = spec.speed.model_bytes
    exchange_s = 2 * model_bytes * 8e-6 / 8.0  # sma stands still for it, every 4 steps
    workers = {"us-east": 2, "eu-west": 2, "ap-south": 1}
    step_time_s = 0.1 + exchange_s / 4
    assert fraction_per_s(spec, workers, "us-east", config) == pytest.approx(
        1 / (600 * step_time_s)
    )
