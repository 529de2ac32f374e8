"""One part: tensors and JSON of one process in one file."""

from __future__ import annotations

import hashlib
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

from geo_ray.base.errors import CheckpointCorruptError, CheckpointError, RunDirectoryError
from geo_ray.storage.checkpoint import verify_part
from geo_ray.storage.manifest import PartInfo
from geo_ray.storage.parts import DTYPES, MAX_HEADER_BYTES, MAX_TENSORS, read_part, write_part

TENSORS = {
    "params_P": torch.arange(10, dtype=torch.float32),
    "momentum": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),
    "scalar": torch.tensor(3, dtype=torch.int64),
    "empty": torch.zeros(0, 5),
    "flags": torch.tensor([True, False, True]),
}
META = {"step": 7, "books": {"assigned": [1, 2.5, None]}, "text": "gr\u00fc\u00df"}


def resealed(directory: Path, data: bytes) -> PartInfo:
    """A part with a right SHA-256, as somebody who means harm would write it."""
    (directory / "p.safetensors").write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    return PartInfo(name="p", file="p.safetensors", bytes=len(data), sha256=digest)


def packed(header: Any, body: bytes = b"", size: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if size is None else size).to_bytes(8, "little") + text + body


# ------------------------------------------------------------------ round trip


def test_tensors_and_json_come_back(tmp_path: Path) -> None:
    info = write_part(tmp_path, "server-eu-0", TENSORS, META)
    tensors, meta = read_part(tmp_path, info)
    verify_part(tmp_path, info)
    assert meta == META
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)
    assert [path.name for path in tmp_path.iterdir()] == ["server-eu-0.safetensors"]


@pytest.mark.parametrize("code", DTYPES)
def test_every_type_comes_back_bit_for_bit(tmp_path: Path, code: str) -> None:
    raw = torch.arange(64, dtype=torch.uint8)
    tensor = raw % 2 == 0 if code == "BOOL" else raw.view(DTYPES[code])
    info = write_part(tmp_path, "p", {"a": torch.ones(3, dtype=torch.int8), "t": tensor}, {})
    back = read_part(tmp_path, info)[0]["t"]
    assert back.dtype == tensor.dtype
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


def test_views_and_gradients_are_written_as_values(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4).requires_grad_()
    info = write_part(tmp_path, "p", {"t": base.T, "s": base[1:, ::2]}, {})
    tensors, _ = read_part(tmp_path, info)
    assert torch.equal(tensors["t"], base.detach().T)
    assert torch.equal(tensors["s"], base.detach()[1:, ::2])


def test_no_tensors_at_all(tmp_path: Path) -> None:
    assert read_part(tmp_path, write_part(tmp_path, "p", {}, {"a": 1})) == ({}, {"a": 1})


@pytest.mark.parametrize("wanted", [[], ["scalar"], ["flags", "params_P"], ["nothing"]])
def test_only_wanted_tensors_are_returned_and_all_are_verified(
    tmp_path: Path, wanted: list[str]
) -> None:
    big = {**TENSORS, "big": torch.zeros(1_500_000)}  # more than a block
    info = write_part(tmp_path, "p", big, META)
    tensors, meta = read_part(tmp_path, info, wanted)
    assert meta == META
    assert tensors.keys() == set(wanted) & TENSORS.keys()
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in tensors)
    file = tmp_path / "p.safetensors"
    data = bytearray(file.read_bytes())
    data[-1_000_000] ^= 1  # of a tensor that is not wanted
    file.write_bytes(data)
    with pytest.raises(CheckpointCorruptError, match="SHA-256"):
        read_part(tmp_path, info, wanted)


def test_bytes_depend_on_the_content_alone(tmp_path: Path) -> None:
    backwards = dict(reversed(TENSORS.items()))
    first = write_part(tmp_path, "p", TENSORS, META)
    second = write_part(tmp_path, "p", backwards, dict(reversed(META.items())))
    assert first == second


def test_the_file_is_ordinary_safetensors(tmp_path: Path) -> None:
    write_part(tmp_path, "p", TENSORS, META)
    with safetensors.safe_open(tmp_path / "p.safetensors", "pt") as file:
        assert json.loads(file.metadata()["meta"]) == META
        assert torch.equal(file.get_tensor("momentum"), TENSORS["momentum"])


# ------------------------------------------------------------------ writing what is not allowed


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a b", "x" * 200, "\0", "a\n"])
def test_names_that_could_leave_the_directory_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError):
        write_part(tmp_path, name, {}, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("tensors", "meta"),
    [
        ({"c": torch.zeros(2, dtype=torch.complex64)}, {}),
        ({"n" * 300: torch.zeros(2)}, {}),
        ({"__metadata__": torch.zeros(2)}, {}),
        ({"deep": torch.zeros([1] * 9)}, {}),
        ({str(number): torch.zeros(0) for number in range(MAX_TENSORS + 1)}, {}),
        ({}, {"x": float("nan")}),
        ({}, {"x": object()}),
        ({}, {"x": "y" * MAX_HEADER_BYTES}),
    ],
    ids=["complex", "long name", "reserved", "axes", "many", "nan", "object", "large meta"],
)
def test_content_beyond_the_limits_is_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], meta: dict[str, Any]
) -> None:
    with pytest.raises(CheckpointError):
        write_part(tmp_path, "p", tensors, meta)
    assert list(tmp_path.iterdir()) == []


def test_a_late_writer_cannot_change_a_committed_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").touch()
    with pytest.raises(CheckpointError, match="too late"):
        write_part(tmp_path, "p", {}, {})


# ------------------------------------------------------------------ disks that refuse


def test_a_missing_directory_is_a_run_directory_error(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="absent"):
        write_part(tmp_path / "absent", "p", TENSORS, META)


def test_a_full_disk_leaves_no_file_behind(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))
            write_part(tmp_path, "p", {"x": torch.zeros(100_000)}, {})
        except RunDirectoryError as error:
            code = 0 if "p.safetensors: cannot be written" in error.message else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert list(tmp_path.iterdir()) == []


def test_an_interruption_leaves_no_file_behind(tmp_path: Path) -> None:
    def stop(name: str) -> None:
        if name == "part.synced":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_part(tmp_path, "p", TENSORS, META, stop)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------ reading what is not right


def swapped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def directory_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


def link_instead(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


@pytest.mark.parametrize(
    "damage",
    [
        Path.unlink,
        swapped,
        directory_instead,
        link_instead,
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes() + b"\0"),
        lambda path: path.write_bytes(b""),
    ],
    ids=["gone", "bit", "directory", "link", "short", "long", "empty"],
)
@pytest.mark.parametrize("reader", [read_part, verify_part])
def test_any_damage_is_a_corrupt_checkpoint(
    tmp_path: Path, damage: Callable[[Path], object], reader: Callable[..., object]
) -> None:
    info = write_part(tmp_path, "p", TENSORS, META)
    damage(tmp_path / "p.safetensors")
    with pytest.raises(CheckpointCorruptError, match=r"p\.safetensors"):
        reader(tmp_path, info)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
GOOD = {"__metadata__": {"format": "geo_ray part 1", "meta": "{}", "part": "p"}}
TWO = {"data_offsets": [4, 12]}


def test_the_hostile_helper_makes_good_files_too(tmp_path: Path) -> None:
    data = packed({**GOOD, "t": ENTRY}, bytes(8))
    assert read_part(tmp_path, resealed(tmp_path, data))[0]["t"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        packed({**GOOD}, size=2**63),
        packed({**GOOD}, size=10**6),
        packed(b" " * 10, size=MAX_HEADER_BYTES + 1),
        packed(b"\x80\x04pickle."),
        packed(b"[" * 100_000),
        packed([]),
        packed({}),
        packed({"__metadata__": {"format": 1}}),
        packed({"__metadata__": {**GOOD["__metadata__"], "format": "other"}}),
        packed({"__metadata__": {**GOOD["__metadata__"], "part": "q"}}),
        packed({"__metadata__": {**GOOD["__metadata__"], "meta": "["}}),
        packed({"__metadata__": {**GOOD["__metadata__"], "meta": "[" * 100_000}}),
        packed({"__metadata__": {**GOOD["__metadata__"], "meta": "[]"}}),
        packed({"__metadata__": {"format": "geo_ray part 1", "part": "p"}}),
        packed({**GOOD, **{str(n): ENTRY for n in range(100_000)}}, bytes(8)),
        packed({**GOOD, "t": 1}),
        packed({**GOOD, "t" * 300: ENTRY}, bytes(8)),
        packed({**GOOD, "t": {**ENTRY, "extra": 1}}, bytes(8)),
        packed({**GOOD, "t": {**ENTRY, "dtype": "F8_E4M3"}}, bytes(8)),
        packed({**GOOD, "t": {**ENTRY, "dtype": ["F32"]}}, bytes(8)),
        packed({**GOOD, "t": {**ENTRY, "shape": [3]}}, bytes(8)),
        packed({**GOOD, "t": {**ENTRY, "shape": [-2]}}, bytes(8)),
        packed({**GOOD, "t": {**ENTRY, "shape": [True, 2]}}, bytes(8)),
        packed({**GOOD, "t": {**ENTRY, "shape": [2**61, 2**61]}}, bytes(8)),
        packed({**GOOD, "t": {**ENTRY, "shape": [1] * 9 + [2]}}, bytes(8)),
        packed({**GOOD, "t": {**ENTRY, "shape": [2.0]}}, bytes(8)),
        packed({**GOOD, "t": {**ENTRY, "data_offsets": [8, 0]}}, bytes(8)),
        packed({**GOOD, "t": {**ENTRY, "data_offsets": [0]}}, bytes(8)),
        packed({**GOOD, "t": {**ENTRY, **TWO}}, bytes(12)),
        packed({**GOOD, "t": ENTRY, "u": {**ENTRY, **TWO}}, bytes(12)),
        packed({**GOOD, "t": ENTRY}, bytes(7)),
        packed({**GOOD, "t": ENTRY}, bytes(9)),
    ],
    ids=range(34),
)
def test_hostile_headers_are_refused_before_decoding(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(CheckpointCorruptError, match=r"p\.safetensors"):
        read_part(tmp_path, resealed(tmp_path, data))


@pytest.mark.parametrize("file", ["../p.safetensors", "/etc/passwd", "q.safetensors", ""])
def test_a_part_cannot_name_a_file_elsewhere(file: str) -> None:
    with pytest.raises(ValueError, match="file of part"):
        PartInfo(name="p", file=file, bytes=0, sha256="0" * 64)
