"""Configuration, tokens, inboxes and the journal of a queue."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from geo_ray.base.errors import (
    ConfigError,
    LeaseLostError,
    QueueDeniedError,
    QueueJournalError,
    QueueMissingError,
    QueueRequestError,
    RunDirectoryError,
)
from geo_ray.base.load import load_tree
from geo_ray.experiment.experiment import Experiment
from geo_ray.scheduler.queue import inbox
from geo_ray.scheduler.queue.config import QueueConfig
from geo_ray.scheduler.queue.inbox import is_signed, key_of, new_token, sign
from geo_ray.scheduler.queue.job_spec import CancelRequest, SubmitRequest
from geo_ray.scheduler.queue.journal import (
    PolicyGenerationEntry,
    QueueJournal,
    RequestEntry,
    piece_key,
)
from geo_ray.scheduler.queue.state import QueueLocation
from geo_ray.storage.conditional_store import ConditionalStore, LocalConditionalStore, StoredValue
from tests.support.queue_support import TOKENS, SimQueue, job, queue_config, sim_queue
from tests.support.s3_support import new_prefix, s3_server, set_credentials

ROOT = Path(__file__).resolve().parents[4]


# ------------------------------------------------------------------ configuration


def test_the_shipped_configuration_is_right() -> None:
    config = load_tree(ROOT / "configs" / "queue.yaml", (), QueueConfig)
    assert config.policy == "pd_ors"
    assert len(config.regions) == 3
    local = load_tree(ROOT / "configs" / "queue_local.yaml", (), QueueConfig)
    cluster = load_tree(ROOT / "configs" / "cluster_local.yaml", (), Experiment)
    assert set(local.regions) == set(cluster.region_names)


def test_an_invalid_key_is_described() -> None:
    with pytest.raises(ConfigError, match="the key that `geo-ray queue token` prints"):
        load_tree(ROOT / "configs" / "queue_local.yaml", ["tenants.me.key=abc"], QueueConfig)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"polcy": "fifo"}, "polcy"),
        ({"policy": "fifi"}, "unknown policy 'fifi'"),
        ({"policy": "oasis"}, "separate sites"),
        ({"links": {"us/mars": {}}}, "names no two regions"),
        ({"links": {"us/us": {}}}, "names no two regions"),
        ({"tenants": {"red": {"key": "abc"}}}, "key"),
        ({"tenants": {"red": {"key": "0" * 64, "most": 3}}}, "most"),
        ({"slot_s": 0}, "slot_s"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, object], says: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=says):
        queue_config(**change)


def test_a_link_is_found_whichever_way_it_is_named() -> None:
    config = queue_config(links={"us/eu": {"mbps": 7.0}})
    assert config.link_between("us", "eu").mbps == config.link_between("eu", "us").mbps == 7.0
    assert config.link_between("us", "asia").mbps == 1000.0


# ------------------------------------------------------------------ tokens


def test_only_the_token_of_a_key_signs_for_it() -> None:
    token = new_token()
    signature = sign(token, "q", "text")
    assert is_signed(key_of(token), "q", "text", signature)
    assert not is_signed(key_of(token), "q", "Text", signature)
    assert not is_signed(key_of(token), "other", "text", signature)
    assert not is_signed(key_of(new_token()), "q", "text", signature)
    assert not is_signed(key_of(token), "q", "text", "zz")
    assert not is_signed("zz", "q", "text", signature)


@pytest.mark.parametrize("text", ["", "geoq1-", "geoq1-short", "nonsense", "geoq1-" + "!" * 43])
def test_what_is_no_token_is_said_to_be_none(text: str) -> None:
    with pytest.raises(QueueDeniedError, match="not a queue token"):
        key_of(text)


# ------------------------------------------------------------------ boxes


def request(number: int = 1) -> CancelRequest:
    return CancelRequest(id=f"r{number}", sent_unix_s=0.0, job="a")


def test_an_inbox_returns_requests_until_they_are_removed(tmp_path: Path) -> None:
    store = LocalConditionalStore(tmp_path)
    assert inbox.look(store, "red") == []
    for number in (1, 2):
        inbox.submit(store, "red", inbox.signed(request(number), "q", TOKENS["red"]))
    found = inbox.look(store, "red")
    assert [each.id for each in found] == ["r1", "r2"]
    assert inbox.look(store, "blue") == []
    inbox.remove(store, "red", {"r1"})
    assert [each.id for each in inbox.look(store, "red")] == ["r2"]


def test_a_request_is_opened_only_with_its_tenants_key() -> None:
    signed = inbox.signed(request(), "q", TOKENS["red"])
    assert inbox.opened(signed, "q", key_of(TOKENS["red"])) == request()
    assert inbox.opened(signed, "q", key_of(TOKENS["blue"])) is None
    assert inbox.opened(signed, "other", key_of(TOKENS["red"])) is None
    other = signed.model_copy(update={"text": signed.text.replace('"a"', '"b"')})
    assert inbox.opened(other, "q", key_of(TOKENS["red"])) is None
    renamed = signed.model_copy(update={"id": "r9"})
    assert inbox.opened(renamed, "q", key_of(TOKENS["red"])) is None


def test_an_invalid_inbox_is_emptied(tmp_path: Path) -> None:
    (tmp_path / inbox.inbox_key("red")).write_bytes(b"nonsense")
    store = LocalConditionalStore(tmp_path)
    assert inbox.look(store, "red") == []
    inbox.submit(store, "red", inbox.signed(request(), "q", TOKENS["red"]))
    assert len(inbox.look(store, "red")) == 1


def test_an_inbox_of_an_unserved_queue_fills_up(tmp_path: Path) -> None:
    store = LocalConditionalStore(tmp_path)
    with pytest.raises(QueueRequestError, match="is full"):
        for _ in range(100):
            text = os.urandom(4000).hex()
            inbox.submit(store, "red", inbox.SignedRequest(id="r", text=text, signature=""))
    assert inbox.look(store, "red")


# ------------------------------------------------------------------ journal


def entry(number: int) -> PolicyGenerationEntry:
    return PolicyGenerationEntry(unix_s=float(number), number=number)


def test_a_journal_gives_what_was_written(tmp_path: Path) -> None:
    store = LocalConditionalStore(tmp_path)
    writer, reader = QueueJournal(store), QueueJournal(store)
    assert writer.read() == reader.read() == []
    writer.add([entry(1), entry(2)])
    assert reader.read() == [entry(1), entry(2)]
    writer.add([entry(3)])
    assert reader.read() == [entry(3)]
    assert reader.read() == []
    assert QueueJournal(store).read() == [entry(1), entry(2), entry(3)]


def test_a_journal_in_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    set_credentials(monkeypatch)
    with s3_server() as endpoint:
        place = QueueLocation.at(new_prefix(endpoint))
        with pytest.raises(QueueMissingError):
            place.read()
        journal = QueueJournal(place.store())
        journal.read()
        journal.add([entry(1)])
        assert place.is_there()
        assert QueueJournal(place.store()).read() == [entry(1)]
        other = QueueJournal(place.store())
        other.read()
        other.add([entry(2)])
        with pytest.raises(LeaseLostError):
            journal.add([entry(3)])


def test_a_queue_in_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_credentials(monkeypatch)
    with s3_server() as endpoint:
        place = QueueLocation.at(new_prefix(endpoint))
        monkeypatch.setattr(SimQueue, "store", property(lambda _: place.store()))
        queue = sim_queue(tmp_path)
        queue.submit("red", job("a", seconds=8.0))
        queue.run(8.0, every_s=4.0)
        queue.die()
        queue.run(20.0, every_s=4.0)
        (found,) = place.read().jobs.values()
    assert found.end is not None
    assert found.end.outcome == "finished"
    assert queue.world.submissions.keys() == {f"geoq-q.{found.id}.1"}


def test_a_long_journal_has_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("geo_ray.scheduler.queue.journal._FULL_BYTES", 120)
    store = LocalConditionalStore(tmp_path)
    writer, reader = QueueJournal(store), QueueJournal(store)
    for number in range(1, 60):
        writer.add([entry(number)])
    assert store.read(piece_key(2)) is not None
    assert reader.read() == [entry(number) for number in range(1, 60)]
    late = QueueJournal(store)
    late.read()
    late.add([entry(60)])
    assert reader.read() == [entry(60)]
    with pytest.raises(LeaseLostError):
        writer.add([entry(61)])


def test_who_was_overtaken_writes_nothing(tmp_path: Path) -> None:
    store = LocalConditionalStore(tmp_path)
    first, second = QueueJournal(store), QueueJournal(store)
    first.read()
    first.add([entry(1)])
    second.read()
    second.add([entry(2)])
    with pytest.raises(LeaseLostError):
        first.add([entry(3)])
    assert QueueJournal(store).read() == [entry(1), entry(2)]


def test_a_write_whose_answer_got_lost_is_found_again(tmp_path: Path) -> None:
    class Forgetful:
        """A store that writes, and then reports a conflict."""

        def __init__(self, inner: ConditionalStore) -> None:
            self.inner, self.lost = inner, 0

        def read(self, key: str) -> StoredValue | None:
            return self.inner.read(key)

        def write(self, key: str, data: bytes, expected: str | None) -> str | None:
            tag = self.inner.write(key, data, expected)
            self.lost += 1
            return None if self.lost == 2 else tag

        unchanged = LocalConditionalStore.unchanged

    store = Forgetful(LocalConditionalStore(tmp_path))
    journal = QueueJournal(store)
    journal.read()
    for number in (1, 2, 3):
        journal.add([entry(number)])
    assert QueueJournal(store.inner).read() == [entry(1), entry(2), entry(3)]


@pytest.mark.parametrize("data", [b"", b"nonsense", b"x\x9c\x03\x00\x00\x00\x00\x01"])
def test_a_torn_journal_is_said_to_be_one(tmp_path: Path, data: bytes) -> None:
    (tmp_path / piece_key(1)).write_bytes(data)
    with pytest.raises(QueueJournalError, match=r"journal-000001\.z"):
        QueueLocation.at(tmp_path).read()


def test_what_is_too_large_is_refused_whole(tmp_path: Path) -> None:
    journal = QueueJournal(LocalConditionalStore(tmp_path))
    journal.read()
    large = job("a", working_dir=os.urandom(60_000).hex())
    asked = SubmitRequest(id="r", sent_unix_s=0.0, job=large)
    with pytest.raises(RunDirectoryError, match="bytes"):
        journal.add([RequestEntry(unix_s=0.0, tenant="red", request=asked)])
    assert journal.read() == []
