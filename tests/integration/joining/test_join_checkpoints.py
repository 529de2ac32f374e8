"""Checkpoints of joined regions: a resumed run ends as one that was never interrupted."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from geo_ray.joining.rank import STRATEGIES
from geo_ray.joining.save_round import SaveStage
from geo_ray.joining.service import JoinTerms, SavedRun
from geo_ray.joining.site import JoinedTraining
from tests.support.join_support import WAIT_S, Loop, serving, terms, train_all

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


def run_of(kind: str, **sections: Any) -> JoinTerms:
    strategy = {"kind": kind, **OPTIONS.get(kind, {"interval": 3})}
    rows = {"rows": 150} if kind == "nbsync" else {}
    codec = {"up": {"kind": "topk"}} if kind == "sparseloco" else {}
    return terms(REGIONS, STEPS, **{"strategy": strategy, "codec": codec} | rows | sections)


def interrupted(run: JoinTerms, folder: Path, loops: Mapping[str, Loop]) -> SavedRun:
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
            until_s = time.monotonic() + 1.0
            while not found and time.monotonic() < until_s:
                with server.lock:
                    save = server.service.save
                    if save is not None and save.stage is SaveStage.READY and not found:
                        assert set(save.saved) == {
                            r for r, loop in loops.items() if loop.checkpoints
                        }
                        found.append(server.service.saved_run)
                time.sleep(0.01)
            if found:
                raise CrashError

        results = train_all(
            {
                name: partial(Loop(**{**vars_of(loop), "address": address}).run, each)
                for name, loop in loops.items()
            }
        )
        assert found, (results, server.service.save)
    return found[0]


def vars_of(loop: Loop) -> dict[str, Any]:
    return {name: getattr(loop, name) for name in Loop.__dataclass_fields__}


def trained(
    run: JoinTerms, folder: Path, loops: Mapping[str, Loop], resumed: SavedRun | None = None
) -> dict[str, Tensor]:
    with serving(run, folder, resumed=resumed) as (server, address):
        results = train_all(
            {
                name: Loop(**{**vars_of(loop), "address": address}).run
                for name, loop in loops.items()
            }
        )
        failed = [each for each in results.values() if isinstance(each, Exception)]
        assert not failed, (failed, server.stage, server.service.failure)
        steps = server.service.steps
        assert set(steps.values()) == {STEPS} or run.rows
        return {name: vector for name, (vector, _) in results.items()}


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
