"""What is written or read once does not stay in the system's memory, nor twice in the process's."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from geo_ray.base.threads import give_way
from geo_ray.storage.checkpoint import verify_part
from geo_ray.storage.parts import read_part, write_part

MIB = 1 << 20


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the system is told, which it is told all the same: the sizes of the files at that time.

    Whether it heeds that depends on the file system.
    """
    sizes: list[int] = []
    tell = os.posix_fadvise

    def note(descriptor: int, offset: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        sizes.append(os.fstat(descriptor).st_size)
        tell(descriptor, offset, length, advice)

    monkeypatch.setattr(os, "posix_fadvise", note)
    return sizes


def test_pages_of_a_large_part_are_handed_back_while_it_is_written(
    tmp_path: Path, advised: list[int]
) -> None:
    info = write_part(tmp_path, "p", {"x": torch.ones(30 * MIB)}, {})
    assert len(advised) == 3  # 120 MiB, every 32
    assert advised == sorted(advised) and advised[0] < 40 * MIB
    verify_part(tmp_path, info)
    assert len(advised) == 6
    assert torch.equal(read_part(tmp_path, info)[0]["x"], torch.ones(30 * MIB))
    assert len(advised) == 9


def test_a_small_part_stays_where_it_is(tmp_path: Path, advised: list[int]) -> None:
    info = write_part(tmp_path, "p", {"x": torch.ones(MIB)}, {})
    verify_part(tmp_path, info)
    read_part(tmp_path, info)
    assert not advised


def test_a_system_without_such_advice_does_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "posix_fadvise")
    info = write_part(tmp_path, "p", {"x": torch.ones(20 * MIB)}, {})
    verify_part(tmp_path, info)
    assert read_part(tmp_path, info)[0]["x"].all()


def test_a_part_is_read_to_where_it_stays(tmp_path: Path) -> None:
    """The most that the process ever held is the part once, and a little."""
    info = write_part(tmp_path, "p", {f"x{i}": torch.ones(16 * MIB) for i in range(4)}, {})
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from geo_ray.storage.manifest import PartInfo\n"
        "from geo_ray.storage.parts import read_part\n"
        "def most():\n"
        "    lines = Path('/proc/self/status').read_text().splitlines()\n"
        "    return next(int(l.split()[1]) for l in lines if l.startswith('VmHWM')) * 1024\n"
        "info, before = PartInfo.model_validate_json(sys.argv[2]), most()\n"
        "read_part(Path(sys.argv[1]), info)\n"
        "print((most() - before) / info.bytes)"
    )
    words = [sys.executable, "-c", code, str(tmp_path), info.model_dump_json()]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert 0.9 < float(done.stdout) < 1.3


def test_who_gives_way_does_so_alone() -> None:
    before, found = os.getpriority(os.PRIO_PROCESS, 0), list[int]()

    def work() -> None:
        give_way()
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [19]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
