from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from geo_ray.base.errors import ConfigError, GeoRayError, ManifestError, TaskLoadError
from geo_ray.cli.data import data
from geo_ray.data.manifest import load_manifest
from geo_ray.data.reader import RegionReader

TASK = '''
import geo_ray

class Toy:
    """Two columns, no data of its own."""
    class Options(geo_ray.Options):
        scale: float = 1.0
    columns = {"x": "float32[2]", "y": "int64"}
    label_column = "y"
    def __init__(self, options): self.options = options
    def model(self, seed): ...
    def collate(self, columns, device): ...
    def loss(self, model, batch): ...
    def evaluate(self, model, batch): ...
    def metrics(self, stats): ...
'''


def run(*arguments: object, code: int = 0, error: type[GeoRayError] | None = None) -> Result:
    result = CliRunner().invoke(data, [str(argument) for argument in arguments])
    if error is not None:
        assert type(result.exception) is error, result.output
    else:
        assert result.exit_code == code, result.output
    return result


def shard_digits(out: Path, *more: object, **expect: object) -> Result:
    regions = ("--regions", "us-east,eu-west,ap-south")
    return run("shard", "--task", "digits", "--out", out, *regions, *more, **expect)  # type: ignore[arg-type]


@pytest.fixture
def my_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A task file and a folder of Parquet files, in the current directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.py").write_text(TASK)
    (tmp_path / "mine").mkdir()
    for number in range(3):
        y = np.arange(number * 40, number * 40 + 40)
        x = [[float(value), 1.0] for value in y]
        pq.write_table(pa.table({"x": x, "y": y}), tmp_path / "mine" / f"part{number}.parquet")
    return tmp_path


def test_shard_then_check(tmp_path: Path) -> None:
    result = shard_digits(tmp_path / "out", "--rows-per-shard", 200)
    assert "us-east" in result.stdout
    assert str(tmp_path / "out" / "manifest.json") in result.stdout
    manifest = load_manifest(str(tmp_path / "out"))
    assert manifest.task == "digits"
    assert manifest.columns == {"image": "float32[64]", "label": "int64"}
    checked = run("check", tmp_path / "out" / "manifest.json")
    assert f"All {len(manifest.shards)} shards are valid." in checked.stdout
    assert f"{manifest.rows('us-east', 'train'):,}" in checked.stdout


def test_check_finds_what_is_bad_and_where(tmp_path: Path) -> None:
    shard_digits(tmp_path)
    victim = load_manifest(str(tmp_path)).of("eu-west", "train")[0]
    (tmp_path / victim.path).write_bytes(b"broken")
    result = run("check", tmp_path, code=3)
    assert f"shard {victim.path}" in result.stderr
    assert "DATA_CORRUPT" in result.stderr
    run("check", tmp_path, "--region", "eu-west", code=3)
    assert "eu-west" not in run("check", tmp_path, "--region", "us-east").stdout
    run("check", tmp_path, "--region", "mars", error=ManifestError)
    run("check", tmp_path / "nothing.json", error=ManifestError)


def test_splits_ratios_and_seeds(tmp_path: Path) -> None:
    shard_digits(tmp_path / "ratio", "--split", "ratio", "--ratio", "2,1,1")
    manifest = load_manifest(str(tmp_path / "ratio"))
    counts = [manifest.rows(region, "train") for region in manifest.regions()]
    assert abs(counts[0] - 2 * counts[1]) <= 2
    for split in (("dirichlet", "--alpha", 0.5), ("by_label",)):
        for seed in (1, 2):
            shard_digits(tmp_path / f"{split[0]}{seed}", "--split", *split, "--seed", seed)
    first, second = (load_manifest(str(tmp_path / f"dirichlet{seed}")) for seed in (1, 2))
    assert first.shards != second.shards


def test_each_region_may_have_its_own_store(tmp_path: Path) -> None:
    shard_digits(tmp_path / "out", "--store", f"eu-west={tmp_path / 'europe'}")
    manifest = load_manifest(str(tmp_path / "out"))
    assert manifest.stores["eu-west"] == (tmp_path / "europe").as_uri()
    assert manifest.stores["us-east"] == (tmp_path / "out").as_uri()
    assert not (tmp_path / "out" / "eu-west").exists()
    assert RegionReader(manifest, "eu-west", "train", 0).num_rows > 0


def test_an_existing_manifest_is_replaced_only_on_request(tmp_path: Path) -> None:
    shard_digits(tmp_path)
    before = (tmp_path / "manifest.json").read_bytes()
    shard_digits(tmp_path, "--seed", 1, error=ConfigError)
    assert (tmp_path / "manifest.json").read_bytes() == before
    shard_digits(tmp_path, "--seed", 1, "--force")
    run("check", tmp_path)
    assert (tmp_path / "manifest.json").read_bytes() != before


def test_own_files_are_sharded(my_files: Path) -> None:
    own = ("shard", "--task", "toy.py:Toy", "--input", "mine", "--regions", "a,b")
    run(*own, "--out", "out", "--heldout", 0.25, "--task-option", "scale=2.5")
    manifest = load_manifest("out")
    assert sum(manifest.rows(region, "heldout") for region in "ab") == 30
    found = [
        int(value)
        for region in ("a", "b")
        for split in ("train", "heldout")
        for batch in RegionReader(manifest, region, split, 0).scan(64)  # type: ignore[arg-type]
        for value in batch["x"][:, 0]
    ]
    assert sorted(found) == list(range(120))
    run(*own, "--out", "without", "--heldout", 0)
    assert {s.split for s in load_manifest("without").shards} == {"train"}


def test_regions_written_apart_are_merged(my_files: Path) -> None:
    for region in ("a", "b"):
        run(
            "shard", "--task", "toy.py:Toy", "--input", "mine", "--regions", region, "--out", region
        )
    run("merge", "a", "b/manifest.json", "--out", "all.json")
    merged = load_manifest("all.json")
    assert merged.regions() == ("a", "b")
    run("check", "all.json")
    run("merge", "a", "a", "--out", "twice.json", error=ManifestError)


@pytest.mark.parametrize(
    "more",
    [
        ("--split", "ratio"),
        ("--ratio", "1,1,1"),
        ("--split", "ratio", "--ratio", "1,1"),
        ("--split", "ratio", "--ratio", "1,1,x"),
        ("--split", "ratio", "--ratio", "1,1,0"),
        ("--split", "ratio", "--ratio", "1,1,nan"),
        ("--alpha", "1"),
        ("--split", "dirichlet", "--alpha", "0"),
        ("--store", "mars=/x"),
        ("--store", "us-east"),
        ("--heldout", "0.1"),
        ("--seed", "-1"),
        ("--rows-per-shard", "0"),
    ],
)
def test_bad_options_end_with_code_2_and_write_nothing(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    shard_digits(tmp_path / "out", *more, code=2)
    assert not (tmp_path / "out").exists()


def test_tasks_that_cannot_be_sharded_are_said_so(my_files: Path) -> None:
    rest = ("--regions", "a", "--out", "out")
    run("shard", "--task", "toy.py:Toy", *rest, error=ConfigError)
    run("shard", "--task", "digit", *rest, error=TaskLoadError)
    run("shard", "--task", "digits", "--task-option", "colour=1", *rest, error=TaskLoadError)
    for width in ("NaN", "Infinity", "1e999", "[1]"):  # no numbers that an option can have
        wrong = f"width={width}"
        run("shard", "--task", "digits", "--task-option", wrong, *rest, error=TaskLoadError)
    assert not (my_files / "out").exists()


def test_the_command_group_is_cheap_to_import() -> None:
    code = (
        "import sys, geo_ray.cli.data\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'pyarrow', 'boto3', 'numpy')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
