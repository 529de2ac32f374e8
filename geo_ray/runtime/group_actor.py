"""The process of a rank of a region that is a process group.

A rank takes part in the rendezvous of its group, then calls the loop of the user or trains the task
(`geo_ray.runtime.group_task`), and ends. It exchanges parameters as `geo_ray.join` does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import ray
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from geo_ray.base.errors import (
    GeoRayError,
    InvariantError,
    LoopFailedError,
    RankOutOfMemoryError,
)
from geo_ray.base.user_code import error_summary, find_function, innermost_line
from geo_ray.experiment.regions import LOOP, GroupConfig
from geo_ray.joining.credentials import JoinCredentials
from geo_ray.runtime.spec import RunSpec
from geo_ray.transport.security.process_keys import SecretReceiver

if TYPE_CHECKING:
    from geo_ray.runtime.group_task import GroupRank

JOIN_KEY: Final = "join"
"""Purpose of sealed credentials."""
_NO_MEMORY: Final = "can't allocate memory"  # in the error of PyTorch's allocator for the CPU
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class RankHost:
    """Where a rank runs, and its public key.

    Attributes:
        node: id of its node.
        host: address of its node.
        gpus: GPUs of the node that Ray has given it.
        public: see `SecretReceiver.public`.
    """

    node: str
    host: str
    gpus: tuple[str, ...]
    public: bytes


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The place of a rank among those of its machine.

    Attributes:
        local_rank: its number on the machine.
        local_world_size: ranks on the machine.
        gpus: GPUs of all ranks of the machine; its own has the number `local_rank`.
    """

    local_rank: int
    local_world_size: int
    gpus: tuple[str, ...]


def places_of(hosts: Sequence[RankHost]) -> list[RankPlace]:
    """Return the places of all ranks, given where they run, in the order of ranks."""
    by_node: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_node.setdefault(host.node, []).append(rank)
    found = []
    for rank, host in enumerate(hosts):
        here = by_node[host.node]
        gpus = tuple(gpu for other in here for gpu in hosts[other].gpus)
        found.append(RankPlace(here.index(rank), len(here), gpus))
    return found


class GroupRankActor:
    """The process of a rank.

    Args:
        spec: the run.
        region: its region.
        rank: its number in the group.
        address: where the run is served.
        checkpoints: see `GroupRank.checkpoints`.
    """

    def __init__(
        self, spec: RunSpec, region: str, rank: int, address: str, checkpoints: str
    ) -> None:
        self._spec, self._region, self._rank = spec, region, rank
        self._address, self._checkpoints = address, checkpoints
        self._receiver = SecretReceiver()
        self._store: TCPStore | None = None

    def introduce(self) -> RankHost:
        """Return where this rank runs."""
        runtime = ray.get_runtime_context()
        gpus = tuple(str(each) for each in runtime.get_accelerator_ids().get("GPU", ()))
        host = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        return RankHost(runtime.get_node_id(), host, gpus, self._receiver.public)

    def process_id(self) -> int:
        """Return the id of this actor's process, for operators and tests."""
        return os.getpid()

    def listen(self) -> int:
        """Open the store of the rendezvous, which rank 0 has; return its port."""
        self._store = TCPStore(
            "0.0.0.0",  # noqa: S104  (ranks of other machines connect to it)
            0,
            self._group.world_size,
            is_master=True,
            timeout=timedelta(seconds=self._group.timeout_s),
            wait_for_workers=False,
        )
        return self._store.port

    def train(self, place: RankPlace, host: str, port: int, credentials: bytes) -> None:
        """Train to the end of the run.

        Args:
            place: place of this rank.
            host: address of rank 0.
            port: port of its store.
            credentials: the region's credentials, sealed for this process.

        Raises:
            LoopFailedError: the user's loop raised an exception.
            GeoRayError: the rank cannot take part in the run.
        """
        # Takes seconds to import, which processes that are no rank need not wait for.
        from geo_ray.runtime.group_task import GroupRank, train_task

        opened = self._receiver.open(credentials, JOIN_KEY).decode()
        own = JoinCredentials.parse(opened, f"the credentials of region '{self._region}'")
        experiment, group = self._spec.experiment, self._group
        torch.set_num_threads(max(1, int(group.cpus_per_rank)))
        with self._process_group(place, host, port) as device:
            rank = GroupRank(
                self._region,
                place.local_rank,
                device,
                self._address,
                own,
                experiment.transport,
                experiment.members.wait_s,
                self._checkpoints,
            )
            with memory_named():
                if group.loop is None:
                    train_task(rank, self._spec)
                else:
                    _call_loop(group.loop, rank, self._spec)

    @property
    def _group(self) -> GroupConfig:
        group = self._spec.region(self._region).group
        if group is None:
            raise InvariantError(f"region '{self._region}' is no group")
        return group

    @contextmanager
    def _process_group(self, place: RankPlace, host: str, port: int) -> Iterator[torch.device]:
        """Form the process group; yields the device of this rank."""
        group, timeout = self._group, timedelta(seconds=self._group.timeout_s)
        about = {
            "RANK": self._rank,
            "LOCAL_RANK": place.local_rank,
            "WORLD_SIZE": group.world_size,
            "LOCAL_WORLD_SIZE": place.local_world_size,
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
        }
        os.environ.update({name: str(value) for name, value in about.items()})
        device = torch.device("cpu")
        if group.gpus_per_node:
            os.environ[_VISIBLE] = ",".join(place.gpus)  # ranks of a machine see each other's
            device = torch.device("cuda", place.local_rank)
            torch.cuda.set_device(device)
        if self._store is None:
            self._store = TCPStore(host, port, group.world_size, timeout=timeout)
        backend = group.collectives
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if backend == "nccl" else backend,
            store=self._store,
            rank=self._rank,
            world_size=group.world_size,
            timeout=timeout,
        )
        try:
            yield device
            dist.barrier()  # the store of rank 0 must outlive the others
        finally:
            dist.destroy_process_group()


@contextmanager
def memory_named() -> Iterator[None]:
    """Convert errors of exhausted memory, of a GPU or of the host.

    Raises:
        RankOutOfMemoryError: the block has exhausted memory.
    """
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            is_host = isinstance(cause, RuntimeError) and _NO_MEMORY in str(cause)
            if is_host or isinstance(cause, MemoryError | torch.OutOfMemoryError):
                raise RankOutOfMemoryError(error_summary(cause)) from error
            cause = cause.__cause__
        raise


def _call_loop(use: str, rank: GroupRank, spec: RunSpec) -> None:
    """Call the user's loop.

    Raises:
        LoopFailedError: it cannot be loaded, or raised an exception.
    """
    function = find_function(use, spec.here, LOOP)
    try:
        function(rank)
    except GeoRayError:
        raise
    except Exception as error:
        raise LoopFailedError(
            f"{use} raised {error_summary(error)} ({innermost_line(error, function)})",
            fix="Correct the named line; the log of the process has the whole traceback.",
        ) from error
