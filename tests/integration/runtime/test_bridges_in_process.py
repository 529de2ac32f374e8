"""A region's bridge dies in the middle of an exchange, and another one takes its place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_strategies_in_process import of_kind

from geo_ray.experiment.experiment import Experiment
from geo_ray.runtime.bridge import Bridge, PlacedReplies
from geo_ray.runtime.exchange.direct import DirectPath
from geo_ray.storage.folders import directory_of
from geo_ray.strategies.registry import STRATEGIES
from geo_ray.transport.session import Assembly
from geo_ray.transport.wire.message import Piece
from tests.support.region_support import (
    InProcess,
    Site,
    eventually,
    experiment_of,
    parts_reported,
)

HOME, FAR = "us-east", "eu-west"
REGIONS = [{"name": HOME}, {"name": FAR, "workers": 2}]
SECTIONS: dict[str, dict[str, Any]] = {
    "vectors": {"strategy": {"kind": "sma", "interval": 2}},
    "coded": {
        "strategy": {"kind": "diloco", "interval": 2, "outer": {"kind": "nesterov", "lr": 0.7}},
        "codec": {"up": {"kind": "int8"}, "down": {"kind": "int8"}},
    },
    "sparse": {
        "strategy": {"kind": "sma", "interval": 2},
        "codec": {"up": {"kind": "topk", "ratio": 0.05}},
    },
    "model_buffers": {
        "strategy": {"kind": "sma", "interval": 2},
        "task": {"use": f"{Path(__file__).parents[2] / 'support' / 'buffer_tasks.py'}:Stateful"},
    },
    "chunks": {
        "strategy": {"kind": "sma", "interval": 2},
        "task": {"use": "digits", "options": {"width": 40}},
        "transport": {"chunk_bytes": 4096},
    },
    "one by one": {"strategy": {"kind": "async_local_sgd", "interval": 2}},
    "shards": {
        "strategy": {"kind": "sma", "interval": 2},
        "regions": [{"name": HOME, "ps_shards": 2}, {"name": FAR, "ps_shards": 2}],
    },
}
WHERE = ("before it is sent", "before it is answered", "before the answer is fetched")
CHUNKS = "when a part of it is there"


def config(name: str) -> Experiment:
    train = {"steps": 12, "eval_every": 0, "statistics_batches": 0}
    return experiment_of(**{"regions": REGIONS, "train": train} | SECTIONS[name])


class Killer:
    """Ends the far region's bridge once, and has another one started."""

    def __init__(self) -> None:
        self.world: InProcess | None = None
        self.times = 0
        self._thread: threading.Thread | None = None

    def strike(self) -> None:
        site = self.site
        self.times += 1
        site.kill_bridge()
        self._thread = threading.Thread(target=site.replace_bridge)
        self._thread.start()

    @property
    def site(self) -> Site:
        assert self.world is not None
        return self.world.sites[FAR]

    def end(self) -> None:
        if self._thread is not None:
            self._thread.join(30.0)


@pytest.fixture
def killer() -> Iterator[Killer]:
    made = Killer()
    yield made
    made.end()


def kill_at(where: str, killer: Killer, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Strike at each third time that the far region's exchange is there, ``most`` times."""
    seen = 0

    def is_due() -> bool:
        nonlocal seen
        seen += 1
        return seen % 3 == 2 and killer.times < most

    handle, deliver, fetch = Bridge.handle, DirectPath.deliver, PlacedReplies.fetch

    def handled(self: Bridge, conn: Any, meta: Any, payload: Any) -> Any:
        if self is killer.site.bridge and meta["op"] == "update" and is_due():
            killer.strike()
        return handle(self, conn, meta, payload)

    def delivered(self: DirectPath, reply: Any) -> None:
        if reply.to == FAR and self._region == HOME and is_due():
            killer.strike()
        deliver(self, reply)

    def fetched(self: PlacedReplies, conn: Any, meta: Any) -> Any:
        bridge = killer.site.bridge
        if bridge is not None and self is bridge._placed and is_due():
            killer.strike()
        return fetch(self, conn, meta)

    complete = Assembly.complete

    def completed(self: Assembly, piece: Piece, payload: Any) -> Any:
        leader = killer.site.world.sites[HOME].endpoint
        first = piece.message is not None and piece.message.kind == "update"
        if leader._sessions[FAR]._assembly is self and first and is_due():
            assert payload.nbytes < piece.size_bytes
            killer.strike()
        return complete(self, piece, payload)

    patches: dict[str, Callable[[], None]] = {
        CHUNKS: lambda: monkeypatch.setattr(Assembly, "complete", completed),
        WHERE[0]: lambda: monkeypatch.setattr(Bridge, "handle", handled),
        WHERE[1]: lambda: monkeypatch.setattr(DirectPath, "deliver", delivered),
        WHERE[2]: lambda: monkeypatch.setattr(PlacedReplies, "fetch", fetched),
    }
    patches[where]()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The digest of each case when nothing goes wrong."""
    found: dict[str, str] = {}

    def of(name: str) -> str:
        if name not in found:
            with InProcess(config(name), tmp_path_factory.mktemp("undisturbed")) as world:
                first, second = world.run()
            assert first == second
            found[name] = first
        return found[name]

    return of


@pytest.mark.parametrize(
    ("name", "where"),
    [(name, where) for name in ("vectors", "shards") for where in WHERE]
    + [(name, where) for name in ("coded", "sparse") for where in WHERE[:2]]  # coded: no fetch
    + [("model_buffers", where) for where in WHERE]
    + [("chunks", CHUNKS)],
)
def test_a_round_comes_out_as_if_nothing_had_happened(
    name: str,
    where: str,
    undisturbed: Callable[[str], str],
    killer: Killer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    expected = undisturbed(name)
    kill_at(where, killer, monkeypatch, most=2)
    with InProcess(config(name), tmp_path) as world:
        killer.world = world
        assert set(world.run()) == {expected}
        world.check_books()
    assert killer.times == 2


@pytest.mark.parametrize("where", WHERE)
def test_regions_one_by_one_end_equal(
    where: str, killer: Killer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kill_at(where, killer, monkeypatch, most=1)
    with InProcess(config("one by one"), tmp_path) as world:
        killer.world = world
        world.run()
        world.check_books()
        first, second = (site.shards[0].params_S for site in world.sites.values())
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)
    assert killer.times == 1


def test_a_checkpoint_requested_in_a_lost_answer_is_made(
    undisturbed: Callable[[str], str],
    killer: Killer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    expected = undisturbed("vectors")
    take_in, deliver, asked = DirectPath._take_in, DirectPath.deliver, []

    def taken_in(self: DirectPath, update: Any) -> None:
        if update.seq == 3 and update.region == HOME and not asked:
            asked.append(self.request_checkpoint(1, halt=False))
        take_in(self, update)

    def delivered(self: DirectPath, reply: Any) -> None:
        if reply.to == FAR and self._region == HOME and reply.checkpoint and not killer.times:
            killer.strike()
        deliver(self, reply)

    monkeypatch.setattr(DirectPath, "_take_in", taken_in)
    monkeypatch.setattr(DirectPath, "deliver", delivered)
    with InProcess(config("vectors"), tmp_path) as world:
        killer.world = world
        directory_of(world.parts, 1).mkdir(parents=True)
        assert set(world.run()) == {expected}
        names = ["averager", f"{FAR}-ps0", f"{HOME}-ps0"]
        eventually(lambda: sorted(p.stem for p in directory_of(world.parts, 1).iterdir()) == names)
        assert parts_reported(world.sites.values(), len(names)) == names
    assert asked == [True] and killer.times == 1


@pytest.mark.parametrize("kind", STRATEGIES)
def test_every_strategy_continues(
    kind: str, killer: Killer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = of_kind(kind)
    traits = config.strategy.traits
    exact = traits.in_rounds and not traits.region.ends_by_total_rows
    if exact:
        with InProcess(config, tmp_path / "quiet") as world:
            quiet = world.run()
    kill_at(WHERE[1], killer, monkeypatch, most=1)
    with InProcess(config, tmp_path / "disturbed") as world:
        killer.world = world
        digests = world.run()
        for site in world.sites.values():
            site.server.ledger.check()
        params = [torch.cat([s.params_S for s in site.shards]) for site in world.sites.values()]
        torch.testing.assert_close(*params, rtol=1e-4, atol=1e-5)
    assert killer.times == 1
    assert not exact or digests == quiet
