"""Machines and secrets that are left when `up`, `down` and the autoscaler die again and again.

On each provider (local: real processes that do nothing; AWS: a moto server behind a front that
checks signatures; Tencent Cloud: an imitation that checks them, too; all over HTTP), `geo-ray up`,
`geo-ray down` and the autoscaler are ended before or after any of their calls to the cloud, to the
secret store, or to the journal, in random order (the state lies in a directory, also of clouds).
Then the cluster is taken down once without a death, and the cloud is asked for anything that bears
its tag. Who dies gives the lease of `up` and `down` back, as one that was killed on the same
machine need not be waited for either.

With `--providers terraform` machines are AWS's, beside the head of a stack of Terraform's.

  orphans_PROVIDER   machines and secrets that were left after so many kills
  kills_PROVIDER     how many there were
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from benchmarks.autoscale.kills import Killed, MortalProvider, MortalStore, Reaper
from benchmarks.common import support
from geo_ray.api.clusters import _asked
from geo_ray.base.errors import GeoRayError, ProviderRefusedError
from geo_ray.cloud.autoscaler.journal import Journal
from geo_ray.cloud.autoscaler.policy import AutoscalePolicy
from geo_ray.cloud.autoscaler.reconcile import Reconciler
from geo_ray.cloud.cluster import down, providers, up
from geo_ray.cloud.cluster.head import find_head, head_address
from geo_ray.cloud.cluster.spec import ClusterSpec
from geo_ray.cloud.cluster.state import ClusterState
from geo_ray.cloud.local import LocalProvider, write_catalog
from geo_ray.cloud.provider import MachineProvider, MachineState
from geo_ray.cloud.terraform import read_stack
from geo_ray.runs.lease import Unfenced
from tests.support.cloud_servers import as_caller
from tests.support.cluster_support import (
    RUN,
    WORLDS,
    CloudWorld,
    ReadyNodes,
    Work,
    machine_of,
    near_store,
    stack_world,
)
from tests.support.provider_support import Sleeper

KILLS = 200


@dataclass
class MortalSecrets:
    """A store of secrets as a process sees it that may end."""

    inner: Any
    reaper: Reaper

    def get(self, name: str) -> str:
        """See `SecretStore.get`."""
        with self.reaper.around():
            return str(self.inner.get(name))

    def put(self, name: str, value: str) -> None:
        """See `SecretStore.put`."""
        with self.reaper.around():
            self.inner.put(name, value)

    def delete(self, name: str) -> None:
        """See `SecretStore.delete`."""
        with self.reaper.around():
            self.inner.delete(name)


@dataclass
class KilledCluster:
    """A cluster whose makers die.

    Attributes:
        world: the cloud and the configuration.
        asked: what is made.
        reaper: ends who is at work.
        token: how manieth autoscaler this is.
        loop: it; None: it has died, and the next one has not begun.
        watching: what looks whether there is a head.
    """

    world: CloudWorld
    asked: ClusterSpec
    reaper: Reaper = field(default_factory=Reaper)
    token: int = 0
    loop: Reconciler | None = None
    watching: MachineProvider | None = None

    @property
    def state(self) -> ClusterState:
        """Where it is written down."""
        return self.asked.state

    def up(self) -> None:
        """Make it, or complete it."""
        up.make_cluster(self.asked, lambda _: None)

    def down(self) -> None:
        """End it."""
        down.end_cluster(self.state, lambda _: None, at_once=True)

    def tick(self) -> None:
        """Let the autoscaler look once, if there is a head that it could live on."""
        record = self.state.known()
        if self.watching is None:
            self.watching = providers.open_clouds(record, self.state)
        head = find_head(self.watching.list_machines(record.name), record)
        address = head_address(head, record)
        if record.phase != "up" or address is None:
            self.loop = None
            return
        if self.loop is None:
            self.token += 1
            self.loop = Reconciler(
                AutoscalePolicy(record.autoscale, record.name, record.id, record.made),
                record.target,
                up.open_clouds(record, self.state, address),  # type: ignore[attr-defined]
                ReadyNodes(),
                Work(),
                Journal(MortalStore(self.state.store(), self.reaper), self.token),  # type: ignore[arg-type]
                record.name,
                Unfenced(),
            )
        self.loop.tick(time.time())

    def left(self) -> int:
        """Count machines and secrets that are there."""
        record = self.state.known()
        machines = providers.open_clouds(record, self.state).list_machines(record.name)
        count = sum(machine.state is not MachineState.ENDED for machine in machines)
        for store in providers.secrets_of(record, self.state):
            with contextlib.suppress(ProviderRefusedError):
                store.get(record.token_secret)
                count += 1
        return count


@contextmanager
def killed_cluster(world: CloudWorld) -> Iterator[KilledCluster]:
    """Put what may end between the verbs and the cloud."""
    provider = "local" if world.cloud == "local" else None
    stack = None if world.stack is None else read_stack(world.stack)
    asked = _asked(
        *(world.config, (), provider, None, "optimal", world.inputs, None, lambda _: None),
        stack=stack,
    )
    cluster = KilledCluster(world, asked)

    def mortal_clouds(*arguments: Any) -> MachineProvider:
        found: Any = MortalProvider(providers.open_clouds(*arguments), cluster.reaper)  # type: ignore[arg-type]
        return found

    def mortal_secrets(*arguments: Any) -> list[Any]:
        return [MortalSecrets(each, cluster.reaper) for each in providers.secrets_of(*arguments)]

    with ExitStack() as stack:
        for module in (up, down):
            stack.enter_context(patch.object(module, "open_clouds", mortal_clouds))
            stack.enter_context(patch.object(module, "secrets_of", mortal_secrets))
        yield cluster


def random_cluster_kills(
    world: CloudWorld, kills: int, seed: int, tell: Callable[[str], None] = lambda _: None
) -> tuple[int, int]:
    """Kill makers of a cluster again and again.

    Returns:
        What was left when it was down, and how many kills there were.
    """
    rng = random.Random(seed)
    with killed_cluster(world) as cluster:
        while cluster.reaper.kills < kills:
            verb = rng.choices((cluster.up, cluster.tick, cluster.down), (4, 6, 2))[0]
            cluster.reaper.calls_left = rng.randrange(14)
            before = cluster.reaper.kills
            try:
                verb()
            except Killed:
                cluster.loop = None
            except GeoRayError as error:
                if cluster.state.read()[0] is not None and verb is not cluster.up:
                    tell(f"{verb.__name__}: {error.message}")
            if cluster.reaper.kills > before and cluster.reaper.kills % 20 == 0:
                tell(f"{world.cloud}: {cluster.reaper.kills} kills, {cluster.left()} there")
        cluster.reaper.calls_left = None
        cluster.down()
        return cluster.left(), cluster.reaper.kills


@contextmanager
def local_world(tmp_path: Path) -> Iterator[CloudWorld]:
    """The local cloud with machines that are processes and do nothing."""
    regions = {
        name: {"cloud": "aws", "at": at, "rows": 1000, "machines": [machine_of("m5.2xlarge")]}
        for name, at in (("east", "us-east-1"), ("west", "eu-central-1"))
    }
    config = RUN | {
        "plan": {"regions": regions},
        "provider": {"state": str(tmp_path / "clusters")},
    }
    world = CloudWorld("local", config, None)

    def open_local(record: Any, state: ClusterState) -> MachineProvider:
        return LocalProvider(state.path / "cloud", Sleeper())

    with patch.object(providers, "_local", open_local):
        cloud = tmp_path / "clusters" / "asked" / "cloud"
        asked = _asked(config, (), "local", None, "optimal", None, None, lambda _: None)
        assert asked.catalog is not None
        write_catalog(cloud, asked.catalog.model_copy(update={"owner_pid": os.getpid()}))
        yield world


ALL_WORLDS: dict[str, Callable[[Path], Any]] = {
    "local": local_world,
    **WORLDS,
    "terraform": stack_world,
}


def main() -> None:
    """Kill, and count what is left."""
    parser = support.parser(__doc__)
    parser.add_argument("--kills", type=int, default=KILLS, help="of each provider")
    parser.add_argument("--providers", default="local,aws,tencent")
    parser.add_argument("--seed", type=int, default=1, help="of what dies when")
    arguments = parser.parse_args()
    machine = support.hardware()
    kills = 20 if arguments.quick else arguments.kills
    figures = []
    for cloud in arguments.providers.split(","):
        with tempfile.TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as caller:
            as_caller(caller, Path(scratch))
            caller.setattr("geo_ray.cloud.cluster.state._REMOTE_POLL_S", 0.1)
            caller.setattr("geo_ray.cloud.cluster.state._LOCAL_POLL_S", 0.05)
            caller.setattr(ClusterState, "_store", near_store(Path(scratch) / "state"))
            with ALL_WORLDS[cloud](Path(scratch)) as world:
                left, count = random_cluster_kills(world, kills, arguments.seed, support.say)
        figures.append(support.Figure(f"orphans_{cloud}", float(left), "left", "<= 0"))
        figures.append(support.Figure(f"kills_{cloud}", float(count), "kills"))
    support.finish("cluster_kills", machine, figures, arguments.out)


if __name__ == "__main__":
    sys.exit(main())
