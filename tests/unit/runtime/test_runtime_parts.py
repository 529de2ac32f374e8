"""What a step changes is copied before a part goes to another machine, and not by the step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from geo_ray.base.files import Failpoint, no_failpoint
from geo_ray.storage.folders import LocalFolder
from geo_ray.storage.parts import read_part
from geo_ray.strategies.sma import Sma
from geo_ray.training.checkpoint_parts import HeldShard
from geo_ray.training.optimizers import AdamW
from geo_ray.training.shard import Contribution, Shard

SIZE = 3_000_000  # some pieces


def step(shard: Shard) -> None:
    shard.put(0, torch.full((SIZE,), 0.5))
    shard.apply([Contribution(0, 4)])


@dataclass
class Slow:
    """A place that takes so long that a step is done before it has had anything."""

    path: Path
    shard: Shard
    is_remote: bool
    live: list[int] = field(default_factory=list)

    def prepare(self, region: str | None) -> None:
        """Nothing."""

    def folder(self, id: int) -> Slow:
        return self

    def model_folder(self, run_dir: str) -> Slow:
        return self

    def name_of(self, file: str) -> str:
        return file

    def has(self, file: str) -> bool:
        return False

    def open(self, file: str, num_bytes: int | None = None):  # type: ignore[no-untyped-def]
        return LocalFolder(self.path).open(file, num_bytes)

    def write(
        self,
        file: str,
        chunks: Iterable[memoryview | bytes],
        num_bytes: int,
        failpoint: Failpoint = no_failpoint,
    ) -> None:
        unread = self.shard._unread._copies + self.shard._unread_moments._copies
        self.live = [copy._live.numel() for ref in unread if (copy := ref()) is not None]
        step(self.shard)
        LocalFolder(self.path).write(file, chunks, num_bytes)


@pytest.mark.parametrize("is_remote", [True, False])
def test_a_step_beside_a_slow_upload_copies_nothing(tmp_path: Path, is_remote: bool) -> None:
    shard = Shard(torch.zeros(SIZE), AdamW(lr=0.1), Sma(interval=100))
    step(shard)
    before = {name: value.clone() for name, value in shard.export()[0].items()}
    place = Slow(tmp_path, shard, is_remote)
    shard.snapshot(7)
    info = HeldShard(shard, "eu", 1, place).write_part(7)
    assert len(place.live) >= 3
    assert place.live == [0] * len(place.live) if is_remote else all(place.live)
    written, _ = read_part(tmp_path, info)
    assert written.keys() == before.keys()
    assert all(torch.equal(written[name], before[name]) for name in before)
    assert not torch.equal(shard.params_S, before["params"])
