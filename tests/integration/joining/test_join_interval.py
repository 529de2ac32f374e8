"""The interval between exchanges changes while regions train, over sockets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from geo_ray.joining.save_round import SaveStage
from geo_ray.joining.server import JoinServer
from geo_ray.joining.site import JoinedTraining
from geo_ray.joining.slices import SavedRun
from geo_ray.strategies.state import AveragerState
from tests.integration.joining.test_join_failover import Service, during
from tests.support.join_support import (
    WAIT_S,
    Loop,
    Ranks,
    adamw,
    loss_of,
    rows_of,
    run_loop,
    saved_run,
    served_model,
    serving,
    small_model,
    terms,
    train_all,
    vector_of,
)

REGIONS = ("eu", "us")
STEPS, LR, MOMENTUM = 12, 0.7, 0.5
OUTER = {"kind": "nesterov", "lr": LR, "momentum": MOMENTUM}
DILOCO = {"kind": "diloco", "interval": 3, "weights": "uniform", "outer": OUTER}
CHANGED = (3, 6, 8, 10, 12)
"""Exchanges if the interval changes from 3 to 2 between the first two of them."""


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    pool = Ranks(2)
    yield pool
    pool.close()


def plain_diloco(exchanges: Sequence[int]) -> Tensor:
    """DiLoCo in plain PyTorch that exchanges after these steps; the last one is the last step."""
    anchor = vector_of(small_model())
    velocity = torch.zeros_like(anchor)
    models = {name: small_model() for name in REGIONS}
    optimizers = {name: adamw(model) for name, model in models.items()}
    for step in range(exchanges[-1]):
        for name, model in models.items():
            optimizers[name].zero_grad()
            loss_of(model, rows_of(name, step)).backward()
            optimizers[name].step()
        if step + 1 in exchanges:
            delta = torch.stack([anchor - vector_of(model) for model in models.values()]).mean(0)
            velocity = MOMENTUM * velocity + delta
            anchor = anchor - LR * (delta + MOMENTUM * velocity)
            for model in models.values():
                nn.utils.vector_to_parameters(anchor.clone(), model.parameters())
    return anchor


def steps_of(events: list[dict[str, Any]], region: str) -> list[int]:
    """The steps after which a region has exchanged."""
    return [e["step"] for e in events if e["kind"] == "step" and e["region"] == region]


def change(server: JoinServer) -> Callable[[JoinedTraining], None]:
    """Ask for an interval of 2 after the fourth step of a region: the second round is open."""

    def each(sync: JoinedTraining) -> None:
        if sync.steps == 4:
            server.set_interval(2)

    return each


@pytest.mark.parametrize("holders", [1, 3])
def test_all_ranks_change_the_interval_at_the_same_step(
    holders: int, pair: Ranks, tmp_path: Path
) -> None:
    with serving(terms(REGIONS, STEPS, strategy=DILOCO, holders=holders), tmp_path) as (
        server,
        address,
    ):
        pair.start(run_loop, Loop(address, "us", tmp_path, "fsdp"))
        own = partial(Loop(address, "eu", tmp_path).run, change(server))
        found = [*train_all({"eu": own}).values(), *pair.results()]
        assert not [each for each in found if isinstance(each, Exception)], found
        events = server.news()
        for vector, _ in found:
            assert torch.equal(vector, served_model(server))
    for region in REGIONS:
        assert steps_of(events, region) == [*CHANGED]
    torch.testing.assert_close(found[0][0], plain_diloco(CHANGED), rtol=0, atol=2e-6)


def test_a_promoted_standby_continues_with_the_interval(tmp_path: Path) -> None:
    """The change is an entry of its log; the server is lost before the answer that tells it."""
    run = terms(REGIONS, STEPS, strategy=DILOCO)
    service = Service(run, tmp_path)
    first = service.servers[0]

    def lose() -> None:
        until_s = time.monotonic() + WAIT_S
        while first.service.averagers.interval != 2 and time.monotonic() < until_s:
            time.sleep(0.01)
        first._fence("killed by the test")
        service.promote()

    def wait(sync: JoinedTraining) -> None:
        change(first)(sync)
        until_s = time.monotonic() + WAIT_S
        while sync.steps == 5 and len(service.servers) == 1 and time.monotonic() < until_s:
            time.sleep(0.01)

    with during(service, lose):
        loops = {name: Loop(service.address, name, tmp_path).run for name in REGIONS}
        found = train_all({**loops, "eu": partial(loops["eu"], wait)})
    for name in REGIONS:
        assert not isinstance(found[name], Exception), found
        torch.testing.assert_close(found[name][0], plain_diloco(CHANGED), rtol=0, atol=2e-6)
    assert service.servers[-1].service.averagers.interval == 2


@pytest.mark.parametrize("holders", [1, 2])
def test_a_resumed_run_continues_with_the_interval(holders: int, tmp_path: Path) -> None:
    run, saved = terms(REGIONS, STEPS, strategy=DILOCO, holders=holders), list[SavedRun]()

    def loop_of(name: str, address: str) -> Loop:
        return Loop(address, name, tmp_path, checkpoints=tmp_path / name)

    with serving(run, tmp_path) as (server, address):

        def save(sync: JoinedTraining) -> None:
            """Save at step 8, the first exchange after the new interval."""
            change(server)(sync)
            if sync.steps == 7:
                server.begin_save(0, [], WAIT_S)
            until_s = time.monotonic() + WAIT_S
            while sync.steps == 8 and not saved and time.monotonic() < until_s:
                round_ = server.service.save
                if round_ is not None and round_.stage is SaveStage.READY:
                    saved.append(saved_run(server))
                time.sleep(0.01)

        us = loop_of("us", address).run
        found = train_all({"eu": partial(loop_of("eu", address).run, save), "us": us})
        assert not [each for each in found.values() if isinstance(each, Exception)], found
    with serving(run, tmp_path, resumed=saved[0]) as (server, address):
        found = train_all({name: loop_of(name, address).run for name in REGIONS})
        assert not [each for each in found.values() if isinstance(each, Exception)], found
        events = server.news()
        torch.testing.assert_close(served_model(server), plain_diloco(CHANGED), rtol=0, atol=2e-6)
    for region in REGIONS:
        assert steps_of(events, region) == [10, 12]


class KilledError(Exception):
    """Ends a loop as a crash does."""


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_adaptive_interval_while_a_region_is_lost_and_joins_again(
    ranks: int, pair: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All regions exchange after the same steps, also if the model is cut into other slices."""
    steps, intervals = 40, (3, 1, 4, 2)

    def decided(averager: AveragerState, *_: Any) -> int:
        at = averager.numbers["test"] = averager.numbers.get("test", 0.0) + 1
        return intervals[int(at) % len(intervals)]

    monkeypatch.setattr("geo_ray.strategies.diloco.adaptive_interval", decided)
    run = terms(REGIONS, steps, strategy={**DILOCO, "compute_fraction": 0.5})
    with serving(run, tmp_path) as (server, address):
        loops = {name: Loop(address, name, tmp_path) for name in REGIONS}

        def fail(sync: JoinedTraining) -> None:
            if sync.steps == 6:
                raise KilledError

        def twice() -> Any:
            with pytest.raises(KilledError):
                loops["us"].run(fail)
            if ranks == 1:
                return loops["us"].run()
            pair.start(run_loop, Loop(address, "us", tmp_path, "fsdp"))
            return pair.results()[0]

        def wait(sync: JoinedTraining) -> None:
            """Leave steps for the region that returns."""
            until_s = time.monotonic() + WAIT_S
            while sync.steps == steps // 2 and not is_back() and time.monotonic() < until_s:
                time.sleep(0.01)

        def is_back() -> bool:
            return bool(server.service.waiting) or server.service.averagers.view.generation > 2

        found = train_all({"eu": partial(loops["eu"].run, wait), "us": twice})
        for each in found.values():
            assert not isinstance(each, Exception), found
            assert torch.equal(each[0], served_model(server))
        events = server.news()
    lost, joined = ([e["kind"] for e in events].index(k) for k in ("region_lost", "region_joined"))
    own, other = steps_of(events, "eu"), steps_of(events[joined:], "us")
    assert steps_of(events[:lost], "us") == [3, 4]
    assert own[:8] == [3, 4, 8, 10, 13, 14, 18, 20] and own[-1] == steps
    assert other and other == own[-len(other) :]
