"""The connection of a rank is lost between its last update and the end of the run."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from geo_ray.base.errors import ServerLostError
from geo_ray.joining import server as server_module
from geo_ray.joining.protocol import Outbound
from geo_ray.joining.save_round import SaveStage
from geo_ray.joining.server import JoinServer
from geo_ray.joining.service import Stage
from geo_ray.joining.slices import SavedRun
from tests.support.flaky_proxy import FlakyProxy
from tests.support.join_support import WAIT_S, Loop, serving, terms, train_all
from tests.support.train_support import eventually

REGIONS = ("eu", "us")
STEPS, INTERVAL = 8, 4
AWAY_S = 0.5
LOST_S, LIMIT_S = 2.0, 6.0
RUN = terms(
    REGIONS,
    STEPS,
    strategy={"kind": "diloco", "interval": INTERVAL},
    saves_at_end=True,
    goal=f"steps {STEPS}",
)


class Cut:
    """Cuts region us off before a message is sent to it.

    Args:
        server: the server.
        proxy: the way of the region to it.
        kind: kind of the message: the last answer, the order to save, or the order to leave.
        back: whether the region reaches the server again after a while.
    """

    def __init__(self, server: JoinServer, proxy: FlakyProxy, kind: str, *, back: bool) -> None:
        self.server, self.proxy, self.kind, self.back = server, proxy, kind, back
        self.done, self.post = threading.Event(), server._post
        server._post = self.on_post  # type: ignore[method-assign]

    def on_post(self, found: Sequence[Outbound]) -> None:
        """Called under the server's lock."""
        is_due = any((each.peer, each.message.kind) == ("us#0", self.kind) for each in found)
        is_last = self.kind != "reply" or self.server.service.version == STEPS // INTERVAL
        if is_due and is_last and not self.done.is_set():
            self.done.set()
            self.proxy.refusing = True
            self.proxy.cut()
            if self.back:
                threading.Timer(AWAY_S, self.return_).start()
        self.post(found)

    def return_(self) -> None:
        self.proxy.refusing = False


def save_last(server: JoinServer) -> tuple[SavedRun, tuple[str, ...]]:
    """Make the last checkpoint, as the run loop does; return it, and the regions in it."""
    eventually(lambda: server.stage is Stage.DONE, "the model is here")
    assert server.begin_save(0, [], WAIT_S) is not None

    def is_ready() -> bool:
        with server.lock:
            save = server.service.save
            return save is not None and save.stage is SaveStage.READY

    eventually(is_ready, "all regions that are left have saved")
    with server.lock:
        assert server.service.save is not None
        found = server.service.saved_run, tuple(sorted(server.service.save.saved))
    server.end_save(None)
    return found


def ended(folder: Path, kind: str, *, back: bool) -> dict[str, Any]:
    """Return the results of both regions and the last checkpoint, once the server is closed."""
    with (
        serving(RUN, folder, lost_after_s=WAIT_S if back else LOST_S) as (server, address),
        FlakyProxy(server.address) as proxy,
    ):
        cut = Cut(server, proxy, kind, back=back)
        around = "geo-ray://{}:{}".format(*proxy.address)
        loops = {
            name: Loop(where, name, folder, checkpoints=folder / name)
            for name, where in (("eu", address), ("us", around))
        }
        if not back:
            loops["us"] = replace(loops["us"], wait_s=LIMIT_S)
        calls: dict[str, Any] = {name: loop.run for name, loop in loops.items()}
        found = train_all({**calls, "saved": lambda: save_last(server)})
        assert cut.done.is_set()
        server.close()
        return found


def resumed(folder: Path, saved: SavedRun) -> dict[str, Any]:
    longer = RUN.model_copy(update={"steps": 2 * STEPS, "goal": f"steps {2 * STEPS}"})
    with serving(longer, folder, resumed=saved) as (server, address):
        loops = {n: Loop(address, n, folder, checkpoints=folder / n).run for n in REGIONS}

        def let_leave() -> None:
            eventually(lambda: server.stage is Stage.DONE, "the model is here")
            server.end_save(None)

        return train_all({**loops, "end": let_leave})


KINDS = ("reply", "save", "over")


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_returns_takes_part_in_the_end(kind: str, tmp_path: Path) -> None:
    found = ended(tmp_path, kind, back=True)
    assert not [each for each in found.values() if isinstance(each, Exception)], found
    assert torch.equal(found["eu"][0], found["us"][0])
    saved, names = found["saved"]
    assert names == REGIONS and saved.steps == dict.fromkeys(REGIONS, STEPS)
    again = resumed(tmp_path, saved)
    assert not [each for each in again.values() if isinstance(each, Exception)], again
    plain = tmp_path / "plain"
    plain.mkdir()
    longer = RUN.model_copy(update={"steps": 2 * STEPS, "saves_at_end": False})
    with serving(longer, plain) as (_, address):
        expected = train_all({name: Loop(address, name, plain).run for name in REGIONS})
    for name in REGIONS:
        assert torch.equal(again[name][0], expected[name][0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_does_not_return_ends_with_an_error_and_the_run_without_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_DRAIN_S", LOST_S)
    found = ended(tmp_path, kind, back=False)
    assert isinstance(found["us"], ServerLostError), found
    assert not isinstance(found["eu"], Exception), found
    saved, names = found["saved"]
    assert names == (("eu",) if kind != "over" else REGIONS)
    again = resumed(tmp_path, saved)
    assert not [each for each in again.values() if isinstance(each, Exception)], again
    assert torch.equal(again["eu"][0], again["us"][0])
