"""Data sets of other libraries: Hugging Face, WebDataset, MDS, folders of images.

The files below tests/support/peer_files were written by those libraries (datasets 5.2.0,
webdataset 1.0.2, mosaicml-streaming 0.13.0) from the rows that each test expects.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_ray.api.data import inspect_data
from geo_ray.base.errors import (
    ConfigError,
    DataLeftOutError,
    SchemaMismatchError,
    ShardCorruptError,
    ShardMissingError,
)
from geo_ray.cli.main import root
from geo_ray.data.files.find import find_files
from geo_ray.data.files.options import ReadOptions
from geo_ray.data.files.rows import ReadReport, read_rows
from geo_ray.data.manifest import load_manifest
from geo_ray.data.prepare.config import parse_preparation
from geo_ray.data.prepare.inputs import gather_rows
from geo_ray.data.prepare.resolve import resolve
from geo_ray.data.reader import RegionReader
from geo_ray.storage.store import open_store
from geo_ray.storage.uri import join
from tests.support.s3_support import new_prefix, s3_server, set_credentials

PEERS = Path(__file__).parents[2] / "support" / "peer_files"
JPEG, PNG = b"\xff\xd8\xff\xe0 an image", b"\x89PNG\r\n\x1a\n an image"


def rows(
    source: Path | str, wanted: set[str] | None = None, read: ReadOptions | None = None
) -> tuple[dict[str, list[Any]], ReadReport]:
    """All rows by column, and the report."""
    report = ReadReport()
    found: dict[str, list[Any]] = {}
    for batch in read_rows(find_files(str(source), read), wanted, report):
        for name, array in batch.piece.columns.items():
            found.setdefault(name, []).extend(array.to_pylist())
    return found, report


def gather(source: Path, types: dict[str, str], prepare: str = "columns: {}") -> dict[str, Any]:
    resolved = resolve(parse_preparation(prepare, "prepare.yaml"), types)
    return gather_rows(find_files(str(source)), resolved.preparation).columns


# ------------------------------------------------------------------ Hugging Face


def test_a_data_set_that_hugging_face_saved() -> None:
    found, report = rows(PEERS / "hf_dataset" / "train")
    assert found["text"] == ["a", "bb", "ccc"]
    assert found["label"] == [0, 1, 0]
    assert found["tokens"] == [[1], [2, 3], [4, 5, 6]]
    assert all(image.startswith(PNG[:8]) for image in found["image.bytes"])
    assert not report.unreadable
    columns = gather(
        PEERS / "hf_dataset" / "train",
        {"text": "string", "tokens": "list<int32>", "image": "bytes", "label": "int64"},
        "columns: {image: {column: image.bytes}}",
    )
    assert columns["image"].tolist() == found["image.bytes"]
    rows(PEERS / "hf_dataset" / "test", read=ReadOptions(strict=True))  # nothing is skipped


def test_splits_of_a_data_set_are_not_mixed() -> None:
    with pytest.raises(ConfigError, match="splits train, test") as caught:
        rows(PEERS / "hf_dataset")
    assert str(PEERS / "hf_dataset" / "train") in caught.value.fix


def test_caches_next_to_a_data_set_are_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "train"
    shutil.copytree(PEERS / "hf_dataset" / "train", folder)
    shutil.copy(folder / "data-00000-of-00002.arrow", folder / "cache-0123.arrow")
    found, report = rows(folder)
    assert found["text"] == ["a", "bb", "ccc"]
    assert ("cache-0123.arrow", "state.json next to it does not list it") in {
        (one.path, one.reason) for one in report.left_out
    }
    state = folder / "state.json"
    tree = json.loads(state.read_text())
    state.write_text(json.dumps(tree | {"_indices_data_files": [{"filename": "indices.arrow"}]}))
    with pytest.raises(ConfigError, match="order of rows") as caught:
        rows(folder)
    assert "flatten_indices" in caught.value.fix
    state.write_text(json.dumps(tree))
    (folder / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(ShardMissingError, match="data-00001-of-00002"):
        rows(folder)


def test_json_lines_with_such_names_stay_rows(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"_data_files": 3, "x": 1}\n')
    assert rows(tmp_path)[0] == {"_data_files": [3], "x": [1]}


# ------------------------------------------------------------------ WebDataset


def tar(path: Path, members: dict[str, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def test_a_file_that_webdataset_wrote() -> None:
    found, report = rows(PEERS / "webdataset.tar.gz")
    assert found.pop("__key__") == [f"train/{i:04d}" for i in range(4)]
    assert all(image.startswith(PNG[:8]) for image in found.pop("seg.png"))
    assert found == {
        "txt": [f"ä{i}" for i in range(4)],
        "cls": [0, 1, 0, 1],
        "json.caption": [f"c{i}" for i in range(4)],
        "json.size": [[i, i] for i in range(4)],
        "npy": [list(range(i + 1)) for i in range(4)],
        "bin": [bytes(range(i)) for i in range(4)],
    }
    assert [one.reason for one in report.left_out] == [
        "its members .pyd are Python pickles, which are not read"
    ]
    only, _ = rows(PEERS / "webdataset.tar.gz", {"cls", "json.caption"})
    assert only == {"cls": [0, 1, 0, 1], "json.caption": [f"c{i}" for i in range(4)]}


@pytest.mark.parametrize("ending", ["pyd", "pkl", "pickle", "pth", "pt", "x.PKL"])
def test_pickles_are_refused_by_name(tmp_path: Path, ending: str) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "executed",))

    tar(tmp_path / "a.tar", {f"0.{ending}": pickle.dumps(Evil()), "0.cls": b"1"})
    assert rows(tmp_path / "a.tar")[0] == {"__key__": ["0"], "cls": [1]}
    _, report = rows(tmp_path / "a.tar", {ending.lower()})
    (error,) = report.unreadable
    assert isinstance(error, SchemaMismatchError) and f"'0.{ending}'" in error.message
    array = io.BytesIO()
    np.save(array, np.array([Evil()], object), allow_pickle=True)
    tar(tmp_path / "b.tar", {"0.npy": array.getvalue()})
    assert isinstance(rows(tmp_path / "b.tar")[1].unreadable[0], ShardCorruptError)
    assert not (tmp_path / "executed").exists()


def test_samples_are_grouped_by_their_names(tmp_path: Path) -> None:
    members = {
        "./a.b/0.txt": b"x",
        "./a.b/0.left.jpg": JPEG,
        "README": b"no sample",
        "._hidden.txt": b"no sample",
        "__meta__/1.txt": b"no sample",
        "a.b/1.TXT": b"y",
    }
    path = tar(tmp_path / "a.tar", members)
    assert rows(path)[0] == {
        "__key__": ["a.b/0", "a.b/1"],
        "txt": ["x", "y"],
        "left.jpg": [JPEG, None],
    }
    with pytest.raises(SchemaMismatchError, match="has no value"):
        gather(path, {"left.jpg": "bytes"})
    dropped = gather(
        path, {"left": "bytes"}, "columns: {left: {column: left.jpg, missing: drop_row}}"
    )
    assert dropped["left"].tolist() == [JPEG]


@pytest.mark.parametrize(
    ("members", "part"),
    [
        ({"0.cls": b"one"}, "not a valid .cls file"),
        ({"0.txt": b"\xff"}, "not a valid .txt file"),
        ({"0.json": b"{"}, "not a valid .json file"),
        ({"0.json": b'{"a.b": 1, "a": {"b": 2}}'}, "not a valid .json file"),
        ({"0.txt": b"a", "0.TXT": b"b"}, "has 'txt' twice"),
    ],
)
def test_members_that_cannot_be_read(tmp_path: Path, members: dict[str, bytes], part: str) -> None:
    (error,) = rows(tar(tmp_path / "a.tar", members))[1].unreadable
    assert part in error.message
    found, report = rows(tmp_path / "a.tar", {"__key__"})  # members that nobody asks for
    assert found == {"__key__": ["0"]} and not report.unreadable


@pytest.mark.parametrize("dtype", ["bool", "<i2", ">i4", "uint8", "<f2", ">f8", "int64"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 1, 2)])
def test_arrays_that_numpy_wrote(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    for number, written in enumerate((array, np.asfortranarray(array))):
        stream = io.BytesIO()
        np.lib.format.write_array(stream, written, version=((1, 0), (2, 0))[number])
        path = tar(tmp_path / "a.tar", {"0.npy": stream.getvalue()})
        expected = array.reshape(-1).tolist() if written.ndim else array.item()
        assert rows(path)[0]["npy"] == [expected]


def test_arrays_that_are_not_numbers(tmp_path: Path) -> None:
    good = io.BytesIO()
    np.save(good, np.arange(4))
    head = good.getvalue()
    for broken in (
        head[:-1],
        head.replace(b"(4,)", b"(9,)"),
        head.replace(b"(4,)", b"f(),"),
        head.replace(b"(4,)", b"(" + b"1" * 40 + b"f"),
        head.replace(b"<i8", b"|O8"),
        head.replace(b"NUMPY", b"numpy"),
        head[:20],
        b"",
    ):
        assert broken != head
        (error,) = rows(tar(tmp_path / "a.tar", {"0.npy": broken}))[1].unreadable
        assert "not a valid .npy file" in error.message


def test_broken_tar_files(tmp_path: Path) -> None:
    path = tar(tmp_path / "a.tar", {"0.bin": b"x" * 5000})
    path.write_bytes(path.read_bytes()[:3000])
    assert isinstance(rows(path)[1].unreadable[0], ShardCorruptError)
    path.write_bytes(b"no tar file" * 100)
    assert isinstance(rows(path)[1].unreadable[0], ShardCorruptError)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["tgz", "tar", "mds", "arrow"]), st.data())
def test_changed_bytes_give_typed_errors(kind: str, data: st.DataObject) -> None:
    """A file with a few changed or missing bytes is read, or refused with an error of its own."""
    packed = (PEERS / "webdataset.tar.gz").read_bytes()
    content = bytearray(
        {
            "tgz": packed,
            "tar": gzip.decompress(packed),
            "mds": (PEERS / "mds" / "shard.00000.mds").read_bytes(),
            "arrow": next((PEERS / "hf_dataset" / "train").glob("*.arrow")).read_bytes(),
        }[kind]
    )
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(content) - 1)))
        new = data.draw(st.binary(max_size=4))
        content[at : at + data.draw(st.integers(1, 40))] = new
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"a.{'tar.gz' if kind == 'tgz' else kind}")
        path.write_bytes(content)
        found, report = rows(path)
        assert found or report.unreadable or report.left_out


def test_many_samples_come_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("geo_ray.data.files.tar_file._BATCH_BYTES", 50)
    members = {f"{n:03}.{kind}": b"%d" % n for n in range(99) for kind in ("cls", "bin")}
    path = tar(tmp_path / "a.tar", members)
    pieces = list(read_rows(find_files(str(path)), None, ReadReport()))
    assert len(pieces) > 5 and [piece.first_row for piece in pieces][:2] == [1, 19]
    assert [n for piece in pieces for n in piece.piece.columns["cls"].to_pylist()] == [*range(99)]


# ------------------------------------------------------------------ MDS


def expected_mds() -> dict[str, list[Any]]:
    return {
        "text": ["ä" * i for i in range(5)],
        "raw": [bytes(range(i)) for i in range(5)],
        "n": [-i for i in range(5)],
        "f": [i / 2 for i in range(5)],
        "u": [*range(5)],
        "big": [10**i for i in range(5)],
        "dec": [["0", "0.25", "0.5", "0.75", "1"][i] for i in range(5)],
        "real": [i / 8 for i in range(5)],
        "tokens": [list(range(i + 1)) for i in range(5)],
        "grid": [[i] * 4 for i in range(5)],
        "any": [[i + 0.5] * (i + 1) for i in range(5)],
        "meta.id": [*range(5)],
        "meta.tags": [[i, i] for i in range(5)],
    }


@pytest.mark.parametrize("codec", [None, "zstd", "gzip", "bz2", "brotli"])
def test_shards_that_mosaicml_streaming_wrote(tmp_path: Path, codec: str | None) -> None:
    endings = {"zstd": "zstd", "gzip": "gz", "bz2": "bz2", "brotli": "br"}
    folder = tmp_path / "mds"
    shutil.copytree(PEERS / "mds", folder)
    if codec is not None:
        for path in sorted(folder.glob("*.mds")):
            with pa.CompressedOutputStream(f"{path}.{endings[codec]}", codec) as out:
                out.write(path.read_bytes())
            path.unlink()
    found, report = rows(folder)
    assert all(image.startswith(JPEG[:3]) for image in found.pop("image"))
    assert found == expected_mds()
    reasons = {one.reason for one in report.left_out if not one.is_marker}
    assert reasons == {"columns that are not read: evil (pkl)"}
    assert rows(folder, {"meta.id"})[0] == {"meta.id": [*range(5)]}
    types = {"tokens": "list<int32>", "image": "bytes", "dec": "float64", "grid": "uint8[4]"}
    assert gather(folder, types)["dec"].tolist() == [0, 0.25, 0.5, 0.75, 1]


def test_pickled_columns_are_refused_by_name() -> None:
    (error, other) = rows(PEERS / "mds", {"evil"})[1].unreadable
    assert isinstance(error, SchemaMismatchError) and isinstance(other, SchemaMismatchError)
    assert "column 'evil' has the encoding 'pkl': a Python pickle" in error.message


def shard(samples: list[bytes], columns: dict[str, tuple[str, int | None]]) -> bytes:
    """An MDS shard, written from its documentation."""
    config = {
        "column_names": list(columns),
        "column_encodings": [encoding for encoding, _ in columns.values()],
        "column_sizes": [size for _, size in columns.values()],
        "format": "mds",
        "version": 2,
    }
    text = json.dumps(config).encode()
    at = 4 * (len(samples) + 2) + len(text)
    offsets = [at + sum(map(len, samples[:n])) for n in range(len(samples) + 1)]
    head = struct.pack(f"<{len(samples) + 2}I", len(samples), *offsets)
    return head + text + b"".join(samples)


def test_arrays_of_every_form(tmp_path: Path) -> None:
    values = struct.pack("<3h", 1, -2, 3)
    forms = {
        "ndarray:int16:3": values,
        "ndarray:int16": bytes([1 << 2, 3]) + values,
        "ndarray": bytes([17, 2 << 2 | 1]) + struct.pack("<2H", 1, 3) + values,
    }
    for encoding, data in forms.items():
        sample = struct.pack("<I", len(data)) + data
        (tmp_path / "a.mds").write_bytes(shard([sample, sample], {"x": (encoding, None)}))
        assert rows(tmp_path)[0] == {"x": [[1, -2, 3]] * 2}


@pytest.mark.parametrize("change", ["short", "offsets", "columns", "sizes", "json", "kind"])
def test_broken_shards(tmp_path: Path, change: str) -> None:
    good = shard([struct.pack("<Iq", 1, 5) + b"a"] * 2, {"n": ("int", 8), "s": ("str", None)})
    (tmp_path / "a.mds").write_bytes(good)
    assert rows(tmp_path)[0] == {"n": [5, 5], "s": ["a", "a"]}
    broken = {
        "short": good[:-1],
        "offsets": good[:8] + b"\xff" + good[9:],
        "columns": good.replace(b'"column_sizes": [8, null]', b'"column_sizes": [8]      '),
        "sizes": good[:-26] + struct.pack("<I", 2) + good[-22:],
        "json": good.replace(b'{"column_names"', b'["column_names"'),
        "kind": good.replace(b'"int", "str"', b'"int", "xyz"'),
    }[change]
    assert broken != good
    (tmp_path / "a.mds").write_bytes(broken)
    _, report = rows(tmp_path, {"n", "s"})
    expected = SchemaMismatchError if change == "kind" else ShardCorruptError
    assert isinstance(report.unreadable[0], expected)


# ------------------------------------------------------------------ images


def test_folders_of_images(tmp_path: Path) -> None:
    for path, data in {"cat/b.jpg": JPEG, "cat/more/a.PNG": PNG, "dog/a.jpeg": JPEG}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    found, report = rows(tmp_path)
    assert found == {
        "image": [JPEG, PNG, JPEG],
        "label": ["cat", "cat", "dog"],
        "path": ["cat/b.jpg", "cat/more/a.PNG", "dog/a.jpeg"],
    }
    assert [one.path for one in report.left_out] == ["cat/notes.txt"]
    columns = gather(
        tmp_path,
        {"image": "bytes", "label": "int64"},
        "columns: {label: {column: label, vocabulary: {values: [dog, cat], other: refuse}}}",
    )
    assert columns["label"].tolist() == [1, 1, 0]
    assert columns["image"].tolist() == [JPEG, PNG, JPEG]
    (tmp_path / "dog" / "b.png").write_bytes(b"GIF89a")
    (error,) = rows(tmp_path)[1].unreadable
    assert "dog/b.png" in error.message
    assert rows(tmp_path, {"label"})[0]["label"] == ["cat", "cat", "dog", "dog"]


@pytest.mark.parametrize("kind", ["images", "mds", "webdataset"])
def test_folders_of_splits_are_not_mixed(tmp_path: Path, kind: str) -> None:
    for split in ("train", "val"):
        folder = tmp_path / split / "cat"
        folder.mkdir(parents=True)
        if kind == "images":
            (folder / "a.jpg").write_bytes(JPEG)
        elif kind == "mds":
            shutil.copy(PEERS / "mds" / "shard.00001.mds", folder)
        else:
            tar(folder / "a.tar", {"0.cls": b"1"})
    with pytest.raises(ConfigError, match="splits train, val"):
        rows(tmp_path)
    assert len(rows(tmp_path / "val")[0]) >= 1


def test_images_without_folders_have_no_label(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(JPEG)
    assert rows(tmp_path)[0] == {"image": [JPEG], "label": [None], "path": ["a.jpg"]}


def test_images_and_archives_next_to_tables_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x\n1\n")
    (tmp_path / "plot.png").write_bytes(PNG)
    tar(tmp_path / "old.tar", {"0.txt": b"x"})
    found, report = rows(tmp_path)
    assert found == {"x": ["1"]}
    assert {one.path: one.reason.rpartition("; ")[2] for one in report.left_out} == {
        "old.tar": "--format webdataset reads it",
        "plot.png": "--format images reads it",
    }
    assert rows(tmp_path, read=ReadOptions(format="images"))[0]["path"] == ["plot.png"]
    with pytest.raises(DataLeftOutError):
        rows(tmp_path, read=ReadOptions(strict=True))
    (tmp_path / "a.csv").unlink()
    with pytest.raises(ConfigError, match="several formats"):
        rows(tmp_path)


# ------------------------------------------------------------------ buckets


def test_sources_in_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    set_credentials(monkeypatch)
    with s3_server() as server:
        prefix = new_prefix(server)
        store = open_store(prefix)
        for path in sorted(PEERS.rglob("*")):
            if path.is_file():
                store.write(path.relative_to(PEERS).as_posix(), path.read_bytes())
        store.write("images/cat/a.jpg", JPEG)
        for source in ("hf_dataset/train", "webdataset.tar.gz", "mds"):
            assert rows(join(prefix, source))[0] == rows(PEERS / source)[0]
        assert rows(join(prefix, "images"))[0]["label"] == ["cat"]
        with pytest.raises(ConfigError, match="splits train, test") as caught:
            rows(join(prefix, "hf_dataset"))
        assert join(prefix, "hf_dataset/train") in caught.value.fix


# ------------------------------------------------------------------ memory

LIMITED = """
import resource, sys
from pathlib import Path
import geo_ray.data.shards as shards
import geo_ray.data.prepare.inputs as inputs
from geo_ray.data.files import arrow_file, image_folder, json_file, mds_file, tar_file
from geo_ray.data.files.find import find_files
from geo_ray.data.prepare.resolve import resolve
from geo_ray.data.prepare.config import parse_preparation
from geo_ray.data.split import IidSplit

for module in (arrow_file, image_folder, mds_file, tar_file):
    module._BATCH_BYTES = 2 << 20
json_file._GROUP_CHARS = 2 << 20
shards._SHARD_BYTES, inputs._COPY_BYTES = 2 << 20, 1 << 20


def run(source, name, out):
    prepare = parse_preparation(f"columns: {{image: {{column: {name}}}}}", "prepare.yaml")
    types = {"image": "string" if name == "text" else "bytes"}
    preparation = resolve(prepare, types).preparation
    found = inputs.gather_rows(find_files(source), preparation)
    parts = inputs.hold_out(found.columns, 0.1, 0)
    made = shards.write_shards(
        parts, "t", types, None, IidSplit(), ["a", "b"], 0, out
    )
    print(name, sum(shard.rows for shard in made.shards))


jobs = [line.split() for line in Path(sys.argv[1]).read_text().splitlines()]
run(*jobs[0])  # imports the rest
status = Path("/proc/self/status").read_text()
now = int(next(l for l in status.splitlines() if l.startswith("VmData")).split()[1]) << 10
resource.setrlimit(resource.RLIMIT_DATA, (now + (64 << 20),) * 2)
try:
    bytes(80 << 20)
except MemoryError:
    print("limited")
for job in jobs[1:]:
    run(*job)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_memory_does_not_depend_on_the_size_of_the_source(tmp_path: Path) -> None:
    """Sources of 80 MB are sharded by a process that may use 64 MB more than for a small one."""
    image = JPEG + b"x" * 80_000
    count = 1000
    small = tar(tmp_path / "small.tar", {f"{n}.jpg": image for n in range(40)})
    large = tar(tmp_path / "large.tar", {f"{n}.jpg": image for n in range(count)})
    sample = struct.pack("<I", len(image)) + image
    (tmp_path / "large.mds").write_bytes(shard([sample] * count, {"jpg": ("jpeg", None)}))
    schema = pa.schema({"jpg": pa.binary()})
    with pa.ipc.new_stream(str(tmp_path / "large.arrow"), schema) as stream:
        stream.write_batch(pa.record_batch([[image] * count], schema=schema))
    table = pa.table([[image] * count], schema=schema)
    small_pages = {"compression": "none", "use_dictionary": False, "write_batch_size": 8}
    pq.write_table(table, tmp_path / "large.parquet", **small_pages)
    lines = (json.dumps({"text": "x" * 80_000}) + "\n" for _ in range(count))
    (tmp_path / "large.jsonl").write_text("".join(lines))
    for n in range(count):
        path = tmp_path / "images" / str(n % 3) / f"{n}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image)
    jobs = [
        (small, "jpg"),
        (large, "jpg"),
        (tmp_path / "large.mds", "jpg"),
        (tmp_path / "large.arrow", "jpg"),
        (tmp_path / "large.parquet", "jpg"),
        (tmp_path / "large.jsonl", "text"),
        (tmp_path / "images", "image"),
    ]
    (tmp_path / "jobs").write_text(
        "".join(
            f"{source} {name} {tmp_path / f'out{n}'}\n" for n, (source, name) in enumerate(jobs)
        )
    )
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "jobs")],
        capture_output=True,
        text=True,
        check=False,
        env={
            "ARROW_DEFAULT_MEMORY_POOL": "system",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(tmp_path),
        },
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        *("jpg", "40", "limited", *["jpg", "1000"] * 4, "text", "1000", "image", "1000")
    ]


# ------------------------------------------------------------------ the command

TASK = """
import geo_ray


class Texts:
    Options, label_column = geo_ray.Options, "label"
    columns = {"text": "string", "tokens": "list<int32>", "image": "bytes", "label": "int64"}

    def __init__(self, options):
        pass

    def collate(self, columns, device): ...

    def model(self, seed): ...

    def loss(self, model, batch): ...

    def evaluate(self, model, batch): ...

    def metrics(self, stats): ...
"""


def test_held_out_rows_from_files_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "texts.py").write_text(TASK)
    (tmp_path / "prepare.yaml").write_text("columns: {image: {column: image.bytes}}")
    out = tmp_path / "data"
    command = (
        f"data shard --task {tmp_path}/texts.py:Texts --input {PEERS}/hf_dataset/train "
        f"--prepare {tmp_path}/prepare.yaml --regions a --out {out}"
    ).split()
    done = CliRunner().invoke(root, [*command, "--heldout", f"{PEERS}/hf_dataset/test"])
    assert done.exit_code == 0, done.output
    manifest = load_manifest(str(out))
    assert {(shard.split, shard.rows) for shard in manifest.shards} == {
        ("train", 3),
        ("heldout", 1),
    }
    (batch,) = RegionReader(manifest, "a", "heldout", 0).scan(9)
    assert batch["text"].tolist() == ["ccc"] and batch["tokens"].tolist() == [[4, 5, 6]]
    for wrong in ("1", "-0.5", "nan"):
        done = CliRunner().invoke(root, [*command, "--force", "--heldout", wrong])
        assert done.exit_code == 2 and "range" in done.output
    done = CliRunner().invoke(root, [*command, "--force", "--heldout", str(tmp_path / "none")])
    assert "there is no folder or file" in str(done.exception)


def test_columns_are_inspected() -> None:
    survey = inspect_data(PEERS / "hf_dataset" / "train")
    kinds = {row["column"]: (row["type"], row["remark"]) for row in survey.table().to_pylist()}
    assert kinds["image.bytes"] == ("bytes", "it has bytes, for a column of type bytes")
    assert "list<int32>" in kinds["tokens"][1]


def test_long_texts_are_not_kept(tmp_path: Path) -> None:
    lines = (json.dumps({"text": f"{n} " + "x" * 2000}) for n in range(50))
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    column = inspect_data(tmp_path).survey.columns["text"]
    assert (column.kind, column.distinct, len(column.seen)) == ("text", None, 0)
