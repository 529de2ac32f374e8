"""Every argument and result of every actor of a run, as bytes: none of its keys is among them.

The very actors and the very driver's code, in one process: Ray's calls are calls in a thread here,
and what they take and give is pickled on the way, as it is by Ray.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from geo_ray.data.tasks.load import load_task
from geo_ray.ray_cluster.keys import RunKeys
from geo_ray.runs import directory as rundir
from geo_ray.runs.build import initial_parameters
from geo_ray.runs.data import data_rows, prepare_manifest
from geo_ray.runtime import actor_group
from geo_ray.runtime.actor_group import ActorGroup
from geo_ray.runtime.launcher import OwnProcesses, ProcessSpec, class_of
from geo_ray.runtime.spec import RunSpec
from geo_ray.runtime.worker_actor import WorkerActor
from geo_ray.storage.places import CheckpointPlaces
from geo_ray.transport.security.tls import TlsBytes
from tests.support.train_support import experiment_of

WAIT_S = 240.0


class Wire:
    """Carries calls to actors, and keeps all that passes."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.passed = bytearray()
        self._pool = pool

    def copy(self, value: Any) -> Any:
        data = pickle.dumps(value)
        self.passed += data
        return pickle.loads(data)

    def call(self, method: Callable[..., Any], arguments: tuple[Any, ...]) -> Future[Any]:
        def run() -> Any:
            given = [each.result() if isinstance(each, Future) else each for each in arguments]
            return self.copy(method(*self.copy(given)))

        return self._pool.submit(run)


class Handle:
    """As Ray's handle of an actor: ``handle.method.remote(...)``."""

    def __init__(self, actor: Any, wire: Wire) -> None:
        self.actor = actor
        self._wire = wire

    def __getattr__(self, name: str) -> Any:
        method, wire = getattr(self.actor, name), self._wire

        class Method:
            @staticmethod
            def remote(*arguments: Any) -> Future[Any]:
                return wire.call(method, arguments)

        return Method


class Processes(OwnProcesses):
    """Makes actors in this process."""

    def __init__(self, wire: Wire) -> None:
        super().__init__({})
        self._wire = wire

    def make(self, orders: Sequence[ProcessSpec]) -> list[Any]:
        """See `ProcessLauncher.make`."""
        return [
            Handle(class_of(order.kind)(*self._wire.copy(order.arguments)), self._wire)
            for order in orders
        ]


class Somewhere:
    """A place without a reservation."""

    @staticmethod
    def strategy(role: str, index: int) -> None:
        """None is asked for."""


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    with ThreadPoolExecutor(64) as pool:
        wire = Wire(pool)

        def collect(refs: Mapping[Any, Future[Any]], *_: Any) -> dict[Any, Any]:
            return {key: ref.result(WAIT_S) for key, ref in refs.items()}

        monkeypatch.setattr(actor_group, "collect", collect)
        monkeypatch.setattr(WorkerActor, "_here", lambda worker, manifest: worker._region)
        # Ray would start a cluster of its own to tell.
        monkeypatch.setattr(WorkerActor, "node_id", lambda worker: worker._region)
        yield wire


def _group(directory: Path, tls: str, wire: Wire) -> ActorGroup:
    experiment = experiment_of(
        directory,
        regions=[{"name": "us-east", "workers": 2, "ps_shards": 2}, {"name": "eu-west"}],
        transport={"tls": tls},
        lan={"encrypt_payload": True},
    )
    run = rundir.create(experiment, directory)
    task = load_task(experiment.task, directory)
    manifest, address = prepare_manifest(experiment, task, run.base_dir, run.data)
    spec = RunSpec(
        experiment.model_dump_json(),
        str(directory),
        str(directory),
        address,
        "run-1",
        run_dir=str(run.path),
        places=CheckpointPlaces(str(run.checkpoints)),
        num_params=initial_parameters(task, 0).numel(),
        data_rows=data_rows(experiment, manifest),
    )
    keys = RunKeys(spec.run_id, experiment.region_names, experiment.transport)
    placed: Any = dict.fromkeys(experiment.region_names, Somewhere())
    return ActorGroup(spec, placed, keys, Processes(wire))


def _secrets(group: ActorGroup) -> list[bytes]:
    """Keys of the run, of its CA, and every private half that an actor has made."""
    keys = group.keys
    found = [keys._wan, *keys._lan.values()]
    pairs = [] if keys._authority is None else [keys._authority._key]
    actors = [handle.actor for handle in group.servers().values()]
    actors += [worker.handle.actor for worker in group.workers.values()]
    for actor in actors:
        secrets = getattr(actor._loaded, "secrets", None)
        if secrets is not None and secrets._own is not None:
            pairs += secrets._own._keys.values()
        receiver = actor._receiver if secrets is None else secrets._receiver
        found.append(receiver._key.private_bytes_raw())
    found += [pair.private_numbers().private_value.to_bytes(32, "big") for pair in pairs]
    return found


@pytest.mark.parametrize("tls", ["required", "off"])
def test_no_key_of_a_run_passes_between_its_actors(tls: str, wire: Wire, tmp_path: Path) -> None:
    """Also not for a worker that replaces another, and for a certificate that is renewed."""
    group = _group(tmp_path, tls, wire)
    group.create(group.spec.experiment.present)
    group.await_ready(WAIT_S)
    group.wire(time.time(), WAIT_S)
    secrets = _secrets(group)
    try:
        assert [worker.ref.result(WAIT_S) for worker in group.workers.values()] == [8, 8, 8]
        bridge = group.bridges["us-east"].actor
        link = bridge.poll()["status"]["links"]["eu-west"]
        assert link["connected"] and link["encrypted"] == (tls == "required")
        if tls == "required":
            used = bridge._bridge.endpoint.use_certificate
            given: list[TlsBytes] = []
            bridge._bridge.endpoint.use_certificate = lambda each: (given.append(each), used(each))
            group.renew_certificate("us-east", bridge._loaded.secrets._own.request())
            deadline_s = time.monotonic() + WAIT_S
            while not given and time.monotonic() < deadline_s:
                time.sleep(0.01)
            assert given and given[0].key_pem not in wire.passed
        late = group.primaries["us-east"].seal_key.remote(
            group.workers["us-east", 0].handle.introduce.remote()
        )
        group.workers["us-east", 0].handle.actor._receiver.open(late.result(WAIT_S), "lan")
        secrets += _secrets(group)
    finally:
        for handle in group.servers().values():
            handle.close.remote().result(WAIT_S)
    passed = bytes(wire.passed)
    assert len(set(secrets)) >= (10 if tls == "off" else 14)
    assert (b"BEGIN CERTIFICATE REQUEST" in passed) == (tls == "required")
    assert b"us-east" in passed and b"PRIVATE KEY" not in passed
    for secret in secrets:
        assert secret not in passed
