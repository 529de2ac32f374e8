"""Joined regions at limits: empty shares, low precision, interrupted loops, slow averaging."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from geo_ray.codecs.registry import CODECS
from geo_ray.joining.credentials import JoinCredentials
from geo_ray.joining.protocol import SERVER, rank_name
from geo_ray.joining.server import JoinServer
from geo_ray.joining.service import Stage
from geo_ray.joining.site import join
from geo_ray.transport.config import TransportConfig
from geo_ray.transport.endpoint import Endpoint
from geo_ray.transport.security.certs import Authority
from geo_ray.transport.wire import handshake
from geo_ray.transport.wire.message import EndpointIdentity
from tests.support.join_support import (
    WAIT_S,
    Loop,
    Ranks,
    serving,
    small_model,
    terms,
    train_all,
    vector_of,
    write_credentials,
)
from tests.support.pages import ROOT
from tests.support.train_support import eventually

REGIONS = ("eu", "us")
STEPS, INTERVAL = 12, 4
OUTER = {"kind": "nesterov", "lr": 0.7, "momentum": 0.9}
DILOCO = {"kind": "diloco", "interval": INTERVAL, "weights": "uniform", "outer": OUTER}
UNIFORM = {"interval": INTERVAL, "weights": "uniform"}
NOT_HERE = ("dgt",)  # loses blocks in flight, which only bridges track


class Tiny(nn.Module):
    """A model with fewer rows than ranks, and a parameter without elements."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.none = nn.Parameter(torch.empty(0, 3))
        self.weight = nn.Parameter(torch.tensor([[0.5, -0.25], [1.0, 2.0]]))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.t()).square().sum() + self.none.sum()


@dataclass(frozen=True)
class TinyLoop:
    address: str
    region: str
    folder: Path

    def __call__(self, group: Any = None) -> Tensor:
        model = Tiny()
        if group is not None:
            fully_shard(model, ignored_params={model.none})  # which it cannot shard
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        path = self.folder / f"{self.region}.pem"
        with (
            join(self.address, region=self.region, credentials=path, group=group) as site,
            site.training(model) as sync,
        ):
            while not sync.done:
                x = torch.full((1, 2), 1.0 + sync.steps + ord(self.region[0]) % 7)
                optimizer.zero_grad()
                model(x / 10).backward()
                optimizer.step()
                sync.step(rows=1)
        return vector_of(model)


def run_tiny(loop: TinyLoop, group: Any) -> Tensor:
    return loop(group)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(3)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("strategy", "codec"),
    [
        (DILOCO, {}),
        (DILOCO, {"up": {"kind": "int8"}, "down": {"kind": "int8"}}),
        (UNIFORM | {"kind": "one_step_delay"}, {}),
        (UNIFORM | {"kind": "diloco_streaming", "fragments": 2, "tau": 1}, {}),
    ],
    ids=["diloco", "int8", "one_step_delay", "diloco_streaming"],
)
def test_ranks_without_elements(
    strategy: dict[str, Any], codec: dict[str, Any], ranks: Ranks, tmp_path: Path
) -> None:
    """With 3 ranks, one has no element of the only weight; the result is that of one process."""
    found = []
    for name, pool in (("alone", None), ("sharded", ranks)):
        (folder := tmp_path / name).mkdir()
        run = terms(REGIONS, STEPS, strategy=strategy, codec=codec)
        with serving(run, folder) as (server, address):
            loops = {each: TinyLoop(address, each, folder) for each in REGIONS}
            if pool is not None:
                pool.start(run_tiny, loops.pop("eu"))
            results = list(train_all(loops).values())
            results += [] if pool is None else pool.results()
            assert server.stage is Stage.DONE, results
            for each in results:
                assert torch.equal(each, server.service.model_P)
            found.append(results[0])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0.05 if codec else 1e-6)


@pytest.mark.parametrize("codec", [kind for kind in sorted(CODECS) if kind not in NOT_HERE])
def test_parameters_of_lower_precision_with_a_codec(codec: str, tmp_path: Path) -> None:
    """All regions end with one model, near that of fp32 with the codec."""
    options = {"rank": 1} if codec == "powersgd" else {}
    both: dict[str, Any] = {"up": {"kind": codec, **options}}
    if not CODECS[codec].model_validate(options).traits.up_only:
        both["down"] = {"kind": codec, **options}
    vectors = []
    if codec == "randomk_unbiased":
        both.pop("down")  # few elements would be sent both ways
    for dtype in ("float32", "bfloat16"):
        (folder := tmp_path / dtype).mkdir()
        with serving(terms(REGIONS, STEPS, strategy=DILOCO, codec=both), folder) as (_, address):
            loops = {name: Loop(address, name, folder, dtype=dtype).run for name in REGIONS}
            found = train_all(loops)
        for result in found.values():
            assert not isinstance(result, Exception), repr(result)
            assert torch.equal(result[0], found["eu"][0])
        vectors.append(found["eu"][0])
    assert float((vectors[1] - vector_of(small_model())).abs().max()) > 0.01
    torch.testing.assert_close(vectors[1], vectors[0], rtol=0, atol=0.4)


LOOP = """
import sys, torch, geo_ray
from torch import nn

model = nn.Linear(7, 3)
with (
    geo_ray.join(sys.argv[1], region="eu", credentials=sys.argv[2]) as site,
    site.training(model) as sync,
):
    while not sync.done:
        sync.step(rows=1)
        print("step", sync.steps, flush=True)
"""


@pytest.mark.parametrize("waits", [True, False])
def test_a_loop_that_is_interrupted_ends_and_frees_the_others(waits: bool, tmp_path: Path) -> None:
    """Ctrl-C, also while the loop waits for an answer: the region is lost at once."""
    (tmp_path / "loop.py").write_text(LOOP)
    steps = 10**6 if not waits else 8

    def us(address: str) -> int:
        model = nn.Linear(7, 3)
        path = tmp_path / "us.pem"
        with join(address, region="us", credentials=path) as site, site.training(model) as sync:
            for _ in range(INTERVAL if waits else 10 * INTERVAL):
                sync.step(rows=1)
            if waits:
                time.sleep(0.5)  # the other region has sent its second update
            process.send_signal(signal.SIGINT)
            process.wait(WAIT_S)
            eventually(lambda: "eu" not in server.service._regions, "the server knows")
            if waits:
                while not sync.done:
                    sync.step(rows=1)
            else:
                server.request_stop()
                while not sync.done:
                    sync.step(rows=1)
            return sync.steps

    with serving(terms(REGIONS, steps, strategy=DILOCO), tmp_path) as (server, address):
        command = [sys.executable, str(tmp_path / "loop.py"), address, str(tmp_path / "eu.pem")]
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        found = train_all({"us": partial(us, address)})
        assert isinstance(found["us"], int), found
        said = process.communicate()[1]
        assert "KeyboardInterrupt" in said
        assert process.returncode != 0
        (lost,) = (each for each in server.news() if each["kind"] == "region_lost")
        assert "KeyboardInterrupt" in lost["cause"]
        assert server.stage is Stage.DONE


def test_connections_survive_slow_averaging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While an update of a large model is averaged, the server still answers heartbeats."""
    run = terms(REGIONS, STEPS, strategy=DILOCO)
    write_credentials(tmp_path, REGIONS)
    quick = TransportConfig(heartbeat_s=0.1, peer_timeout_s=2.0)
    own = JoinCredentials.read(tmp_path / f"{SERVER}.pem")
    server = JoinServer(run, own, transport=quick, lost_after_s=1.0)
    take, slowed = server.service._take, []

    def slow(name: str, region: Any) -> Any:
        if not slowed:
            slowed.append(name)
            time.sleep(5.0)  # longer than a silent peer keeps its connection and its place
        return take(name, region)

    monkeypatch.setattr(server.service, "_take", slow)

    def loop(name: str) -> Tensor:
        model = small_model()
        address = "geo-ray://{}:{}".format(*server.address)
        path = tmp_path / f"{name}.pem"
        with (
            join(address, region=name, credentials=path, transport=quick) as site,
            site.training(model) as sync,
        ):
            while not sync.done:
                sync.step(rows=1)
        return vector_of(model)

    try:
        found = train_all({name: partial(loop, name) for name in REGIONS})
        for each in found.values():
            assert isinstance(each, Tensor), repr(each)
        kinds = [event["kind"] for event in server.news()]
        assert "region_lost" not in kinds
        assert kinds.count("exchange") == len(REGIONS) * STEPS // INTERVAL
    finally:
        server.close()


@pytest.mark.parametrize("claims", [False, True], ids=["wrong key", "claims to have the run's key"])
def test_a_rank_without_the_key_of_the_run_is_refused(
    claims: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its certificate is one of the run, but on loopback, without TLS, only the key counts."""
    if claims:
        monkeypatch.setattr(handshake, "_key_id", lambda _: "the same")
    with serving(terms(["eu"], STEPS, strategy=DILOCO), tmp_path) as (server, _):
        own = JoinCredentials.read(tmp_path / "eu.pem")
        name, reason = rank_name("eu", 0), "could not prove" if claims else "the peer's key is"
        identity = EndpointIdentity(own.run_id, name, 1, secrets.token_bytes(32))
        with Endpoint(identity, lambda *_: None, certificate=own.certificate) as stranger:
            stranger.connect(SERVER, server.address)
            eventually(
                lambda: reason in (stranger.stats()[SERVER]["last_error"] or ""), "it is refused"
            )
        assert name not in server.links()


def test_a_rank_with_the_key_of_the_run_may_join_over_loopback(tmp_path: Path) -> None:
    """There its certificate is not looked at, as the guide says; elsewhere it would be refused."""
    with serving(terms(["eu"], STEPS, strategy=DILOCO), tmp_path) as (server, address):
        own = JoinCredentials.read(tmp_path / "eu.pem")
        other = replace(own, certificate=Authority.create("other").issue("eu"))
        other.write(tmp_path / "other.pem")
        with join(address, region="eu", credentials=tmp_path / "other.pem", wait_s=WAIT_S):
            rank = rank_name("eu", 0)
            eventually(lambda: rank in server.links(), "it is connected")
    strict = TransportConfig(tls="required")
    server = JoinServer(
        terms(["eu"], STEPS, strategy=DILOCO),
        JoinCredentials.read(tmp_path / f"{SERVER}.pem"),
        transport=strict,
    )
    identity = EndpointIdentity(other.run_id, rank_name("eu", 0), 1, other.key)
    try:
        with Endpoint(identity, lambda *_: None, strict, certificate=other.certificate) as stranger:
            stranger.connect(SERVER, server.address)
            eventually(
                lambda: "CA" in (stranger.stats()[SERVER]["last_error"] or ""), "it is refused"
            )
        assert rank_name("eu", 0) not in server.links()
    finally:
        server.close()
