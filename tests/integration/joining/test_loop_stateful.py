"""`sync` in a user's own checkpoint of `torch.distributed.checkpoint`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from geo_ray.base.errors import CheckpointMismatchError
from geo_ray.joining.checkpoint import SafetensorsReader, SafetensorsWriter
from geo_ray.joining.save_round import SaveStage
from geo_ray.joining.server import JoinServer
from geo_ray.joining.service import SavedRun
from geo_ray.joining.site import JoinedTraining, join
from tests.support.join_support import (
    WAIT_S,
    Loop,
    Ranks,
    adamw,
    loss_of,
    rows_of,
    serving,
    terms,
    train_all,
    vector_of,
)

REGIONS = ("eu", "us")
STEPS, INTERVAL = 12, 4
SAVED_AT = 4  # the run's checkpoint
OWN_AT = 6  # the checkpoint of the loop, two steps into the next round
DILOCO = {
    "kind": "diloco",
    "interval": INTERVAL,
    "outer": {"kind": "nesterov", "lr": 0.7, "momentum": 0.5},
}


class StopError(Exception):
    """The end of a loop."""


class App(Stateful):
    """Model and optimizer, as in the tutorials of torch."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


@dataclass(frozen=True)
class OwnLoop:
    """A loop that saves and loads its own folder; picklable.

    Attributes:
        loop: address, region and files.
        own: its own folder.
        loads: whether it begins with the state there.
        until: steps after which it raises `StopError`; 0: it trains to the end.
        format: of the folder: ``ours`` or ``torch``.
    """

    loop: Loop
    own: Path
    loads: bool = False
    until: int = 0
    format: str = "ours"

    def save(self, state: dict[str, Any]) -> None:
        if self.format == "ours":
            dcp.save(state, storage_writer=SafetensorsWriter(self.own))
        else:
            dcp.save(state, checkpoint_id=self.own)

    def load(self, state: dict[str, Any]) -> None:
        if self.format == "ours":
            dcp.load(state, storage_reader=SafetensorsReader(self.own))
        else:
            dcp.load(state, checkpoint_id=self.own)

    def run(
        self, each: Callable[[JoinedTraining], None] | None = None, group: Any = None
    ) -> tuple[Tensor, int]:
        """Train; returns the parameters and the steps before the first own step."""
        loop = self.loop
        rank = 0 if group is None else torch.distributed.get_rank(group)
        world_size = 1 if group is None else torch.distributed.get_world_size(group)
        model = loop.model(world_size)
        optimizer = adamw(model)
        with (
            join(
                loop.address,
                region=loop.region,
                credentials=loop.folder / f"{loop.region}.pem",
                group=group,
                wait_s=WAIT_S,
            ) as site,
            site.training(
                model,
                state={} if loop.checkpoints is None else {"optimizer": optimizer},
                checkpoints=loop.checkpoints,
            ) as sync,
        ):
            assert isinstance(sync, Stateful)
            state = {"app": App(model, optimizer), "sync": sync}
            if self.loads:
                self.load(state)
            first = sync.steps
            for _ in sync.batches(range(1000)):
                x, y = rows_of(loop.region, sync.steps, rank, world_size)
                loss = loss_of(model, (x, y))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                sync.step(rows=len(x), loss=loss)
                if each is not None:
                    each(sync)
                if self.until and sync.steps == OWN_AT:
                    self.save(state)
                if sync.steps == self.until:
                    raise StopError
        return vector_of(model), first


def run_own(loop: OwnLoop, group: Any) -> tuple[Tensor, int]:
    return loop.run(group=group)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(2)
    yield pool
    pool.close()


def saved_run(server: JoinServer, found: list[SavedRun]) -> Callable[[JoinedTraining], None]:
    """Make the run's checkpoint at the end of the first round."""

    def each(sync: JoinedTraining) -> None:
        if sync.steps == SAVED_AT - 1:
            server.begin_save(5, [], WAIT_S)
        until_s = time.monotonic() + WAIT_S
        while sync.steps == SAVED_AT and not found:
            assert time.monotonic() < until_s
            with server.lock:
                save = server.service.save
                if save is not None and save.stage is SaveStage.READY and not found:
                    found.append(server.service.saved_run)
            time.sleep(0.01)

    return each


@pytest.mark.parametrize(
    ("codec", "sharding", "format"),
    [
        ({}, "none", "ours"),
        ({"up": {"kind": "topk"}, "down": {"kind": "int8"}}, "none", "ours"),
        ({}, "none", "torch"),
        ({"up": {"kind": "topk"}}, "fsdp", "ours"),
    ],
    ids=["plain", "codec", "torch", "fsdp"],
)
def test_a_resumed_run_continues_in_the_middle_of_a_round(
    codec: dict[str, Any], sharding: str, format: str, ranks: Ranks, tmp_path: Path
) -> None:
    """The run's checkpoint is that of step 4; each region continues at its own one of step 6."""
    run = terms(REGIONS, STEPS, strategy=DILOCO, codec=codec)
    loops = {name: Loop("", name, tmp_path, checkpoints=tmp_path / name) for name in REGIONS}
    own = {
        name: OwnLoop(loop, tmp_path / f"own-{name}", format=format) for name, loop in loops.items()
    }
    own["us"] = replace(own["us"], loop=replace(own["us"].loop, sharding=sharding))

    def train(
        resumed: SavedRun | None = None, **options: Any
    ) -> tuple[dict[str, Any], list[SavedRun]]:
        found: list[SavedRun] = []
        with serving(run, tmp_path, resumed=resumed) as (server, address):
            placed = {
                name: replace(each, loop=replace(each.loop, address=address), **options)
                for name, each in own.items()
            }
            if sharding != "none":
                ranks.start(run_own, placed.pop("us"))
            watch = saved_run(server, found) if options.get("until") else None
            results = train_all({n: partial(each.run, watch) for n, each in placed.items()})
            if sharding != "none":
                results["us"] = ranks.results()[0]
        return results, found

    expected, _ = train()
    stopped, (saved,) = train(until=OWN_AT + 1)
    assert {type(each) for each in stopped.values()} == {StopError}, stopped
    found, _ = train(saved, loads=True)
    for name in REGIONS:
        assert not isinstance(found[name], Exception), found
        assert found[name][1] == OWN_AT
        assert torch.equal(found[name][0], expected[name][0]), name


def alone(
    folder: Path, each: Callable[[JoinedTraining], None], **sections: Any
) -> tuple[Tensor, list[dict[str, Any]]]:
    """Train the only region of a run; returns the parameters and the events."""
    folder.mkdir()
    run = terms(("eu",), STEPS, **({"strategy": DILOCO} | sections))
    with serving(run, folder) as (server, address):
        loop = OwnLoop(Loop(address, "eu", folder), folder / "own")
        found = train_all({"eu": partial(loop.run, each)})
        assert not isinstance(found["eu"], Exception), found
        return found["eu"][0], server.news()


def test_a_step_back_within_a_round(tmp_path: Path) -> None:
    """In the same training: what was counted since does not count."""
    kept: list[dict[str, Any]] = []
    went: list[int] = []

    def each(sync: JoinedTraining) -> None:
        if sync.steps == OWN_AT and not kept:
            kept.append(sync.state_dict())
        if sync.steps == OWN_AT + 1 and not went:
            went.append(sync.steps)
            sync.load_state_dict(kept[0])
            assert sync.steps == OWN_AT

    _, events = alone(tmp_path / "a", each, codec={"up": {"kind": "topk"}})
    steps = [e for e in events if e["kind"] == "step"]
    assert went == [OWN_AT + 1]
    assert sum(e["samples"] for e in steps) == STEPS * 6
    assert [e["step"] for e in steps] == [4, 8, 12]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("round", r"of round 1, but the run is at round 2 .*"),
        ("run", r"of region 'eu' in run 'other', not of 'eu' in 'run'"),
        ("region", r"of region 'us' in run 'run', not of 'eu' in 'run'"),
        ("rank", "has no 'rank-00000'"),
        ("slices", "another number of ranks or another sharding"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(what: str, message: str, tmp_path: Path) -> None:
    kept: dict[str, Any] = {}
    refused: list[int] = []

    def each(sync: JoinedTraining) -> None:
        if sync.steps == OWN_AT:
            kept.update(sync.state_dict())
        if sync.steps != (OWN_AT + INTERVAL if what == "round" else OWN_AT):
            return
        tensors, control = kept["rank-00000"]
        other = {"run": "other", "region": "us", "slices": [[[0, 5]]]}
        changed = control | ({what: other[what]} if what in other else {})
        key = "rank-00001" if what == "rank" else "rank-00000"
        with pytest.raises(CheckpointMismatchError, match=message) as caught:
            sync.load_state_dict({key: (tensors, changed)})
        assert "without `sync`" in caught.value.fix
        refused.append(sync.steps)

    expected, _ = alone(tmp_path / "a", lambda _: None)
    found, _ = alone(tmp_path / "b", each)
    assert refused
    assert torch.equal(found, expected)


def test_an_exchange_that_is_in_flight(tmp_path: Path) -> None:
    """Its answer is merged after a step back; a state from before it is refused."""
    states: dict[int, dict[str, Any]] = {}
    refused: list[int] = []

    def each(sync: JoinedTraining) -> None:
        states.setdefault(sync.steps, sync.state_dict())
        now, before = (states.get(sync.steps - back, {}).get("rank-00000") for back in (0, 1))
        if now is None or before is None or now[1]["open"] is None:
            return
        if (
            before[1]["open"] is None
            and before[1]["averager_version"] == (now[1]["averager_version"])
        ):
            with pytest.raises(CheckpointMismatchError, match="another exchange"):
                sync.load_state_dict(states[sync.steps - 1])
            sync.load_state_dict(sync.state_dict())
            refused.append(sync.steps)

    alone(tmp_path / "a", each, strategy={"kind": "one_step_delay", "interval": 4})
    assert refused


def test_running_statistics_and_parameters_in_bf16(tmp_path: Path) -> None:
    """A step back restores the buffers and the precision beyond bf16."""
    run = terms(("eu",), 8, strategy=DILOCO)
    with serving(run, tmp_path) as (_, address):
        model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5)).to(torch.bfloat16)
        path = tmp_path / "eu.pem"
        with join(address, region="eu", credentials=path) as site, site.training(model) as sync:
            kept: list[Any] = []
            while not sync.done:
                if sync.steps == 5 and not kept:
                    state = sync.state_dict()
                    before = {k: v.clone() for k, v in model.state_dict().items()}
                    for _ in range(2):
                        with torch.no_grad():
                            for p in model.parameters():
                                p.add_(0.25)
                        model(torch.randn(6, 7).bfloat16())
                        sync.step(rows=6)
                    sync.load_state_dict(state)
                    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
                    again = sync.state_dict()["rank-00000"][0]
                    first = state["rank-00000"][0]
                    assert {k: v.tolist() for k, v in again.items()} == {
                        k: v.tolist() for k, v in first.items()
                    }
                    kept.append(state)
                model(torch.randn(6, 7).bfloat16())
                sync.step(rows=6)
            assert kept
