"""States of FSDP2 and DistributedDataParallel between groups of one, two and three processes."""

from __future__ import annotations

from pathlib import Path

import torch.multiprocessing

from tests.support.rank_checkpoint_group import WAYS, WORLD, run
from tests.support.rank_checkpoint_support import oracle


def test_groups_of_any_size_resume_from_each_other(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(run, args=(tmp_path,), nprocs=WORLD)
    for way in WAYS:
        for size in (1, 2, 3):
            # Both ways to save agree in everything that they store.
            ours, torchs = (oracle(tmp_path / f"{way}-{size}{end}") for end in ("", "-torch"))
            assert ours.keys() == torchs.keys()
            assert len(list((tmp_path / f"{way}-{size}").glob("*.safetensors"))) >= size
    assert "no record of rank 2" in (tmp_path / "hanging-over").read_text()
