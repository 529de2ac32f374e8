"""Values that a run actor passes to Ray, or gets from it, contain no secrets, seen as bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private.serialization import SerializationContext

from geo_ray.experiment.experiment import Experiment
from geo_ray.ray_cluster.keys import RunKeys
from geo_ray.runtime.actor_group import ActorGroup, GroupWorker
from tests.support.train_support import experiment_of, final_digests, simulate, train

pytestmark = pytest.mark.usefixtures("ray_cluster")


class Passed:
    """Everything that this process serializes for Ray and gets from there, and all keys it has."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = bytearray()
        self.keys: list[RunKeys] = []
        serialize, deserialize = (
            SerializationContext.serialize,
            SerializationContext.deserialize_objects,
        )
        made, begin = RunKeys.__init__, ActorGroup._begin

        def serialize_noted(context: Any, value: Any) -> Any:
            found = serialize(context, value)
            self.bytes += value if isinstance(value, bytes) else found.to_bytes()
            return found

        def deserialize_noted(context: Any, objects: Any, *more: Any) -> Any:
            for each in objects:
                self.bytes += b"" if each[0] is None else bytes(each[0])
            return deserialize(context, objects, *more)

        def made_noted(keys: RunKeys, *arguments: Any) -> None:
            made(keys, *arguments)
            self.keys.append(keys)

        def begin_noted(group: ActorGroup, worker: GroupWorker) -> None:
            """What one actor gives another does not come here by itself."""
            told = worker.handle.introduce.remote()
            ray.get(group.primaries[worker.region].seal_key.remote(told))
            begin(group, worker)

        monkeypatch.setattr(SerializationContext, "serialize", serialize_noted)
        monkeypatch.setattr(SerializationContext, "deserialize_objects", deserialize_noted)
        monkeypatch.setattr(RunKeys, "__init__", made_noted)
        monkeypatch.setattr(ActorGroup, "_begin", begin_noted)


def _experiment(directory: Path, tls: str) -> Experiment:
    return experiment_of(
        directory,
        regions=[{"name": "us-east", "workers": 2, "ps_shards": 2}, {"name": "eu-west"}],
        transport={"tls": tls},
        lan={"encrypt_payload": True},
    )


@pytest.mark.slow  # a whole run each; what is sealed: test_keys_in_process.py
@pytest.mark.parametrize("tls", ["required", "off"])
def test_no_key_passes_through_ray(
    tls: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = Passed(monkeypatch)
    experiment = _experiment(tmp_path, tls)
    trained = train(experiment, tmp_path)
    everything = bytes(passed.bytes)
    (keys,) = passed.keys
    secrets = [keys._wan, *keys._lan.values()]
    assert (keys._authority is None) == (tls == "off")
    if keys._authority is not None:
        number = keys._authority._key.private_numbers().private_value
        secrets.append(number.to_bytes(32, "big"))
        assert everything.count(b"BEGIN CERTIFICATE REQUEST") == 2  # it has seen what it should
        assert everything.count(b"BEGIN CERTIFICATE-") >= 4
    assert len(secrets) == (3 if tls == "off" else 4)
    assert b"us-east" in everything
    for secret in secrets:
        assert secret not in everything
    assert b"PRIVATE KEY" not in everything
    assert final_digests(trained.events) == final_digests(simulate(experiment, tmp_path).events)
