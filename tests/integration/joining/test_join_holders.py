"""Averagers in several processes: ranks exchange each slice with its holder, over sockets."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from geo_ray.base.errors import RegionLostError, ServerLostError
from geo_ray.joining.credentials import JoinCredentials
from geo_ray.joining.link import ServerLink
from geo_ray.joining.protocol import SERVER, JoinTerms, Outbound
from geo_ray.joining.save_round import SaveStage
from geo_ray.joining.server import HolderServer, JoinServer
from geo_ray.joining.service import Stage
from geo_ray.joining.site import JoinedTraining
from geo_ray.joining.slices import SavedRun
from geo_ray.transport.wire.message import Message
from geo_ray.transport.wire.sockets import Address
from tests.support.join_support import (
    HELD,
    WAIT_S,
    Loop,
    Ranks,
    run_loop,
    saved_run,
    served_model,
    serving,
    small_model,
    terms,
    train_all,
    vector_of,
)
from tests.support.train_support import eventually

REGIONS = ("eu", "us")
STEPS = 12
DILOCO = {"kind": "diloco", "interval": 3}


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    pool = Ranks(2)
    yield pool
    pool.close()


def trained(run: JoinTerms, folder: Path, pair: Ranks | None = None, **loop: Any) -> torch.Tensor:
    """Train all regions to the end; returns the model, which is equal everywhere."""
    folder.mkdir()
    with serving(run, folder) as (server, address):
        loops = {name: Loop(address, name, folder, **loop) for name in run.regions}
        if pair is not None:
            pair.start(run_loop, replace(loops.pop("us"), sharding="fsdp"))
        found: list[Any] = list(train_all({n: each.run for n, each in loops.items()}).values())
        found += [] if pair is None else pair.results()
        assert not [each for each in found if isinstance(each, Exception)], found
        assert server.stage is Stage.DONE
        model = served_model(server)
        for each, _ in found:
            assert torch.equal(each, model)
        exchanges = [each for each in server.news() if each["kind"] == "exchange"]
        is_whole = run.codec.up is None and run.strategy.kind != STREAMING["kind"]
        assert {each["bytes_received"] for each in exchanges} == {4 * model.numel()} or not is_whole
        if run.holders > 1:  # payloads do not pass through the server
            sizes = [each.holder.averagers.model_H.numel() for each in HELD[server]]
            assert min(sizes) > 0
            for holder, size in zip(HELD[server], sizes, strict=True):
                received = sum(sum(e["bytes_received"].values()) for e in holder.links().values())
                assert received > 4 * size or run.codec.up
        return model


STREAMING = {"kind": "diloco_streaming", "interval": 6, "fragments": 2, "tau": 2}


@pytest.mark.parametrize("strategy", [DILOCO, {"kind": "sma", "interval": 3}, STREAMING])
def test_the_model_does_not_depend_on_the_number_of_holders(
    strategy: dict[str, Any], pair: Ranks, tmp_path: Path
) -> None:
    found = [
        trained(terms(REGIONS, STEPS, strategy=strategy, holders=n), tmp_path / str(n), pair)
        for n in (1, 3)
    ]
    assert float((found[0] - vector_of(small_model())).abs().max()) > 0.01
    assert torch.equal(*found)


@pytest.mark.parametrize("codec", [{"up": {"kind": "topk"}}, {"up": {"kind": "powersgd"}}])
def test_codecs_work_per_slice(codec: dict[str, Any], tmp_path: Path) -> None:
    run = terms(REGIONS, STEPS, strategy=DILOCO, codec=codec, holders=2)
    model = trained(run, tmp_path / "run")
    assert float((model - vector_of(small_model())).abs().max()) > 0.01


def test_payloads_in_pieces(tmp_path: Path) -> None:
    run = terms(REGIONS, 3, strategy=DILOCO)
    found = [
        trained(run.model_copy(update={"holders": n}), tmp_path / str(n), width=45_003)
        for n in (1, 2)
    ]
    assert found[0].numel() > 6 * 2**16
    assert torch.equal(*found)


def test_a_region_joins_again(tmp_path: Path) -> None:
    """Its state comes from another region's, slice by slice from each holder."""
    steps = 30
    run = terms(REGIONS, steps, strategy=DILOCO, holders=3)

    class CrashError(Exception):
        pass

    with serving(run, tmp_path) as (server, address):

        def crash(sync: JoinedTraining) -> None:
            if sync.steps == 6:
                raise CrashError

        def wait(sync: JoinedTraining) -> None:
            """Leave steps for the region that returns."""
            while sync.steps == steps // 2 and server.service.averagers.view.generation < 3:
                if server.service.waiting:
                    return
                time.sleep(0.01)

        def twice() -> Any:
            loop = Loop(address, "us", tmp_path)
            with pytest.raises(CrashError):
                loop.run(crash)
            return loop.run()

        eu = Loop(address, "eu", tmp_path)
        found = train_all({"eu": partial(eu.run, wait), "us": twice})
        assert not [each for each in found.values() if isinstance(each, Exception)], found
        assert torch.equal(found["eu"][0], found["us"][0])
        assert torch.equal(found["eu"][0], served_model(server))
        joined = [each for each in server.news() if each["kind"] == "region_joined"]
        assert [each["region"] for each in joined] == ["us"]


def _hold(run_json: str, folder: Path, server: Any, orders: Any) -> None:
    """Hold slices until killed; the pipe asks for those of the checkpoint."""
    torch.set_num_threads(1)
    run = JoinTerms.model_validate_json(run_json)
    credentials = JoinCredentials.read(folder / f"{SERVER}.pem")
    own = HolderServer(run, 1, credentials, server)
    while orders.recv():
        with own.lock:
            orders.send(own.holder.averagers.saved())


class Killed:
    """A holder in another process."""

    def __init__(self, run: JoinTerms, folder: Path, server: JoinServer) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.support.join_support"])
        self.pipe, theirs = context.Pipe()
        arguments = (run.model_dump_json(), folder, server.address, theirs)
        self.process = context.Process(target=_hold, args=arguments, daemon=True)
        self.process.start()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


@contextmanager
def holding(run: JoinTerms, folder: Path, server: JoinServer) -> Iterator[Killed]:
    each = Killed(run, folder, server)
    try:
        yield each
    finally:
        each.process.kill()
        each.process.join(WAIT_S)


def test_a_holder_is_killed_after_other_slices_were_acknowledged(tmp_path: Path) -> None:
    """No slice commits; the run continues from its checkpoint, with more holders."""
    run = terms(REGIONS, STEPS, strategy=DILOCO, holders=2)
    expected = trained(run, tmp_path / "whole")
    folder, saved = tmp_path / "run", list[SavedRun]()
    folder.mkdir()
    loops = {name: Loop("", name, folder, checkpoints=tmp_path / name) for name in REGIONS}
    reached = threading.Barrier(len(REGIONS))
    with (
        serving(run, folder, here=()) as (server, address),
        holding(run, folder, server) as holder,
    ):

        def each(sync: JoinedTraining) -> None:
            """Save at step 3; stop the holder at step 8, before the next exchange."""
            if sync.steps == 2 and server.service.save is None and not saved:
                server.begin_save(0, [], WAIT_S)
            until_s = time.monotonic() + WAIT_S
            while 3 <= sync.steps < 6 and not saved and time.monotonic() < until_s:
                save = server.service.save
                if save is not None and save.stage is SaveStage.READY:
                    with server.lock:
                        if not saved:
                            holder.pipe.send(True)
                            own = server.service.saved_run
                            slices = (*own.slices, *holder.pipe.recv())
                            saved.append(replace(own, slices=slices))
                time.sleep(0.01)
            if sync.steps == 8:
                reached.wait(WAIT_S)  # both have the answers of the exchange before
                holder.signal(signal.SIGSTOP)

        def kill() -> None:
            """Kill it when the server has staged its slices of both regions."""
            until_s = time.monotonic() + WAIT_S
            while time.monotonic() < until_s:
                with server.lock:
                    regions = server.service._regions.values()
                    is_staged = [1 in e.headers or 0 in e.headers for e in regions]
                    if saved and server.service.version == 2 and is_staged == [True, True]:
                        break
                time.sleep(0.01)
            else:
                raise AssertionError("the updates did not come")
            holder.signal(signal.SIGKILL)
            holder.process.join(WAIT_S)
            server.lose_holder(1, "its process has ended")

        placed = {name: replace(loop, address=address) for name, loop in loops.items()}
        calls: dict[str, Any] = {n: partial(loop.run, each) for n, loop in placed.items()}
        found = train_all({**calls, "kill": kill})
        assert found["kill"] is None
        for name in REGIONS:
            assert isinstance(found[name], ServerLostError), found
        assert server.service.version == 2
        assert "averager process 2" in str(server.service.failure)
    more = run.model_copy(update={"holders": 3})
    with serving(more, folder, resumed=saved[0]) as (server, address):
        placed = {name: replace(loop, address=address) for name, loop in loops.items()}
        found = train_all({name: loop.run for name, loop in placed.items()})
        assert not [e for e in found.values() if isinstance(e, Exception)], found
        assert torch.equal(served_model(server), expected)
        for vector, _ in found.values():
            assert torch.equal(vector, expected)


@contextmanager
def behind(
    run: JoinTerms, folder: Path, advertised: str, *, lost_after_s: float = 1.0
) -> Iterator[tuple[JoinServer, str, HolderServer]]:
    """Serve a run of two holders, the second of which has another address for ranks."""
    with serving(run, folder, lost_after_s=lost_after_s, here=()) as (server, address):
        own = JoinCredentials.read(folder / f"{SERVER}.pem")
        holder = HolderServer(run, 1, own, server.address, advertised=advertised)
        HELD[server].append(holder)
        yield server, address, holder


REFUSES = "127.0.0.2"  # no process listens at this address of the machine


def test_no_rank_reaches_a_holder(tmp_path: Path) -> None:
    """Its port is closed for all: they hear which one after the time of a lost connection."""
    run = terms(REGIONS, STEPS, strategy=DILOCO, holders=2)
    with behind(run, tmp_path, REFUSES) as (server, address, holder):
        found = train_all({n: Loop(address, n, tmp_path).run for n in REGIONS})
        where = f"averager process 2 at {REFUSES}:{holder.address[1]}"
        for error in found.values():
            assert isinstance(error, RegionLostError), found
            assert where in str(error) and "refused" in str(error)
        assert "rank 'eu#0'" in str(found["eu"])
        lost = [each for each in server.news() if each["kind"] == "region_lost"]
        assert lost
        for each in lost:
            assert f"rank '{each['region']}#0'" in each["cause"] and where in each["cause"]


def test_one_region_does_not_reach_a_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others continue without it."""
    run = terms(REGIONS, STEPS, strategy=DILOCO, holders=2)
    connect = ServerLink.connect_holders

    def blocked(self: ServerLink, addresses: Sequence[Address], timeout_s: float) -> None:
        is_us = self._endpoint.identity.region.startswith("us")
        own = [(REFUSES, port) for _, port in addresses] if is_us else addresses
        connect(self, own, timeout_s)

    monkeypatch.setattr(ServerLink, "connect_holders", blocked)
    with behind(run, tmp_path, "127.0.0.1") as (server, address, holder):
        found = train_all({n: Loop(address, n, tmp_path).run for n in REGIONS})
        assert isinstance(found["us"], RegionLostError), found
        assert not isinstance(found["eu"], Exception), found
        assert torch.equal(found["eu"][0], served_model(server))
        (lost,) = [each for each in server.news() if each["kind"] == "region_lost"]
        assert lost["region"] == "us" and "rank 'us#0'" in lost["cause"]
        assert f"127.0.0.1:{holder.address[1]}" in lost["cause"]


class Forwarder:
    """Passes connections from another address on to a port, until it is closed."""

    def __init__(self, host: str, port: int) -> None:
        self.listener = socket.create_server((host, port))
        self.target, self.open = ("127.0.0.1", port), list[socket.socket]()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                far = socket.create_connection(self.target)
                self.open += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, source: socket.socket, to: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                to.sendall(data)
        self._end([source, to])

    def close(self) -> None:
        self._end([self.listener, *self.open])

    def _end(self, sockets: Sequence[socket.socket]) -> None:
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@pytest.mark.parametrize("returns", [False, True])
def test_the_connection_to_a_holder_is_lost_while_regions_train(
    tmp_path: Path, returns: bool
) -> None:
    """A rank that reaches it again in time continues."""
    run = terms(REGIONS, STEPS, strategy=DILOCO, holders=2)
    lost_after_s = WAIT_S if returns else 1.0
    with behind(run, tmp_path, REFUSES, lost_after_s=lost_after_s) as (server, address, holder):
        paths = [Forwarder(REFUSES, holder.address[1])]

        def each(sync: JoinedTraining) -> None:
            if sync.steps == 4:
                paths[0].close()
            if sync.steps == 5 and returns:
                unreached = server.service.unreached
                eventually(lambda: ("eu#0", 1) in unreached(), "the server knows it")
                paths.append(Forwarder(REFUSES, holder.address[1]))
                eventually(lambda: not unreached(), "the ranks reach it again")

        loop = Loop(address, "eu", tmp_path)
        found = train_all({"eu": partial(loop.run, each), "us": Loop(address, "us", tmp_path).run})
        if returns:
            for name in REGIONS:
                assert torch.equal(found[name][0], served_model(server))
        else:
            assert all(isinstance(error, RegionLostError) for error in found.values()), found
            lost = [each for each in server.news() if each["kind"] == "region_lost"]
            assert lost and f"{REFUSES}:{holder.address[1]}" in lost[0]["cause"]
        paths[-1].close()


def test_a_holder_that_is_away_itself_is_lost_for_all_regions(tmp_path: Path) -> None:
    run = terms(REGIONS, STEPS, strategy=DILOCO, holders=2)
    with behind(run, tmp_path, "127.0.0.1") as (server, address, holder):

        def each(sync: JoinedTraining) -> None:
            if sync.steps == 4:
                holder._endpoint.close(0.0)

        loop = Loop(address, "eu", tmp_path)
        found = train_all({"eu": partial(loop.run, each), "us": Loop(address, "us", tmp_path).run})
        assert all(isinstance(error, ServerLostError) for error in found.values()), found
        assert "averager process 2" in str(server.service.failure)
        assert "region_lost" not in {event["kind"] for event in server.news()}


def test_saved_slices_are_those_of_all_holders(tmp_path: Path) -> None:
    run = terms(("eu",), 4, strategy={"kind": "diloco", "interval": 2}, holders=3)
    found: list[SavedRun] = []
    with serving(run, tmp_path) as (server, address):

        def each(sync: JoinedTraining) -> None:
            if sync.steps == 1:
                server.begin_save(0, [], WAIT_S)
            while sync.steps == 2 and not found:
                save = server.service.save
                if save is not None and save.stage is SaveStage.READY:
                    found.append(saved_run(server))
                time.sleep(0.01)

        loop = Loop(address, "eu", tmp_path, checkpoints=tmp_path / "saved")
        results = train_all({"eu": partial(loop.run, each)})
        assert not isinstance(results["eu"], Exception), results
    ranges = [pair for part in found[0].slices for pair in part.ranges]
    assert [a for a, _ in ranges] == [0, *(b for _, b in ranges[:-1])]
    assert ranges[-1][1] == found[0].layout.size
    assert len(found[0].slices) == 3


def test_the_end_reaches_ranks_although_a_holder_is_slow_with_the_last_order(
    tmp_path: Path,
) -> None:
    """The server, which is closed at once, keeps the messages that wait for that holder."""
    run = terms(REGIONS, STEPS, strategy=DILOCO, holders=2, saves_at_end=True)
    with serving(run, tmp_path) as (server, address):
        (held,) = HELD[server]
        is_last, may_go_on, handle = threading.Event(), threading.Event(), held.holder.on_message

        def slow(peer: str, message: Message) -> list[Outbound]:
            if is_last.is_set() and message.kind == "order":
                assert may_go_on.wait(WAIT_S)
            return handle(peer, message)

        held.holder.on_message = slow  # type: ignore[method-assign]

        def close() -> None:
            eventually(lambda: server.stage is Stage.DONE, "all have finished")
            is_last.set()
            server.end_save(None)
            closing = threading.Thread(target=server.close)
            closing.start()
            closing.join(1.0)  # enough to lose them
            may_go_on.set()
            closing.join()

        ends = threading.Thread(target=close)
        ends.start()
        loops = {n: Loop(address, n, tmp_path, checkpoints=tmp_path / n) for n in REGIONS}
        found = train_all({name: each.run for name, each in loops.items()})
        ends.join()
        for each in found.values():
            assert not isinstance(each, Exception), repr(each)
