"""Checkpoints of joined regions: a resumed run ends as one that was never interrupted."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from geo_ray.base.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMissingError,
    ConfigChangedError,
    ConfigError,
    ModelMismatchError,
    RegionLostError,
    RunDirectoryError,
)
from geo_ray.joining.protocol import JoinTerms
from geo_ray.joining.rank import STRATEGIES
from geo_ray.joining.rank_saver import LoopState, RankSaver
from geo_ray.joining.save_round import SaveStage
from geo_ray.joining.service import Stage
from geo_ray.joining.site import JoinedTraining, join
from geo_ray.joining.slices import SavedRun
from tests.support.join_support import (
    WAIT_S,
    Loop,
    Ranks,
    adamw,
    run_loop,
    serving,
    small_model,
    terms,
    train_all,
)
from tests.support.train_support import eventually

REGIONS = ("eu", "us")
STEPS = 12
SAVE_AT = 4
OPTIONS: dict[str, dict[str, Any]] = {
    "nbsync": {},
    "hfa": {"k1": 3, "k2": 1},
    "diloco": {"interval": 3, "outer": {"kind": "nesterov", "lr": 0.7, "momentum": 0.5}},
    "diloco_streaming": {"interval": 4, "fragments": 2, "tau": 1},
    "decoupled": {"interval": 4, "fragments": 2, "outer": {"kind": "sgd"}},
}
EXACT = ("sma", "diloco", "sparseloco", "hfa")  # others exchange once more at a checkpoint


class CrashError(Exception):
    """The end of a loop."""


class Named:
    """An object with a state of one value."""

    def __init__(self, names: Any) -> None:
        self.names = names

    def state_dict(self) -> dict[str, Any]:
        return {"names": self.names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.names = state["names"]


def run_of(kind: str, **sections: Any) -> JoinTerms:
    strategy = {"kind": kind, **OPTIONS.get(kind, {"interval": 3})}
    rows = {"rows": 150} if kind == "nbsync" else {}
    codec = {"up": {"kind": "topk"}} if kind == "sparseloco" else {}
    return terms(REGIONS, STEPS, **{"strategy": strategy, "codec": codec} | rows | sections)


def makes_whole_steps(run: JoinTerms) -> bool:
    """Tell whether a step of the loop is one of the run."""
    return run.strategy.traits.region.worker_steps <= 1


Pools = Mapping[str, Ranks]


def started(
    loops: Mapping[str, Loop], address: str, pools: Pools
) -> dict[str, Callable[[], tuple[Tensor, int]]]:
    """Start the loops of process groups; return what runs the others in this process."""
    found = {}
    for name, loop in loops.items():
        placed = replace(loop, address=address)
        if name in pools:
            pools[name].start(run_loop, placed)
        else:
            found[name] = placed.run
    return found


def interrupted(
    run: JoinTerms, folder: Path, loops: Mapping[str, Loop], pools: Pools | None = None
) -> SavedRun:
    """Train to a checkpoint and a little further; return the server's part."""
    found: list[SavedRun] = []
    with serving(run, folder) as (server, address):

        def each(sync: JoinedTraining) -> None:
            """Begin to save; then wait in each step for a while, and crash when it is done."""
            if sync.steps < SAVE_AT:
                return
            with server.lock:
                has_begun = server.service.save is not None
            if not has_begun and not found:
                server.begin_save(5, [], WAIT_S)
            begun_s = time.monotonic()
            longest_s = 1.0  # until the regions meet, for which they may have to step further
            while not found and time.monotonic() < begun_s + longest_s:
                with server.lock:
                    save = server.service.save
                    if save is not None and save.stage is SaveStage.WRITING:
                        longest_s = WAIT_S
                    if save is not None and save.stage is SaveStage.READY and not found:
                        assert set(save.saved) == {n for n in loops if loops[n].checkpoints}
                        found.append(server.service.saved_run)
                time.sleep(0.01)
            if found:
                for name in pools or ():
                    server.lose(name, "the end of the test")
                raise CrashError

        here = started(loops, address, pools or {})
        results = train_all({name: partial(loop, each) for name, loop in here.items()})
        for pool in (pools or {}).values():
            pool.results()
        assert found, (results, server.service.save)
    return found[0]


def trained(
    run: JoinTerms,
    folder: Path,
    loops: Mapping[str, Loop],
    resumed: SavedRun | None = None,
    pools: Pools | None = None,
    firsts: dict[str, int] | None = None,
) -> dict[str, Tensor]:
    """Train to the end; return the parameters of each region, and in `firsts` its first step."""
    firsts = {} if firsts is None else firsts
    with serving(run, folder, resumed=resumed) as (server, address):
        here = started(loops, address, pools or {})

        def note(sync: JoinedTraining, name: str) -> None:
            firsts.setdefault(name, sync.steps)

        calls = {name: partial(loop, partial(note, name=name)) for name, loop in here.items()}
        results = {name: [found] for name, found in train_all(calls).items()}
        results |= {name: pool.results() for name, pool in (pools or {}).items()}
        failed = [each for all_ in results.values() for each in all_ if isinstance(each, Exception)]
        assert not failed, (failed, server.stage, server.service.failure)
        assert set(server.service.steps.values()) == {STEPS} or run.rows
        # The region that asked for the checkpoint had made so many steps; they are not repeated.
        assert resumed is None or max(firsts.values()) >= SAVE_AT + makes_whole_steps(run)
        return {name: found[0][0] for name, found in results.items()}


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_resumed_run_ends_as_an_uninterrupted_one(kind: str, tmp_path: Path) -> None:
    run = run_of(kind)
    plain = {name: Loop("", name, tmp_path) for name in REGIONS}
    saving = {name: Loop("", name, tmp_path, checkpoints=tmp_path / name) for name in REGIONS}
    expected = trained(run, tmp_path, plain) if kind in EXACT else None
    saved = interrupted(run, tmp_path, saving)
    found = trained(run, tmp_path, saving, saved)
    if kind in EXACT:
        assert expected is not None
        for name, vector in expected.items():
            assert torch.equal(found[name], vector), name
    torch.testing.assert_close(found["eu"], found["us"], rtol=0, atol=1e-6)


def stopped(
    run: JoinTerms, folder: Path, loops: Mapping[str, Loop]
) -> tuple[SavedRun, dict[str, int]]:
    """Train until the run is stopped at a checkpoint; return the server's part, and the steps."""
    with serving(run, folder) as (server, address):
        ended: list[bool] = []
        begun: list[int | None] = []

        def each(sync: JoinedTraining) -> None:
            """Ask for the stop; then wait in each step for a while, until the regions meet."""
            if sync.steps == SAVE_AT and not begun:
                begun.append(server.begin_save(5, [], WAIT_S, halt=True))
            until_s = time.monotonic() + 1.0
            while begun and not sync.done and time.monotonic() < until_s:
                with server.lock:
                    save = server.service.save
                    if save is not None and save.stage is not SaveStage.MEETING:
                        break
                time.sleep(0.01)
            if sync.done:
                ended.append(sync.stopped)
                assert not sync.evaluation_due

        def watch() -> SavedRun:
            eventually(
                lambda: server.service.save and server.service.save.stage is SaveStage.READY,
                "all regions have saved",
            )
            with server.lock:
                saved = server.service.saved_run
                assert server.stage is Stage.TRAINING  # all wait until the run has it
            server.end_save(None)
            return saved

        runs = {n: partial(replace(e, address=address).run, each) for n, e in loops.items()}
        found = train_all({**runs, "watch": watch})
        assert not [one for one in found.values() if isinstance(one, Exception)], found
        assert ended == [True] * len(loops)
        assert server.stage is Stage.STOPPED
        return found["watch"], {name: found[name][1] for name in loops}


@pytest.mark.parametrize("kind", ["sma", "diloco", "hfa", "diloco_streaming", "async_local_sgd"])
def test_a_stopped_run_saves_and_continues(kind: str, tmp_path: Path) -> None:
    """No step is repeated, and none is lost."""
    run = run_of(kind)
    plain = {name: Loop("", name, tmp_path) for name in REGIONS}
    saving = {name: Loop("", name, tmp_path, checkpoints=tmp_path / name) for name in REGIONS}
    expected = trained(run, tmp_path, plain) if kind in EXACT else None
    saved, steps = stopped(run, tmp_path, saving)
    assert max(steps.values()) >= SAVE_AT and min(steps.values()) < STEPS
    firsts: dict[str, int] = {}
    found = trained(run, tmp_path, saving, saved, firsts=firsts)
    assert firsts == {name: step + makes_whole_steps(run) for name, step in steps.items()}
    if expected is not None:
        for name, vector in expected.items():
            assert torch.equal(found[name], vector), name
    torch.testing.assert_close(found["eu"], found["us"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["diloco", "one_step_delay"])
def test_a_run_continues_from_its_very_end(kind: str, tmp_path: Path) -> None:
    """The last checkpoint follows the last step; a resumed run with more steps begins there."""
    run = run_of(kind, saves_at_end=True, goal=f"steps {STEPS}")
    longer = run.model_copy(update={"steps": 2 * STEPS, "goal": f"steps {2 * STEPS}"})
    loops = {name: Loop("", name, tmp_path, checkpoints=tmp_path / name) for name in REGIONS}

    def ends(run: JoinTerms, resumed: SavedRun | None) -> tuple[dict[str, Any], SavedRun]:
        firsts: dict[str, int] = {}
        with serving(run, tmp_path, resumed=resumed) as (server, address):

            def watch() -> SavedRun:
                eventually(lambda: server.stage is Stage.DONE, "the model is here")
                keep = [] if resumed is None else [resumed.id]
                assert server.begin_save(0, keep, WAIT_S) is not None
                eventually(
                    lambda: server.service.save and server.service.save.stage is SaveStage.READY,
                    "all regions have saved",
                )
                with server.lock:
                    saved = server.service.saved_run
                server.end_save(None)
                return saved

            def note(sync: JoinedTraining, name: str) -> None:
                firsts.setdefault(name, sync.steps)

            runs = {
                name: partial(replace(loop, address=address).run, partial(note, name=name))
                for name, loop in loops.items()
            }
            found = train_all({**runs, "watch": watch})
            assert not [each for each in found.values() if isinstance(each, Exception)], found
            assert server.service.steps == dict.fromkeys(REGIONS, run.steps)
            first = 1 if resumed is None else max(resumed.steps.values()) + 1
            assert set(firsts.values()) == ({first} if first <= run.steps else set())
            return {name: found[name][0] for name in REGIONS}, found["watch"]

    at_end, saved = ends(run, None)
    assert saved.steps == dict.fromkeys(REGIONS, STEPS)
    again, _ = ends(run, saved)  # with the same goal, nothing is left to do
    found, _ = ends(longer, saved)
    for name in REGIONS:
        assert torch.equal(again[name], at_end[name])
    if kind == "diloco":  # others send what is left at the end of a run
        plain = {name: Loop("", name, tmp_path) for name in REGIONS}
        with serving(longer, tmp_path) as (_, address):
            calls = {n: replace(each, address=address).run for n, each in plain.items()}
            expected = train_all(calls)
        for name in REGIONS:
            assert torch.equal(found[name], expected[name][0]), name


def test_without_folders_ranks_do_not_wait_for_a_last_checkpoint(tmp_path: Path) -> None:
    run = run_of("diloco", saves_at_end=True)
    with serving(run, tmp_path) as (server, address):
        found = train_all({name: Loop(address, name, tmp_path).run for name in REGIONS})
        assert not [each for each in found.values() if isinstance(each, Exception)], found
        assert server.begin_save(0, [], WAIT_S) is None


@pytest.fixture(scope="module")
def ranks() -> Iterator[dict[int, Ranks]]:
    pools = {size: Ranks(size) for size in (2, 3)}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.mark.parametrize("kind", ["diloco", "one_step_delay", "diloco_streaming", "sma"])
def test_a_run_is_resumed_with_other_shardings(
    kind: str, ranks: dict[int, Ranks], tmp_path: Path
) -> None:
    """Saved by 1 and 2 ranks (FSDP2), resumed by 3 (FSDP2) and 1."""
    run = run_of(kind)
    eu = Loop("", "eu", tmp_path, checkpoints=tmp_path / "eu")
    us = Loop("", "us", tmp_path, checkpoints=tmp_path / "us")
    before = {"eu": eu, "us": replace(us, sharding="fsdp")}
    after = {"eu": replace(eu, sharding="fsdp"), "us": us}
    saved = interrupted(run, tmp_path, before, {"us": ranks[2]})
    assert len(saved.slices) == 2
    again = trained(run, tmp_path, {"eu": eu, "us": us}, saved)
    found = trained(run, tmp_path, after, saved, {"eu": ranks[3]})
    for vector in found.values():
        torch.testing.assert_close(vector, again["eu"], rtol=0, atol=2e-6)


def test_a_region_without_its_files_begins_as_a_copy(tmp_path: Path) -> None:
    """It has the run's parameters and outer state, but a new optimizer."""
    run = run_of("diloco")
    saving = {name: Loop("", name, tmp_path, checkpoints=tmp_path / name) for name in REGIONS}
    saved = interrupted(run, tmp_path, saving)
    lost = saving | {"us": Loop("", "us", tmp_path, checkpoints=tmp_path / "elsewhere")}
    found = trained(run, tmp_path, lost, saved)
    assert torch.equal(found["eu"], found["us"])
    whole = trained(run, tmp_path, saving, saved)
    assert not torch.equal(found["eu"], whole["eu"])


def test_a_region_that_joins_again_loads_its_optimizer(tmp_path: Path) -> None:
    """Its parameters come from the other region, its optimizer from its newest files."""
    run = terms(REGIONS, 60, strategy={"kind": "diloco", "interval": 3})
    saved = threading.Event()
    loaded: list[int] = []
    with serving(run, tmp_path) as (server, address):

        def first(sync: JoinedTraining) -> None:
            if sync.steps == SAVE_AT:
                server.begin_save(5, [], WAIT_S)
            save, until_s = server.service.save, time.monotonic() + WAIT_S
            while save is not None and save.stage is SaveStage.WRITING:
                assert time.monotonic() < until_s
                time.sleep(0.01)
            if save is not None and save.stage is SaveStage.READY:
                saved.set()
                raise CrashError

        def us() -> tuple[Tensor, int]:
            loop = Loop(address, "us", tmp_path, checkpoints=tmp_path)
            with pytest.raises(CrashError):
                loop.run(first)
            return loop.run()

        def wait(sync: JoinedTraining) -> None:
            while saved.is_set() and sync.steps > 50 and not server.service.waiting:
                if server.service.averagers.view.generation >= 3:
                    return
                time.sleep(0.01)
            time.sleep(0.02)

        load = LoopState.load

        def counted(loop: LoopState, root: Any, checkpoint: int, rank: int) -> None:
            loaded.append(checkpoint)
            load(loop, root, checkpoint, rank)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LoopState, "load", counted)
            eu = Loop(address, "eu", tmp_path, checkpoints=tmp_path)
            found = train_all({"eu": partial(eu.run, wait), "us": us})
    assert not [each for each in found.values() if isinstance(each, Exception)], found
    assert loaded == [5]
    assert torch.equal(found["eu"][0], found["us"][0])


def test_without_any_files_of_regions_a_run_is_not_resumed(tmp_path: Path) -> None:
    run = run_of("diloco")
    saving = {name: Loop("", name, tmp_path, checkpoints=tmp_path / name) for name in REGIONS}
    saved = interrupted(run, tmp_path, saving)
    with serving(run, tmp_path, resumed=saved) as (server, address):
        plain = {name: Loop(address, name, tmp_path).run for name in REGIONS}
        found = train_all(plain)
        assert isinstance(server.service.failure, CheckpointMissingError)
        assert {type(each) for each in found.values()} == {CheckpointMissingError}, found


@pytest.mark.parametrize(
    ("dtype", "codec", "error"),
    [
        ("bfloat16", {}, ModelMismatchError),
        ("float32", {"up": {"kind": "topk"}}, ConfigChangedError),
    ],
)
def test_all_regions_learn_at_once_that_a_run_cannot_be_resumed(
    dtype: str, codec: dict[str, Any], error: type[Exception], tmp_path: Path
) -> None:
    saving = {name: Loop("", name, tmp_path, checkpoints=tmp_path / name) for name in REGIONS}
    saved = interrupted(run_of("diloco"), tmp_path, saving)
    with serving(run_of("diloco", codec=codec), tmp_path, resumed=saved) as (server, address):
        loops = {n: replace(loop, address=address, dtype=dtype) for n, loop in saving.items()}
        found = train_all({name: loop.run for name, loop in loops.items()})
        assert {type(each) for each in found.values()} == {error}, found
        assert isinstance(server.service.failure, error)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (
            {"kind": "sma", "interval": 3},
            "strategy.kind is sma, but that of checkpoint 5 is diloco",
        ),
        ({"interval": 4}, "strategy.interval is 4, but that of checkpoint 5 is 3"),
        ({"outer": {"kind": "sgd"}}, "strategy.outer is .*sgd.*, but that .* is .*nesterov"),
    ],
)
def test_another_strategy_is_refused(
    strategy: dict[str, Any], message: str, tmp_path: Path
) -> None:
    saving = {name: Loop("", name, tmp_path, checkpoints=tmp_path / name) for name in REGIONS}
    saved = interrupted(run_of("diloco"), tmp_path, saving)
    before = {"kind": "diloco", **OPTIONS["diloco"]}
    other = strategy if "kind" in strategy else before | strategy
    with serving(run_of("diloco", strategy=other), tmp_path, resumed=saved) as (server, address):
        found = train_all({n: replace(e, address=address).run for n, e in saving.items()})
        assert {type(each) for each in found.values()} == {ConfigChangedError}, found
        assert isinstance(server.service.failure, ConfigChangedError)
        assert re.search(message, server.service.failure.message)


def test_a_rank_that_hangs_does_not_block_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Region us never writes its part: the checkpoint is ready without it after the deadline."""
    hangs = threading.Event()
    write = RankSaver._write

    def written(saver: RankSaver, order: Any) -> None:
        if "us" in str(saver._root):
            hangs.wait(WAIT_S)
            raise OSError("it hung")
        write(saver, order)

    monkeypatch.setattr(RankSaver, "_write", written)
    run = run_of("diloco")
    with serving(run, tmp_path) as (server, address):

        def each(sync: JoinedTraining) -> None:
            if sync.steps == SAVE_AT and server.service.save is None:
                server.begin_save(5, [], 5.0)
            until_s = time.monotonic() + WAIT_S
            while sync.steps == STEPS - 1 and time.monotonic() < until_s:
                save = server.service.save
                if save is not None and save.stage is SaveStage.READY:
                    hangs.set()
                    return
                time.sleep(0.01)

        loops = {name: Loop(address, name, tmp_path, checkpoints=tmp_path) for name in REGIONS}
        found = train_all({name: partial(loop.run, each) for name, loop in loops.items()})
        assert torch.equal(found["eu"][0], found["us"][0])
        save = server.service.save
        assert save is not None and save.saved == ("eu",)
        assert save.failed == {"us": "ranks [0] have not written their parts in time"}


def test_what_cannot_be_saved_is_refused_at_once(tmp_path: Path) -> None:
    """Before the wait for other regions."""
    run = terms(REGIONS, 4, strategy={"kind": "sma", "interval": 2})
    with (
        serving(run, tmp_path) as (_, address),
        join(address, region="eu", credentials=tmp_path / "eu.pem") as site,
    ):
        with pytest.raises(ConfigError, match="state 'n': a int cannot be saved"):
            site.begin(small_model(), state={"n": 3}, checkpoints=tmp_path)
        names = {"thing": Named({1, 2})}
        with pytest.raises(CheckpointError, match=r"state 'thing\.names': a value of type set"):
            site.begin(small_model(), state=names, checkpoints=tmp_path)
        with pytest.raises(RunDirectoryError, match=r"/proc/nowhere.* cannot be written"):
            site.begin(small_model(), checkpoints="/proc/nowhere")


def test_a_state_that_becomes_impossible_to_save_ends_the_loop(tmp_path: Path) -> None:
    """At the first save; otherwise no checkpoint would ever have this region."""
    with serving(run_of("diloco"), tmp_path) as (server, address):
        named = Named([])

        def us() -> None:
            model = small_model()
            optimizer = adamw(model)
            with (
                join(address, region="us", credentials=tmp_path / "us.pem") as site,
                site.training(model, state={"thing": named}, checkpoints=tmp_path) as sync,
            ):
                for _ in sync.batches(range(1000)):
                    named.names = {1}
                    if sync.steps == 1:
                        server.begin_save(5, [], WAIT_S)
                    optimizer.step()
                    sync.step(rows=1)

        eu = Loop(address, "eu", tmp_path, checkpoints=tmp_path)
        found = train_all({"eu": eu.run, "us": us})
        assert isinstance(found["us"], CheckpointError)
        assert "'thing.names': a value of type set" in found["us"].message
        assert found["eu"][1] == STEPS


def test_state_needs_a_folder(tmp_path: Path) -> None:
    run = terms(("eu",), 4, strategy={"kind": "sma", "interval": 2})
    model = small_model()
    with (
        serving(run, tmp_path) as (_, address),
        join(address, region="eu", credentials=tmp_path / "eu.pem") as site,
        pytest.raises(ConfigError, match="`state` is given without `checkpoints`"),
    ):
        site.begin(model, state={"optimizer": adamw(model)})


def test_parameters_in_bf16_resume_to_the_same_bits(tmp_path: Path) -> None:
    """The vector that is exchanged has more precision than the model."""
    run = run_of("diloco")
    plain = {name: Loop("", name, tmp_path, dtype="bfloat16") for name in REGIONS}
    saving = {name: replace(loop, checkpoints=tmp_path / name) for name, loop in plain.items()}
    expected = trained(run, tmp_path, plain)
    found = trained(run, tmp_path, saving, interrupted(run, tmp_path, saving))
    for name, vector in expected.items():
        assert torch.equal(found[name], vector), name


def test_a_checkpoint_that_only_the_regions_have_does_not_block_others(tmp_path: Path) -> None:
    """The run could not commit checkpoint 5, whose files the regions have: its id is used up."""
    run = run_of("diloco")
    with serving(run, tmp_path) as (server, address):
        saved: list[int] = []

        def each(sync: JoinedTraining) -> None:
            if sync.steps not in (2, 6):
                return
            begun = server.begin_save(5, [], WAIT_S)
            saved.extend(() if begun is None else [begun])

        def watch() -> None:
            until_s = time.monotonic() + WAIT_S
            while time.monotonic() < until_s and server.service.stage is not Stage.DONE:
                with server.lock:
                    save = server.service.save
                if save is not None and save.stage is SaveStage.READY:
                    assert not save.failed
                    server.end_save(None)
                time.sleep(0.005)

        def slow(sync: JoinedTraining) -> None:
            """Let each save end before the next one, and before the run."""
            each(sync)
            until_s = time.monotonic() + WAIT_S
            while sync.steps in (5, STEPS - 1) and server.service.save is not None:
                assert time.monotonic() < until_s
                time.sleep(0.01)

        loops = {name: Loop(address, name, tmp_path, checkpoints=tmp_path) for name in REGIONS}
        runs = {name: partial(loop.run, slow) for name, loop in loops.items()}
        found = train_all({**runs, "watch": watch})
        assert not [one for one in found.values() if isinstance(one, Exception)], found
        assert saved == [5, 6]
        assert server.service.save is None
    with serving(run, tmp_path) as (server, address):  # as after a restart from the beginning

        def later(sync: JoinedTraining) -> None:
            if sync.steps == 2:
                server.begin_save(5, [], WAIT_S)

        loops = {name: Loop(address, name, tmp_path, checkpoints=tmp_path) for name in REGIONS}
        train_all({name: partial(loop.run, later) for name, loop in loops.items()})
        save = server.service.save
        assert save is not None
        assert save.id == 7


def test_a_region_that_fails_while_it_saves_is_lost_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other region finishes while the thread that saves still hangs."""
    hangs, write = threading.Event(), RankSaver._write

    def written(saver: RankSaver, order: Any) -> None:
        if "us" in str(saver._root):
            hangs.wait(WAIT_S)
        write(saver, order)

    monkeypatch.setattr(RankSaver, "_write", written)
    monkeypatch.setattr("geo_ray.joining.rank_saver._CLOSE_S", 2 * WAIT_S)
    with serving(run_of("diloco"), tmp_path) as (server, address):
        eu, us = (Loop(address, name, tmp_path, checkpoints=tmp_path) for name in REGIONS)

        def fails(sync: JoinedTraining) -> None:
            if sync.steps == 2:
                server.begin_save(5, [], WAIT_S)
            if sync.steps == 4:
                raise CrashError

        def finishes() -> int:
            try:
                return eu.run()[1]
            finally:
                hangs.set()

        found = train_all({"eu": finishes, "us": partial(us.run, fails)})
        assert found["eu"] == STEPS
        assert isinstance(found["us"], CrashError)


def test_damaged_files_of_the_only_donor_end_the_run_at_once(tmp_path: Path) -> None:
    """Region us begins with a copy of eu, whose files are damaged; it must not wait for it."""
    run = run_of("diloco")
    saving = {name: Loop("", name, tmp_path, checkpoints=tmp_path / name) for name in REGIONS}
    saved = interrupted(run, tmp_path, saving)
    for path in (tmp_path / "eu").rglob("*.safetensors"):
        path.write_bytes(b"damaged")
    with serving(run, tmp_path, resumed=saved) as (server, address):
        eu = replace(saving["eu"], address=address)
        us = replace(eu, region="us", checkpoints=tmp_path / "elsewhere")
        found = train_all({"eu": eu.run, "us": us.run})
        assert isinstance(found["eu"], CheckpointCorruptError)
        assert "/eu/" in found["eu"].message
        assert isinstance(found["us"], RegionLostError), found
        assert isinstance(server.service.failure, RegionLostError)
