"""Sites whose files differ in names, words, times and units become one data set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from geo_ray.base.errors import ConfigError, GeoRayError, ManifestError, SchemaMismatchError
from geo_ray.cli.data import data
from geo_ray.data.files.find import find_files
from geo_ray.data.files.options import ReadOptions
from geo_ray.data.files.rows import ReadReport, read_rows
from geo_ray.data.files.site import SiteFile, SiteReader, load_site
from geo_ray.data.manifest import load_manifest
from geo_ray.data.prepare.preparer import Preparer
from geo_ray.data.prepare.saved_preparation import load_prepared
from geo_ray.data.reader import RegionReader
from tests.support.data_support import columns_task

PREPARE = """\
columns:
  x:
    - {column: weight, missing: mean, scale: standard}
    - {column: seen, cast: time, scale: standard}
    - {column: ward, vocabulary: {values: [surgery, icu]}}
  died: {column: died, vocabulary: {values: [no, yes], other: refuse}}
"""

SITE = """\
columns:
  Gewicht: {rename: weight, words: {unbekannt: null}, unit: {multiply: 0.5}}
  Aufnahme: {rename: seen, cast: {time: "%d.%m.%Y"}}
  Station: {rename: ward, words: {Chirurgie: surgery}}
  Tod: {rename: died, words: {1: yes, 0: no}}
"""

READ = ("--delimiter", ";", "--decimal", ",", "--thousands", ".", "--site", "site.yaml")


def run(*arguments: object, error: type[GeoRayError] | None = None) -> Result:
    result = CliRunner().invoke(data, [str(argument) for argument in arguments])
    if error is None:
        assert result.exit_code == 0, result.output
    else:
        assert type(result.exception) is error, result.output
    return result


def message_of(result: Result) -> str:
    assert isinstance(result.exception, GeoRayError)
    return result.exception.message


@pytest.fixture
def sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same twenty patients twice, as an English and as a German hospital write them."""
    monkeypatch.chdir(tmp_path)
    us, eu = ["id,weight,seen,ward,died"], ["Nr;Gewicht;Aufnahme;Station;Tod"]
    for n in range(20):
        day, dead = f"{n + 1:02}", n % 2
        ward = ("surgery", "icu", "er")[n % 3]
        us.append(f"u{n},{1500 + n + 0.25},2024-02-{day},{ward},{('no', 'yes')[dead]}")
        weight = f"{3000 + 2 * n + 0.5:,.2f}".translate(str.maketrans(",.", ".,"))
        german = "Chirurgie" if ward == "surgery" else ward
        eu.append(f"e{n};{weight};{day}.02.2024;{german};{dead}")
    for region, lines in (("us", us), ("eu", eu)):
        Path(region).mkdir()
        Path(region, "a.csv").write_text("\n".join(lines) + "\n")
    Path("ward.py").write_text(columns_task("Ward", "died", 5))
    Path("prepare.yaml").write_text(PREPARE)
    Path("site.yaml").write_text(SITE)
    return tmp_path


def stats(region: str, *more: object, **expect: Any) -> Result:
    out = ("--region", region, "--prepare", "prepare.yaml", "--out", f"{region}.json")
    return run("stats", region, *out, *more, **expect)


def shard(region: str, *more: object, **expect: Any) -> Result:
    return run(
        "shard", "--task", "ward.py:Ward", "--input", region, "--regions", region, "--out",
        f"out/{region}", "--prepare", "prepare.yaml", "--stats", "all.json", "--heldout", 0, *more,
        **expect,
    )  # fmt: skip


def test_two_sites_with_nothing_in_common_give_the_same_rows(sites: Path) -> None:
    stats("us")
    stats("eu", *READ)
    one, two = (json.loads(Path(f"{region}.json").read_text()) for region in ("us", "eu"))
    assert one["columns"] == two["columns"]
    run("merge-stats", "us.json", "eu.json", "--out", "all.json")
    shard("us")
    shown = shard("eu", *READ).stdout
    assert "6 with other words in ward: er 6" in shown
    run("merge", "out/us", "out/eu", "--out", "both.json")
    manifest = load_manifest("both.json")
    rows = {
        region: sorted(
            (*x.tolist(), label)
            for batch in RegionReader(manifest, region, "train", 0).scan(500)
            for x, label in zip(batch["x"], batch["died"], strict=True)
        )
        for region in ("us", "eu")
    }
    assert len(rows["us"]) == 20
    assert rows["us"] == rows["eu"]
    preparations = [Path(f"out/{r}/manifest.preparation.json").read_bytes() for r in ("us", "eu")]
    assert preparations[0] == preparations[1]
    shared = {"weight": [1500.25], "seen": ["2024-02-01"], "ward": ["surgery"]}
    own = {"Gewicht": ["3.000,50"], "Aufnahme": ["01.02.2024"], "Station": ["Chirurgie"]}
    prepared = load_prepared("both.json")
    here = Preparer(prepared, ["x"], decimal=",", thousands=".", site=load_site(Path("site.yaml")))
    expected = Preparer(prepared, ["x"]).apply(shared).columns["x"]
    np.testing.assert_array_equal(here.apply(own).columns["x"], expected)
    with pytest.raises(SchemaMismatchError, match=r"not written as %d\.%m\.%Y"):
        here.apply({**own, "Aufnahme": ["2024-02-01"]})


def site_rows(folder: Path, site: str, **options: Any) -> dict[str, list[Any]]:
    """The rows of the Parquet or CSV files of a folder, translated."""
    (folder / "site.yaml").write_text(site)
    found = find_files(str(folder), ReadOptions(site=folder / "site.yaml", **options))
    report = ReadReport()
    batches = list(read_rows(found, None, report))
    if report.unreadable:
        raise report.unreadable[0]
    return {
        name: [value for batch in batches for value in batch.piece.columns[name].to_pylist()]
        for name in batches[0].piece.columns
    }


def test_a_site_file_says_how_its_files_are_read(sites: Path) -> None:
    marks = {"delimiter": ";", "decimal": ",", "thousands": "."}
    expected = site_rows(sites / "eu", SITE, format="csv", **marks)
    site = SITE + 'read: {delimiter: ";", decimal: ",", thousands: "."}\n'
    assert site_rows(sites / "eu", site, format="csv") == expected
    assert site_rows(sites / "eu", site, format="csv", **marks) == expected  # said twice
    with pytest.raises(ConfigError, match=r"thousands to '\.', but --thousands") as caught:
        site_rows(sites / "eu", site, format="csv", thousands=" ")
    assert "Remove --thousands" in caught.value.fix
    (sites / "site.yaml").write_text(site)
    read = ("--site", "site.yaml")
    run("inspect", "eu", *read)
    stats("us")
    stats("eu", *read)
    run("merge-stats", "us.json", "eu.json", "--out", "all.json")
    shard("eu", *read)
    prepared = load_prepared("out/eu/manifest.json")
    here = Preparer(prepared, ["x"], site=load_site(Path("site.yaml")))
    own = {"Gewicht": ["3.000,50"], "Aufnahme": ["01.02.2024"], "Station": ["Chirurgie"]}
    shared = {"weight": [1500.25], "seen": ["2024-02-01"], "ward": ["surgery"]}
    expected_x = Preparer(prepared, ["x"]).apply(shared).columns["x"]
    np.testing.assert_array_equal(here.apply(own).columns["x"], expected_x)


def test_a_site_file_names_columns_encoding_and_words_for_no_value(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes("Köln\t1 000\n-\t2 000\n".encode("latin-1"))
    site = """\
read: {delimiter: tab, thousands: space, encoding: latin-1, header: [Ort, n], nulls: ["-"]}
columns:
  Ort: {rename: city}
  n: {unit: {multiply: 2}}
"""
    rows = site_rows(tmp_path, site, format="csv")
    assert rows == {"city": ["Köln", None], "n": [2000.0, 4000.0]}


def test_typed_columns_are_translated_too(tmp_path: Path) -> None:
    table = {
        "code": pa.array([1, 2, 9, None], pa.int8()),
        "kg": pa.array([1.5, float("nan"), 2.0, None]),
        "day": pa.array([20240131, 20240201, None, 20240301]),
        "time": pa.array([1, 2, 3, None], pa.timestamp("s")),
        "flag": pa.array([True, False, None, True]),
    }
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    site = """\
columns:
  code: {rename: sex, words: {1: f, 2: m, 9: null}}
  kg: {unit: {multiply: 1000, add: -1}}
  day: {cast: {time: "%Y%m%d"}}
  time: {cast: {time: "%Y%m%d"}}
  flag: {words: {true: yes, false: no}}
"""
    rows = site_rows(tmp_path, site, format="parquet")
    assert rows["sex"] == ["f", "m", None, None]
    assert str(rows["kg"]) == "[1499.0, nan, 1999.0, None]"
    assert [day and day.isoformat()[:10] for day in rows["day"]] == [
        "2024-01-31", "2024-02-01", None, "2024-03-01",
    ]  # fmt: skip
    assert rows["time"][0].second == 1
    assert rows["flag"] == ["yes", "no", None, "yes"]


@pytest.mark.parametrize("shape", [pa.int64(), pa.uint32()])
def test_whole_numbers_that_are_times_have_their_zeros_in_front(
    tmp_path: Path, shape: pa.DataType
) -> None:
    days = pa.array([1012026, 31122026, 10102026], shape)  # 1012026 could be the 10th of January
    pq.write_table(pa.table({"day": days}), tmp_path / "a.parquet")
    site = 'columns:\n  day: {cast: {time: "%d%m%Y"}}\n'
    rows = site_rows(tmp_path, site, format="parquet")
    found = [day.isoformat()[:10] for day in rows["day"]]
    assert found == ["2026-01-01", "2026-12-31", "2026-10-10"]


@pytest.mark.parametrize(
    ("site", "message"),
    [
        ("a: {cast: {time: '%d.%m.%Y'}}", "column 'a' has times not written as %d.%m.%Y"),
        ("a: {unit: {multiply: 2}}", "column 'a' has text where a unit needs numbers"),
        ("aa: {rename: c}", "names the column 'aa' (did you mean 'a'?), which no file has"),
        ("a: {rename: b}", "the columns a, b both become 'b'"),
    ],
)
def test_what_cannot_be_translated_is_said_with_its_place(
    tmp_path: Path, site: str, message: str
) -> None:
    (tmp_path / "x.csv").write_text("a,b\n01.02.2024,1\n1.2.24,2\n")
    with pytest.raises(SchemaMismatchError) as caught:
        site_rows(tmp_path, f"columns:\n  {site}\n", format="csv")
    assert message in caught.value.message
    assert "site.yaml" in caught.value.fix
    if "times" in message:
        assert "such as '1.2.24' (1 row, first in row 2; %d.%m.%y fits it)" in caught.value.message


@pytest.mark.parametrize(
    ("site", "message"),
    [
        ("columns: {a: {renam: b}}", "renam"),
        ("columns: {a: {rename: c}, b: {rename: c}}", "two of them become 'c'"),
        ("columns: {a: {unit: {multiply: 0}}}", "multiply must not be 0"),
        ("columns: {a: {cast: {time: '%d.%m.'}}}", "needs a year, a month and a day"),
        ("columns: {a: {cast: {time: '%Y-%Q'}}}", "is not a valid format"),
        ("columns: {a: {cast: {time: '%Y%m%d'}, unit: {add: 1}}}", "a time has no unit"),
        ("columns: {a: {words: {1: x, '1.0': y}}}", "'1' is listed twice"),
        ("read: {delimitr: ;}", "did you mean delimiter?"),
        ("read: {decimal: ;}", "decimal"),
    ],
)
def test_a_site_file_that_makes_no_sense_is_refused(
    tmp_path: Path, site: str, message: str
) -> None:
    (tmp_path / "site.yaml").write_text(site)
    with pytest.raises(ConfigError) as caught:
        load_site(tmp_path / "site.yaml")
    assert message in caught.value.message
    with pytest.raises(ConfigError, match="there is no site file"):
        load_site(tmp_path / "sit.yaml")


@pytest.mark.parametrize(
    ("read", "message"),
    [
        ("{delimiter: ';;'}", "site.yaml: read: --delimiter: ';;' is not one character"),
        ("{encoding: utf-9}", "site.yaml: read: --encoding: unknown encoding 'utf-9'"),
        ("{decimal: ',', thousands: ','}", "site.yaml: read: --thousands and --decimal are both"),
    ],
)
def test_reading_options_of_a_site_file_that_make_no_sense_are_refused(
    tmp_path: Path, read: str, message: str
) -> None:
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError) as caught:
        site_rows(tmp_path, f"read: {read}\n", format="csv")
    assert message in caught.value.message
    assert "Correct `read` in" in caught.value.fix


# ------------------------------------------------------------------ refusals along the way


def test_stats_refuse_what_shard_would_refuse(sites: Path) -> None:
    run("inspect", "us")
    path = Path("us/a.csv")
    whole = path.read_text()
    for old, new, message in (
        (",yes\n", ",Yes\n", "column 'died' (prepare.yaml, line 6): has words such as 'Yes'"),
        (",no\n", ",\n", "column 'died' (prepare.yaml, line 6): has no value"),
        ("2024-02-07", "7.2.2024", "has text such as '7.2.2024', where a number is required"),
        ("1506.25", "1506 kg", "column 'weight' (for 'x'; prepare.yaml, line 3): has text such as"),
        (",icu,", ",,", "column 'ward' (for 'x'; prepare.yaml, line 5): has no value"),
    ):
        path.write_text(whole.replace(old, new))
        refused = message_of(stats("us", error=SchemaMismatchError))
        assert message in refused
        assert "first in row" in refused
        Path("all.json").write_text("{}")
        assert not Path("us.json").exists()
    path.write_text(whole.replace("died", "dead"))
    assert "no column 'died'" in message_of(stats("us", error=ConfigError))


def test_words_that_a_site_does_not_translate_stay_as_they_are_written() -> None:
    site = SiteFile.model_validate({"columns": {"n": {"words": {"k.A.": None, "7": "8"}}}})
    numbers = pa.array(["1.000", "12.000", "2.345", "k.A.", "7.0"])
    found = SiteReader(site, "site.yaml", ",", ".").columns({"n": numbers}, 1)["n"]
    assert found.to_pylist() == ["1.000", "12.000", "2.345", None, "8"]


def test_untranslated_values_are_said_once_with_what_reads_them(sites: Path) -> None:
    read = ("--delimiter", ";", "--site", "site.yaml")
    refused = message_of(stats("eu", *read, error=SchemaMismatchError))
    assert "such as '3.000,50' (20 rows, first in row 1; add --thousands . --decimal ,)" in refused
    assert "column 'weight'" not in refused
    Path("site.yaml").write_text(SITE.replace(", unit: {multiply: 0.5}", ""))
    comma = ("--delimiter", ";", "--decimal", ",", "--site", "site.yaml")
    refused = message_of(stats("eu", *comma, error=SchemaMismatchError))
    assert "add --thousands . --decimal ," in refused
    Path("site.yaml").write_text(SITE.replace("%d.%m.%Y", "%m/%d/%Y"))
    stats("us")
    run("merge-stats", "us.json", "--out", "all.json")
    refused = message_of(shard("eu", *READ, error=SchemaMismatchError))
    assert "such as '01.02.2024' (20 rows, first in row 1; %d.%m.%Y fits it)" in refused
    assert "column 'seen'" not in refused


def test_stats_do_not_refuse_what_depends_on_the_task(sites: Path) -> None:
    rows = [{"v": [1.0, 2.0], "big": 2**60 + 1, "weight": 1.0 * n} for n in range(3)]
    Path("us/a.csv").unlink()
    Path("us/a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    columns = "{v: {column: v}, big: {column: big}, w: {column: weight, scale: minmax}}"
    Path("prepare.yaml").write_text(f"columns: {columns}\n")
    stats("us")
    assert json.loads(Path("us.json").read_text())["needed"] == ["weight"]


def test_merged_statistics_without_a_mean_that_is_needed_are_refused(sites: Path) -> None:
    stats("us")
    run("stats", "eu", "--region", "eu", "--delimiter", ";", "--out", "eu.json")
    merge = ("merge-stats", "us.json", "eu.json", "--out", "all.json")
    refused = message_of(run(*merge, error=ConfigError))
    assert "weight: eu has none" in refused
    assert "eu: written for no preparation" in refused
    assert not Path("all.json").exists()
    Path("us/a.csv").write_text("weight,seen,ward,died\n,2024-01-01,icu,no\n")
    stats("us")
    refused = message_of(run("merge-stats", "us.json", "--out", "all.json", error=ConfigError))
    assert "weight: it has no values in any region" in refused


@pytest.mark.parametrize(
    ("old", "new", "message", "fix"),
    [
        ("[surgery, icu]", "[surgery, er]", "values: only us has icu; only eu has er", "--site"),
        ("[no, yes]", "[yes, no]", "vocabulary.values: the same words in another", "--site"),
        ("missing: mean", "missing: drop_row", "missing: none in us, drop_row in eu", "--site"),
        ("column: ward", "column: w", "x: made of weight, seen, ward in us, of weight", "--site"),
        ("", "", "column 'weight': scale.subtract: 1509.75 in us, ", "the same merged statistics"),
    ],
)
def test_a_refused_merge_says_what_differs(
    sites: Path, old: str, new: str, message: str, fix: str
) -> None:
    stats("us")
    run("merge-stats", "us.json", "--out", "all.json")
    shard("us")
    text = Path("eu/a.csv").read_text().replace("3.000,50", "9.000,50")
    if not old:
        Path("eu/a.csv").write_text(text)
        stats("eu", *READ)
        run("merge-stats", "us.json", "eu.json", "--out", "all.json")
    Path("prepare.yaml").write_text(PREPARE.replace(old, new))
    if new == "column: w":
        Path("site.yaml").write_text(SITE.replace("rename: ward", "rename: w"))
    shard("eu", *READ)
    result = run("merge", "out/us", "out/eu", "--out", "both.json", error=ManifestError)
    assert "the rows of us and eu were prepared differently:" in message_of(result)
    assert message in message_of(result)
    assert isinstance(result.exception, ManifestError)
    assert fix in result.exception.fix
    assert not Path("both.json").exists()
