"""A journal that cannot be read stops nobody: it is kept aside, and what is there goes on."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
from autoscale_support import CONFIG, Scene, ends, launches

from geo_ray.autoscale.journal import JOURNAL_KEY, Journal
from geo_ray.autoscale.memory import AutoscalerMemory, encode_memory
from geo_ray.autoscale.policy import AutoscalePolicy
from geo_ray.lease.local_store import LocalConditionalStore
from geo_ray.runtime.autoscaler.unread import memory_of, put_aside, read_journal

GOOD = encode_memory(AutoscalerMemory(launches=3))
DAMAGED = {
    "torn": GOOD[:-4],
    "empty": b"",
    "no journal": b"{",
    "another version": zlib.compress(b'{"version": 2, "duties": []}'),
}


def store_with(tmp_path: Path, data: bytes) -> LocalConditionalStore:
    store = LocalConditionalStore(tmp_path)
    store.write(JOURNAL_KEY, data, None)
    return store


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED)
def test_it_is_kept_aside_and_another_one_begins(tmp_path: Path, data: bytes) -> None:
    store = store_with(tmp_path, data)
    assert "cannot be read" in read_journal(store).trouble
    key = put_aside(store, lambda: AutoscalerMemory(launches=1))
    assert key is not None and (tmp_path / key).read_bytes() == data
    assert read_journal(store).memory.launches == 1
    assert put_aside(store) is None
    store.write(JOURNAL_KEY, data, read_tag(store))  # once more
    again = put_aside(store)
    assert again is not None and (tmp_path / again).read_bytes() == data
    assert Journal(store, 4).read().epoch == 4


def read_tag(store: LocalConditionalStore) -> str:
    found = store.read(JOURNAL_KEY)
    assert found is not None
    return found.tag


def test_a_journal_that_can_be_read_stays(tmp_path: Path) -> None:
    store = store_with(tmp_path, GOOD)
    assert put_aside(store) is None
    assert read_journal(store).memory.launches == 3
    assert put_aside(LocalConditionalStore(tmp_path / "none")) is None


def test_machines_that_are_there_go_on_and_are_paid_since_they_are() -> None:
    scene = Scene()
    scene.looks(3)
    there = set(scene.machines)
    assert there
    prefix = AutoscalePolicy(CONFIG, "c").prefix
    scene.memory = memory_of(list(scene.machines.values()), prefix, scene.now_s)
    scene.memory.epoch = 7
    for _ in range(3):
        decided = scene.look()
        assert launches(decided) == [] and ends(decided) == []
    assert set(scene.machines) == there
    assert scene.memory.ledger.paid_usd > 0
    other = memory_of(list(scene.machines.values()), "as-other-", scene.now_s)
    assert other.duties == {}
