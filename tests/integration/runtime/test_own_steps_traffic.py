"""Bytes between workers with an optimizer and their server: those that a plan counts.

The expected numbers are written from docs/guides/workers.md and docs/design/planner-model.md.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from geo_ray.experiment.experiment import Experiment
from geo_ray.planner.request import Rental, Request, Site
from geo_ray.planner.timing import JobWork
from geo_ray.runs.plan_inputs import _pattern
from geo_ray.transport.lan import LanClient
from geo_ray.transport.links import LinkTable
from tests.support.region_support import InProcess, experiment_of

STEPS = 24
ADAMW, MOMENTUM = {"kind": "adamw", "lr": 0.01}, {"kind": "momentum", "lr": 0.01}
SGD = {"kind": "sgd", "lr": 0.01}
DILOCO = {"kind": "diloco", "interval": 6}
TWO = [{"name": "us-east"}, {"name": "eu-west"}]


def traffic(
    directory: Path, monkeypatch: pytest.MonkeyPatch, **sections: Any
) -> tuple[Experiment, float]:
    """Return a run, and the vectors of the model's length that its workers send and receive.

    Those of the start are not counted.
    """
    request, moved = LanClient.request, Counter[str]()

    def counted(client: LanClient, meta: Any, payload: Any = None, **about: Any) -> Any:
        answer, received = request(client, meta, payload, **about)
        for each in (payload, received):
            moved[meta["op"]] += 0 if each is None else memoryview(each).nbytes
        return answer, received

    monkeypatch.setattr(LanClient, "request", counted)
    train = {"steps": STEPS, "eval_every": 0, "optimizer_on": "worker"} | sections.pop("train", {})
    experiment = experiment_of(train=train, **sections)
    with InProcess(experiment, directory) as world:
        world.run(shared=False)
        model_bytes = 4 * world.params_P.numel()
    count = sum(moved[op] for op in ("push", "state", "optimizer", "put_moment"))
    return experiment, count / model_bytes


def planned_copies(experiment: Experiment, optimizer_copies: int, workers: int) -> float:
    """Return the copies of a worker that a plan counts."""
    interval = experiment.strategy.traits.exchange.interval
    names = experiment.region_names
    rental = Rental("t", "on_demand", lambda hours, age_h=0.0: 0.0, 1.0, 4, lan_s=2.0)
    sites = [
        Site(name, [rental], rental.usd, own_steps="always", optimizer_copies=optimizer_copies)
        for name in names
    ]
    work = JobWork(STEPS, 8, dict.fromkeys(names, 1), 1, _pattern(experiment, [interval]))
    request = Request(
        work, sites, LinkTable(), {}, names, [interval], [None],
        state_every=experiment.train.state_every,
    )  # fmt: skip
    return request.at(interval).sites[0].lan_s([workers]) / workers * STEPS


@pytest.mark.parametrize(
    ("strategy", "optimizer", "copies", "state_every", "sends"),
    [
        (DILOCO, ADAMW, 2, 100, 4),
        (DILOCO, MOMENTUM, 1, 100, 4),
        (DILOCO, SGD, 0, 100, 4),
        (DILOCO, ADAMW, 2, 4, 8),
        ({"kind": "sma", "interval": 6}, ADAMW, 2, 5, 8),
    ],
)
def test_the_only_worker_sends_its_optimizer_with_each_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    strategy: dict[str, Any], optimizer: dict[str, Any], copies: int, state_every: int, sends: int,
) -> None:  # fmt: skip
    experiment, found = traffic(
        tmp_path,
        monkeypatch,
        regions=TWO,
        strategy=strategy,
        optimizer=optimizer,
        train={"state_every": state_every},
    )
    assert found == pytest.approx(2 * sends * (2 + copies), rel=0.01)  # scalars
    assert found == pytest.approx(2 * planned_copies(experiment, copies, 1), rel=0.01)


@pytest.mark.parametrize(
    ("strategy", "sends"),
    [
        ({"kind": "ama", "interval": 6}, 2),
        ({"kind": "one_step_delay", "interval": 6}, 2),
        ({"kind": "diloco_streaming", "interval": 12, "fragments": 2, "tau": 3}, 3),
    ],
)
def test_it_sends_again_when_an_answer_is_merged_during_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: dict[str, Any], sends: int
) -> None:
    experiment, found = traffic(
        tmp_path, monkeypatch, regions=TWO, strategy=strategy, optimizer=ADAMW
    )
    planned = 2 * planned_copies(experiment, 2, 1)
    assert planned == pytest.approx(2 * 4 * sends * 4)
    at_end = 2 * (sends - 1) * 4  # no training follows the last exchange
    # An answer may arrive when the server has the state for another reason.
    assert 2 * 4 * 4 < found * 0.999 <= planned - at_end


def test_several_workers_send_their_optimizers_only_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    regions = [{"name": "us-east", "workers": 2}, {"name": "eu-west", "workers": 2}]
    experiment, found = traffic(
        tmp_path, monkeypatch, regions=regions, strategy=DILOCO, optimizer=ADAMW
    )
    planned = 4 * planned_copies(experiment, 2, 2)
    assert planned == pytest.approx(4 * 4 * 2)
    assert found == pytest.approx(planned + 4 * 2, rel=0.01)


def test_a_single_region_sends_after_so_many_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment, found = traffic(
        tmp_path,
        monkeypatch,
        regions=TWO[:1],
        strategy=DILOCO,
        optimizer=ADAMW,
        train={"state_every": 6},
    )
    assert found == pytest.approx(4 * 4, rel=0.01)
    assert found == pytest.approx(planned_copies(experiment, 2, 1), rel=0.01)
