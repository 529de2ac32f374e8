"""Columns of text, bytes and lists: preparation, shards, tasks and simulated runs."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import geo_ray
from geo_ray.api.check import check
from geo_ray.api.data import SourceFiles, WantedStatistics, check_data, data_stats, inspect_data
from geo_ray.base.errors import ConfigError, SchemaMismatchError, ShardCorruptError
from geo_ray.data.columns import Ragged, check_columns, parse_types
from geo_ray.data.files.find import find_files
from geo_ray.data.manifest import load_manifest
from geo_ray.data.parquet import decode, encode
from geo_ray.data.prepare.config import parse_preparation
from geo_ray.data.prepare.inputs import gather_rows
from geo_ray.data.prepare.preparer import Preparer
from geo_ray.data.prepare.resolve import resolve
from geo_ray.data.reader import RegionReader
from geo_ray.data.tasks.load import check_task_columns

TYPES = {"text": "string", "image": "bytes", "tokens": "list<int32>", "label": "int64"}
ROWS: dict[str, list[Any]] = {
    "text": ["ä", "", "a longer text", "b"],
    "image": [b"\x00\xff", b"", b"abc", b"d"],
    "tokens": [[1, 2], [], [3], [4, 5, 6]],
    "label": [0, 1, 0, 1],
}

TASK = """
import numpy as np
import torch
from torch import nn
import geo_ray


class Texts:
    class Options(geo_ray.Options):
        pass

    columns = {"text": "string", "image": "bytes", "tokens": "list<int32>", "label": "int64"}
    label_column = "label"

    def __init__(self, options):
        pass

    def model(self, seed):
        return nn.EmbeddingBag(16, 2, mode="sum")

    def collate(self, columns, device):
        assert [len(text) for text in columns["text"]] == [len(t) for t in columns["tokens"]]
        assert [len(image) for image in columns["image"]] == [len(t) for t in columns["tokens"]]
        tokens = columns["tokens"]
        flat, starts = torch.from_numpy(tokens.values), torch.from_numpy(tokens.offsets[:-1])
        return flat.long(), starts, torch.from_numpy(columns["label"])

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0], batch[1]), batch[2])

    def evaluate(self, model, batch):
        return {"rows": np.array([float(len(batch[2]))])}

    def metrics(self, stats):
        return {"rows": float(stats["rows"][0])}

    def dataset(self, seed):
        lengths = np.random.default_rng(seed).integers(0, 9, 48)
        rows = {
            "text": ["x" * n for n in lengths],
            "image": [b"x" * n for n in lengths],
            "tokens": [list(range(n)) for n in lengths],
            "label": lengths % 2,
        }
        return geo_ray.Dataset(
            {name: column[:40] for name, column in rows.items()},
            {name: column[40:] for name, column in rows.items()},
        )
"""


def table(rows: dict[str, list[Any]] | None = None) -> pa.Table:
    return pa.table(rows or ROWS)


def gather(folder: Path, prepare: str = "columns: {}", types: dict[str, str] | None = None) -> Any:
    resolved = resolve(parse_preparation(prepare, "prepare.yaml"), types or TYPES)
    return gather_rows(find_files(str(folder)), resolved.preparation)


def task_file(folder: Path) -> str:
    path = folder / "texts.py"
    path.write_text(TASK)
    return f"{path}:Texts"


def test_files_become_ragged_columns(tmp_path: Path) -> None:
    pq.write_table(table(), tmp_path / "a.parquet")
    wide = table().cast(
        pa.schema(
            {
                "text": pa.large_string(),
                "image": pa.large_binary(),
                "tokens": pa.large_list(pa.int64()),
                "label": pa.int8(),
            }
        )
    )
    pq.write_table(wide, tmp_path / "b.parquet")
    dictionary = table().set_column(0, "text", table()["text"].dictionary_encode())
    pq.write_table(dictionary, tmp_path / "c.parquet")
    columns = gather(tmp_path).columns
    for name in ("text", "image", "tokens"):
        assert columns[name].tolist() == ROWS[name] * 3
    assert columns["tokens"].values.dtype == np.int32


def test_json_lines_and_csv(tmp_path: Path) -> None:
    (tmp_path / "json").mkdir()
    lines = '{"text": "a\\nb", "tokens": [1, 2]}\n{"text": "1.50", "tokens": []}\n'
    (tmp_path / "json" / "a.jsonl").write_text(lines)
    types = {"text": "string", "tokens": "list<int32>"}
    columns = gather(tmp_path / "json", types=types).columns
    assert columns["text"].tolist() == ["a\nb", "1.50"]
    assert columns["tokens"].tolist() == [[1, 2], []]
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / "a.csv").write_text('text\n"a, b"\n007\n')
    assert gather(tmp_path / "csv", types={"text": "string"}).columns["text"].tolist() == [
        "a, b",
        "007",
    ]


@pytest.mark.parametrize(
    ("column", "values", "part"),
    [
        ("text", [1, 2, 3, 4], "'text': has values such as 1, where text is required"),
        ("text", ["a", None, "b", "c"], "'text': has no value"),
        (
            "image",
            ["a", "b", "c", "d"],
            "'image': has values such as 'a', where bytes are required",
        ),
        ("tokens", [1, 2, 3, 4], "'tokens': has single values such as 1; the task requires a list"),
        ("tokens", [[1], [2**40], [], []], "do not fit; the task requires a list of int32 numbers"),
        ("tokens", [[1], [0.5], [], []], "that are not whole"),
        ("tokens", [[1], [None], [], []], "'tokens': has no value"),
        ("tokens", [["a"], [], [], []], "'tokens': has text"),
        ("label", [[1], [2], [], []], "'label': has a list of numbers in each row"),
    ],
)
def test_values_of_another_type_are_refused(
    tmp_path: Path, column: str, values: list[Any], part: str
) -> None:
    pq.write_table(table(ROWS | {column: values}), tmp_path / "a.parquet")
    with pytest.raises(SchemaMismatchError) as caught:
        gather(tmp_path)
    assert part in caught.value.message


def test_infinite_numbers_of_lists_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"wave": [[1.0, float("inf")]]}), tmp_path / "a.parquet")
    with pytest.raises(SchemaMismatchError, match="infinite"):
        gather(tmp_path, types={"wave": "list<float32>"})


def test_rows_without_values_can_be_dropped(tmp_path: Path) -> None:
    rows = ROWS | {"text": ["a", None, "c", "d"], "tokens": [[1], [2], [3, None], [4, 5]]}
    pq.write_table(table(rows), tmp_path / "a.parquet")
    prepare = (
        "columns: {text: {column: text, missing: drop_row}, tokens: {column: tokens, "
        "missing: drop_row}}"
    )
    found = gather(tmp_path, prepare)
    assert found.columns["text"].tolist() == ["a", "d"]
    assert found.columns["tokens"].tolist() == [[1], [4, 5]]
    assert found.columns["image"].tolist() == [ROWS["image"][0], ROWS["image"][3]]
    assert (found.counts.rows, found.counts.dropped) == (4, 2)


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("{column: text, vocabulary: {hash: 4}}", "vocabulary cannot be used"),
        ("{column: text, cast: time}", "cast cannot be used"),
        ("{column: text, missing: {fill: 0}}", "missing cannot be used"),
        ("[{column: text}, {column: label}]", "has one source, not 2"),
    ],
)
def test_a_column_of_text_is_only_copied(source: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        resolve(parse_preparation(f"columns: {{text: {source}}}", "prepare.yaml"), TYPES)


def test_rows_at_inference() -> None:
    prepare = parse_preparation("columns: {text: {column: body}}", "prepare.yaml")
    preparer = Preparer(resolve(prepare, TYPES).preparation, only=["text", "tokens", "image"])
    rows = {"body": ["a", "b"], "tokens": [[1], []], "image": [b"x", b""]}
    made = preparer.apply(rows).columns
    assert [made[name].tolist() for name in ("text", "tokens", "image")] == list(rows.values())


def test_shards_checks_and_statistics(tmp_path: Path) -> None:
    source = tmp_path / "files"
    source.mkdir()
    rows = {name: values * 10 for name, values in ROWS.items()}
    body = {("body" if name == "text" else name): values for name, values in rows.items()}
    pq.write_table(pa.table(body | {"size": list(range(40))}), source / "a.parquet")
    prepare = tmp_path / "prepare.yaml"
    prepare.write_text("columns: {text: {column: body}, image: {column: image}}")
    task, out = task_file(tmp_path), tmp_path / "data"
    made = geo_ray.shard_data(
        task, ["a", "b"], out, files=SourceFiles(source, prepare=prepare), rows_per_shard=7
    )
    manifest = load_manifest(str(out))
    assert manifest.columns == TYPES and made.manifest.columns == TYPES
    found = sorted(
        (row, list(tokens))
        for region in ("a", "b")
        for split in ("train", "heldout")
        for batch in RegionReader(manifest, region, split, 0).scan(5)  # type: ignore[arg-type]
        for row, tokens in zip(batch["text"], batch["tokens"], strict=True)
    )
    assert found == sorted(zip(rows["text"], rows["tokens"], strict=True))
    assert not check_data(out).bad
    file = out / manifest.shards[0].path
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert isinstance(check_data(out).bad[0].error, ShardCorruptError)
    # A preparation that copies text and needs statistics of another column.
    prepare.write_text(
        "columns: {text: {column: body}, image: {column: image}, label: {column: size, scale: "
        "standard}}"
    )
    stats = data_stats(source, "a", WantedStatistics(prepare=prepare))
    assert stats.statistics.columns["size"].mean == 19.5
    draft = tmp_path / "draft.yaml"
    inspect_data(source, task=task, draft=draft)
    assert "tokens: {column: tokens}\n" in draft.read_text()


def test_equal_rows_give_equal_files_and_missing_values_are_refused() -> None:
    types = parse_types({"text": "string", "tokens": "list<int32>"})
    columns = {n: Ragged.of(str(types[n]), ROWS[n]) for n in types}
    data = encode(columns, types)
    assert hashlib.sha256(data).digest() == hashlib.sha256(encode(columns, types)).digest()
    for bad in (
        pa.table({"text": pa.array(["a", None], pa.large_string())}),
        pa.table({"text": pa.array(["a"], pa.string())}),
        pa.table({"tokens": pa.array([[1, None]], pa.large_list(pa.int32()))}),
        pa.table({"tokens": pa.array([[1]], pa.large_list(pa.int64()))}),
    ):
        sink = pa.BufferOutputStream()
        pq.write_table(bad, sink)
        wanted = {name: types[name] for name in bad.column_names}
        with pytest.raises(SchemaMismatchError):
            decode(bytes(sink.getvalue()), wanted, "a file")


def test_text_that_is_not_utf8_is_refused() -> None:
    broken = Ragged("string", np.array([0xFF], np.uint8), np.array([0, 1]))
    with pytest.raises(SchemaMismatchError, match="UTF-8"):
        encode({"text": broken}, parse_types({"text": "string"}))


def test_a_shard_ends_before_its_rows_become_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("geo_ray.data.shards._SHARD_BYTES", 1000)
    source = tmp_path / "files"
    source.mkdir()
    rows = {name: values * 50 for name, values in ROWS.items()} | {"text": ["y" * 300] * 200}
    pq.write_table(pa.table(rows), source / "a.parquet")
    made = geo_ray.shard_data(task_file(tmp_path), ["a"], tmp_path / "d", files=SourceFiles(source))
    assert {shard.rows for shard in made.manifest.shards} <= {1, 2, 3}
    assert sum(shard.rows for shard in made.manifest.shards) == 200


def test_a_simulated_run_trains_on_text_and_lists(tmp_path: Path) -> None:
    run = geo_ray.simulate(
        {
            "name": "texts",
            "task": {"use": task_file(tmp_path)},
            "regions": [{"name": "a", "workers": 1}, {"name": "b", "workers": 2}],
            "strategy": {"kind": "sma", "interval": 2},
            "optimizer": {"kind": "momentum", "lr": 0.1},
            "data": {"batch_size": 8, "generate": {"rows_per_shard": 6}},
            "train": {"steps": 6, "eval_every": 3},
            "run": {"dir": str(tmp_path / "runs")},
        }
    )
    assert run.summary.samples > 0


@pytest.mark.parametrize("has_data", [True, False])
def test_a_task_with_text_passes_the_checks(tmp_path: Path, has_data: bool) -> None:
    use = task_file(tmp_path)
    if not has_data:  # then the checks draw rows
        path = tmp_path / "texts.py"
        path.write_text(TASK.replace("def dataset", "def other"))
    found = check(use)
    assert not found.broken


def test_types_that_are_not_allowed() -> None:
    for text in ("str", "list", "list<string>", "list<int32>[3]", "string[3]", "list<list<int8>>"):
        with pytest.raises(SchemaMismatchError, match="not allowed"):
            parse_types({"x": text})


@pytest.mark.parametrize(
    ("kind", "values", "offsets"),
    [
        ("list", np.zeros(3, np.int8), np.array([0, 2])),
        ("list", np.zeros(3, np.int8), np.array([1, 3])),
        ("list", np.zeros(3, np.int8), np.array([], np.int64)),
        ("list", np.zeros(3, np.int8), np.array([0, 3], np.int32)),
        ("list", np.zeros((3, 1), np.int8), np.array([0, 3])),
        ("bytes", np.zeros(3, np.int8), np.array([0, 3])),
    ],
)
def test_offsets_that_do_not_fit_are_refused(kind: Any, values: Any, offsets: Any) -> None:
    with pytest.raises(SchemaMismatchError):
        Ragged(kind, values, offsets)


def test_a_row_that_is_not_there() -> None:
    column = Ragged.of("string", ["a", "b"])
    for row in (2, -3):
        with pytest.raises(IndexError):
            column[row]
    with pytest.raises(SchemaMismatchError, match="equal length"):
        Ragged.of("int64", [1])


def test_columns_of_another_type_are_named() -> None:
    text, numbers = Ragged.of("string", ["a"]), np.zeros(1, np.int64)
    for declared, column, part in (
        ("bytes", text, "has one text in each row, declared as one value of bytes"),
        ("int64", text, "has one text in each row, declared as one int64 number"),
        ("string", numbers, "has one int64 value in each row, declared as one text"),
        ("list<int8>", Ragged.of("list<int16>", [[1]]), "declared as a list of int8 numbers"),
    ):
        with pytest.raises(SchemaMismatchError, match=part):
            check_columns({"x": column}, parse_types({"x": declared}), "the data")
        with pytest.raises(SchemaMismatchError, match=f"the task has {declared}"):
            check_task_columns({"x": declared}, {"x": column})
    check_columns({"x": text}, parse_types({"x": "string"}), "the data")
    check_task_columns({"x": "string"}, {"x": text})
