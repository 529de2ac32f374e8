"""One value for a folder of small values, whether it is a directory or in a bucket."""

from __future__ import annotations

from pathlib import Path

import pytest

from geo_ray.base.errors import StoreError
from geo_ray.storage.conditional_store import StoreLocation

REGION = "?region=us-east-1"


def test_in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = StoreLocation(str(tmp_path / "c"))
    (tmp_path / "c" / "making").mkdir(parents=True)
    for below in ("", "making"):
        store = place.store(below)
        assert store.write("key", below.encode() or b"x", None) is not None
    assert (tmp_path / "c" / "key").read_bytes() == b"x"
    assert (tmp_path / "c" / "making" / "key").read_bytes() == b"making"
    assert (place.is_remote, place.shown) == (False, str(tmp_path / "c"))
    monkeypatch.chdir(tmp_path)
    assert place.shown == "c"


@pytest.mark.parametrize(
    ("uri", "below", "lies"),
    [
        ("s3://b/clusters/mine", "", "s3://b/clusters/mine"),
        ("s3://b/clusters/mine/", "making", "s3://b/clusters/mine/making"),
        ("s3://b", "making", "s3://b/making"),
        ("s3://b", "", "s3://b/"),
    ],
)
def test_in_a_bucket(uri: str, below: str, lies: str) -> None:
    place = StoreLocation(uri + REGION)
    assert str(place.store(below)) == lies
    assert (place.is_remote, place.shown) == (True, uri + REGION)


def test_what_is_no_address_is_told() -> None:
    with pytest.raises(StoreError, match="is invalid"):
        StoreLocation("s3://b/c?nonsense=1").store()
