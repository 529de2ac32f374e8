from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from geo_ray.base.errors import TransportError
from geo_ray.transport import lan
from geo_ray.transport.lan import SharedBuffer


def _file_of(buffer: SharedBuffer) -> Path | None:
    found = [d / buffer.name for d in lan._directories() if (d / buffer.name).exists()]
    return found[0] if found else None


def test_both_sides_see_the_same_aligned_memory() -> None:
    ours = SharedBuffer.create(1000)
    assert not ours.proven()
    theirs = SharedBuffer.attach(ours.name, ours.nonce)
    assert ours.proven()
    ours.unlink()
    assert _file_of(ours) is None
    ours.array()[:3] = [1.5, 2.5, 3.5]
    assert theirs.array()[:3].tolist() == [1.5, 2.5, 3.5]
    theirs.view[999] = 7
    assert ours.view[999] == 7
    assert ours.size_bytes == theirs.size_bytes == len(ours.view) == 1000
    assert ours.array().dtype == np.float32
    assert ours.array().ctypes.data % 64 == 0
    ours.close()
    theirs.close()


def test_another_process_sees_it_and_a_killed_creator_leaves_nothing() -> None:
    script = (
        "import sys, os, signal\n"
        "from geo_ray.transport.lan import SharedBuffer\n"
        "b = SharedBuffer.create(4096)\n"
        "print(b.name, b.nonce.hex(), flush=True)\n"
        "sys.stdin.readline(); assert b.proven(); b.unlink()\n"
        "b.array()[0] = 42.0\n"
        "print('done', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        name, nonce = process.stdout.readline().split()
        ours = SharedBuffer.attach(name, bytes.fromhex(nonce))
        process.stdin.write("attached\n")
        process.stdin.flush()
        assert process.stdout.readline() == "done\n"
        process.wait(30)
    assert ours.array()[0] == 42.0
    assert _file_of(ours) is None
    ours.close()


def test_wrong_nonce_name_or_size_is_refused() -> None:
    ours = SharedBuffer.create(100)
    try:
        with pytest.raises(TransportError):
            SharedBuffer.attach(ours.name, b"x" * 16)
        with pytest.raises(TransportError):
            SharedBuffer.attach("../" + ours.name, ours.nonce)
        with pytest.raises(TransportError):
            SharedBuffer.attach("geo_ray-" + "0" * 32, ours.nonce)
        assert not ours.proven()
    finally:
        ours.unlink()
        ours.close()
    with pytest.raises(TransportError):
        SharedBuffer.create(0)


def test_falls_back_to_the_temp_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lan, "_directories", lambda: [tmp_path / "missing", tmp_path])
    ours = SharedBuffer.create(100)
    assert (tmp_path / ours.name).stat().st_mode & 0o777 == 0o600
    theirs = SharedBuffer.attach(ours.name, ours.nonce)
    ours.unlink()
    assert list(tmp_path.iterdir()) == []
    ours.close()
    theirs.close()


def test_no_room_anywhere_is_an_error_that_names_the_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lan, "_directories", lambda: [tmp_path])
    with pytest.raises(TransportError, match=str(tmp_path)):
        SharedBuffer.create(1 << 60)
    assert list(tmp_path.iterdir()) == []


def test_arrays_outlive_close() -> None:
    ours = SharedBuffer.create(64)
    ours.unlink()
    array = ours.array()
    ours.close()
    array[0] = 3.0
    assert array[0] == 3.0
