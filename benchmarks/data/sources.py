"""Memory and time of sharding the same images from each kind of source, in two sizes.

Each source is sharded by `geo-ray data shard`; its peak is that of anonymous memory, read from
/proc every 10 ms. Pages of files do not count: the system drops them when memory is short. The
packing of tokens into rows of 1024 is measured in this process.
"""

from __future__ import annotations

import io
import json
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.common import support
from geo_ray.data.columns import Ragged
from geo_ray.data.packing import pack

IMAGE_BYTES = 100_000
SIZES_MB = (250, 1000)
TOKENS, LENGTH = 20_000_000, 1024
TASK = """
import geo_ray


class Images:
    Options, label_column, columns = geo_ray.Options, None, {"image": "bytes"}

    def __init__(self, options): ...

    def collate(self, columns, device): ...

    def model(self, seed): ...

    def loss(self, model, batch): ...

    def evaluate(self, model, batch): ...

    def metrics(self, stats): ...
"""


def images(count: int) -> Iterator[bytes]:
    """Bytes that cannot be compressed, with the start of a JPEG file."""
    chance = np.random.default_rng(0)
    for _ in range(count):
        yield b"\xff\xd8\xff" + chance.bytes(IMAGE_BYTES)


def write_webdataset(folder: Path, count: int) -> str:
    """One tar file."""
    with tarfile.open(folder / "images.tar", "w") as archive:
        for number, image in enumerate(images(count)):
            info = tarfile.TarInfo(f"{number:06}.jpg")
            info.size = len(image)
            archive.addfile(info, io.BytesIO(image))
    return "jpg"


def write_mds(folder: Path, count: int) -> str:
    """Shards of 64 MB, the default of that library."""
    columns = {"column_names": ["jpg"], "column_encodings": ["jpeg"], "column_sizes": [None]}
    text = json.dumps(columns).encode()
    per_shard = 64_000_000 // IMAGE_BYTES
    source = images(count)
    for shard in range(-(-count // per_shard)):
        rows = [next(source) for _ in range(min(per_shard, count - shard * per_shard))]
        rows = [struct.pack("<I", len(row)) + row for row in rows]
        offsets = np.cumsum([4 * (len(rows) + 2) + len(text), *map(len, rows)]).tolist()
        head = struct.pack(f"<{len(rows) + 2}I", len(rows), *offsets)
        (folder / f"shard.{shard:05}.mds").write_bytes(head + text + b"".join(rows))
    return "jpg"


def write_hugging_face(folder: Path, count: int) -> str:
    """One Arrow stream with batches of 100 rows, as that library writes images."""
    schema = pa.schema({"jpg": pa.binary()})
    source = images(count)
    with pa.ipc.new_stream(str(folder / "data.arrow"), schema) as stream:
        for begin in range(0, count, 100):
            rows = [next(source) for _ in range(min(100, count - begin))]
            stream.write_batch(pa.record_batch([rows], schema=schema))
    state = {"_data_files": [{"filename": "data.arrow"}]}
    (folder / "state.json").write_text(json.dumps(state))
    return "jpg"


def write_folder(folder: Path, count: int) -> str:
    """A file per image, in ten classes."""
    for number, image in enumerate(images(count)):
        path = folder / str(number % 10) / f"{number:06}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(image)
    return "image"


SOURCES: dict[str, Callable[[Path, int], str]] = {
    "webdataset": write_webdataset,
    "mds": write_mds,
    "hugging_face": write_hugging_face,
    "folder": write_folder,
}


def anonymous_mb(pid: int) -> float:
    """Anonymous memory of a process; 0 once it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    return next((int(s.split()[1]) / 1e3 for s in status.splitlines() if s[:7] == "RssAnon"), 0.0)


def shard(source: Path, column: str, out: Path) -> tuple[float, float]:
    """Run ``geo-ray data shard``; the peak in MB and the seconds."""
    (out / "task.py").write_text(TASK)
    (out / "prepare.yaml").write_text(f"columns: {{image: {{column: {column}}}}}\n")
    command = (
        f"data shard --task {out}/task.py:Images --input {source} --prepare {out}/prepare.yaml "
        f"--regions a,b --out {out}/shards"
    )
    start, peak = time.monotonic(), 0.0
    with subprocess.Popen(
        [sys.executable, "-c", "from geo_ray.cli.main import main; main()", *command.split()],
        stdout=subprocess.DEVNULL,
    ) as process:
        while process.poll() is None:
            peak = max(peak, anonymous_mb(process.pid))
            time.sleep(0.01)
    if process.returncode:
        raise SystemExit(process.returncode)
    return peak, time.monotonic() - start


def packing() -> list[support.Figure]:
    """Tokens per second of both ways, and the used part of the rows."""
    chance = np.random.default_rng(0)
    lengths = np.minimum(chance.lognormal(5.5, 1.2, TOKENS // 400).astype(np.int64) + 1, 20_000)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    tokens = Ragged("list", np.arange(offsets[-1], dtype=np.int32), offsets)
    figures = []
    for name, whole in (("stream", False), ("whole", True)):
        start = time.monotonic()
        rows = pack(tokens, LENGTH, whole=whole)
        rate = len(tokens.values) / (time.monotonic() - start) / 1e6
        used = len(tokens.values) / rows.tokens.size
        figures.append(support.Figure(f"packed_{name}", rate, "M tokens/s"))
        figures.append(support.Figure(f"used_{name}", used, "ratio"))
    return figures


def main() -> None:
    options = support.parse(__doc__)
    machine = support.hardware()
    figures = packing()
    for name, write in SOURCES.items():
        for size in SIZES_MB[:1] if options.quick else SIZES_MB:
            with tempfile.TemporaryDirectory() as folder:
                source, out = Path(folder, "source"), Path(folder, "out")
                source.mkdir()
                out.mkdir()
                column = write(source, size * 1_000_000 // IMAGE_BYTES)
                peak_mb, seconds = shard(source, column, out)
            support.say(f"{name}, {size} MB: {peak_mb:.0f} MB, {seconds:.1f} s")
            figures.append(support.Figure(f"peak_{name}_{size}_mb", peak_mb, "MB"))
            figures.append(support.Figure(f"time_{name}_{size}_mb", seconds, "s"))
    support.finish("sources", machine, figures, options.out)


if __name__ == "__main__":
    main()
