"""What crosses regions with a checkpoint, counted by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from geo_ray.runtime.checkpoints import StoreTraffic
from geo_ray.storage.manifest import PartInfo
from geo_ray.storage.places import StoreRegions
from geo_ray.telemetry.totals import LinkTotals


def part(name: str, size: int) -> PartInfo:
    return PartInfo(name=name, file=f"{name}.safetensors", bytes=size, sha256="0" * 64, finite=True)


PARTS = [part("averager", 1000), part("a-ps0", 10), part("b-ps0", 20), part("b-ps1", 21)]
PARTS += [part("c-ps0", 30)]


def test_all_go_to_the_one_store() -> None:
    stores = StoreRegions("b")
    assert stores.saved(PARTS, "a") == {("a", "b"): 1010, ("c", "b"): 30}
    assert stores.saved(PARTS, "b") == {("a", "b"): 10, ("c", "b"): 30}
    assert stores.resumed(PARTS, "a") == {("b", "a"): 1010, ("b", "c"): 30}


def test_a_region_with_a_store_of_its_own_sends_nothing() -> None:
    stores = StoreRegions("b", {"a", "c"})
    assert stores.saved(PARTS, "a") == {("a", "b"): 1000}
    assert StoreRegions("a", {"b", "c"}).saved(PARTS, "a") == {}


def test_it_is_counted_with_what_bridges_send() -> None:
    totals, told = LinkTotals(), 0

    def emit(kind: str, src: str, dst: str, bytes_by_class: dict[str, int]) -> None:
        nonlocal told
        told += 1
        assert kind == "wan"
        totals.feed(src, dst, bytes_by_class)

    loop: Any = SimpleNamespace(emit=emit)
    traffic = StoreTraffic(StoreRegions("b"), loop)
    totals.feed("c", "b", {"update": 5})
    traffic.resumed(PARTS, "a")
    traffic.saved(PARTS, "a")
    traffic.saved(PARTS, "b")
    totals.feed("c", "b", {"update": 7})
    assert totals.by_link() == {
        ("a", "b"): 1010 + 10,
        ("b", "a"): 1010,
        ("b", "c"): 30,
        ("c", "b"): 30 + 30 + 7,
    }
    assert totals.by_class()["checkpoint"] == 1010 + 10 + 1010 + 30 + 60
    assert told == 2 + 2 + 2
    StoreTraffic(None, loop).saved(PARTS, "a")
    assert told == 6
