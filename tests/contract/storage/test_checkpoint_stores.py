"""One suite for checkpoints wherever they lie: a directory, a bucket, a bucket for each region."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from geo_ray.base.errors import (
    CheckpointConflictError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMissingError,
    StoreError,
)
from geo_ray.storage import folders
from geo_ray.storage.bucket import RequestLimits
from geo_ray.storage.checkpoint import CheckpointStore
from geo_ray.storage.manifest import CheckpointManifest, PartInfo
from geo_ray.storage.parts import read_part, write_part
from geo_ray.storage.places import CheckpointPlaces
from geo_ray.storage.uri import parse_s3, s3_uri
from tests.support.s3_support import (
    SECRET,
    Proxy,
    Request,
    client_of,
    new_prefix,
    once,
    proxy_before,
    s3_server,
    set_credentials,
)

PARTS = ("averager", "eu-ps0", "us-ps0")
MANY = 5_000_000  # elements: a part of 20 MB, which goes in three pieces


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    set_credentials(monkeypatch)


@dataclass
class Site:
    """A place for checkpoints, and what somebody does to its files behind everybody's back."""

    places: CheckpointPlaces

    def store(self, keep: int = 2) -> CheckpointStore:
        """As another process would open it."""
        return CheckpointStore(self.places.root(), keep)

    def files(self) -> list[str]:
        """All that lies there but claims, below the prefix."""
        return sorted(
            f"{name.rsplit('/', 2)[-2]}/{name.rsplit('/', 2)[-1]}"
            for name in self._names()
            if not name.endswith("/claim")
        )

    def damage(self, file: str) -> None:
        """Change one byte in the middle of a file."""
        data = bytearray(self._read(file))
        data[len(data) // 2] ^= 1
        self._write(file, bytes(data))

    def truncate(self, file: str) -> None:
        self._write(file, self._read(file)[:10])

    def _names(self) -> list[str]:
        if not self.places.main.startswith("s3://"):
            return [str(p) for p in Path(self.places.main).rglob("*") if p.is_file()]
        found = []
        for uri in (self.places.main, *self.places.regions.values()):
            address = parse_s3(uri)
            listed = client_of(str(address.endpoint_url)).list_objects_v2(Bucket=address.bucket)
            found += [item["Key"] for item in listed.get("Contents", ())]
        return found

    def _at(self, file: str) -> tuple[Any, dict[str, str]]:
        region = file.rsplit("/", 1)[-1].partition("-")[0]
        address = parse_s3(self.places.regions.get(region, self.places.main))
        where = {"Bucket": address.bucket, "Key": f"{address.prefix}/{file}"}
        return client_of(str(address.endpoint_url)), where

    def _read(self, file: str) -> bytes:
        if not self.places.main.startswith("s3://"):
            return (Path(self.places.main) / file).read_bytes()
        client, where = self._at(file)
        return bytes(client.get_object(**where)["Body"].read())

    def _write(self, file: str, data: bytes) -> None:
        if not self.places.main.startswith("s3://"):
            (Path(self.places.main) / file).write_bytes(data)
            return
        client, where = self._at(file)
        client.put_object(**where, Body=data)


@pytest.fixture(params=["local", "s3", "regions"])
def site(request: pytest.FixtureRequest, tmp_path: Path, endpoint: str) -> Site:
    if request.param == "local":
        return Site(CheckpointPlaces(str(tmp_path / "checkpoints")))
    regions = {"eu": new_prefix(endpoint)} if request.param == "regions" else {}
    return Site(CheckpointPlaces(new_prefix(endpoint), regions))


@pytest.fixture
def bucket(endpoint: str) -> Site:
    return Site(CheckpointPlaces(new_prefix(endpoint)))


def manifest(id: int, parts: tuple[PartInfo, ...] = (), **more: Any) -> CheckpointManifest:
    return CheckpointManifest(
        id=id, step=id * 10, created="-", config_digest="ab" * 32, parts=parts, **more
    )


def parts_of(site: Site, id: int) -> tuple[PartInfo, ...]:
    """Every part, as the process that holds it would write it."""
    tensors = {"x": torch.full((5,), float(id))}
    return tuple(write_part(site.places.folder(id), n, tensors, {"id": id}) for n in PARTS)


def save(site: Site, store: CheckpointStore, id: int, **more: Any) -> None:
    store.begin(id)
    store.commit(id, manifest(id, parts_of(site, id), **more))


# ------------------------------------------------------------------ the contract


def test_what_was_saved_is_found_by_any_process(site: Site) -> None:
    store = site.store()
    with pytest.raises(CheckpointMissingError):
        store.latest()
    save(site, store, 0)
    save(site, store, 1)
    other = site.store()
    found = other.latest()
    assert (found.manifest.id, found.problems) == (1, ())
    assert other.ids() == [0, 1] and other.next_id() == 2 and other.is_committed(1)
    assert other.peek(0).manifest == other.open(0).manifest == other.manifest(0)
    for name in PARTS:
        tensors, meta = found.read(name)
        assert tensors["x"].tolist() == [1.0] * 5 and meta == {"id": 1}
    with pytest.raises(CheckpointMissingError) as caught:
        other.open(7)
    assert caught.value.fix == "Use an existing one: 0, 1."


def test_the_bytes_of_parts_are_those_of_a_directory(site: Site, tmp_path: Path) -> None:
    site.store().begin(0)
    here = tmp_path / "here"
    here.mkdir()
    tensors, meta = {"b": torch.arange(9), "a": torch.ones(3)}, {"n": 1}
    assert write_part(here, "us-ps0", tensors, meta) == write_part(
        site.places.folder(0), "us-ps0", tensors, meta
    )
    expected = (here / "us-ps0.safetensors").read_bytes()
    assert site._read("ckpt-00000000/us-ps0.safetensors") == expected


@pytest.mark.parametrize("num_chunks", [3, 30])  # one piece, and several
def test_chunks_are_valid_only_until_the_next_is_asked_for(site: Site, num_chunks: int) -> None:
    site.store().begin(0)
    room = bytearray(1 << 20)

    def chunks() -> Iterator[memoryview]:
        for number in range(num_chunks):
            room[:] = bytes([number]) * len(room)
            yield memoryview(room)

    site.places.folder(0).write("us-ps0.safetensors", chunks(), num_chunks << 20)
    expected = b"".join(bytes([number]) * len(room) for number in range(num_chunks))
    assert site._read("ckpt-00000000/us-ps0.safetensors") == expected


def test_a_save_that_never_ended_is_invisible_and_swept(site: Site) -> None:
    store = site.store()
    save(site, store, 0)
    store.begin(1)
    parts_of(site, 1)
    later = site.store()
    assert later.latest().manifest.id == 0
    later.begin(later.next_id())
    assert {name.split("/")[0] for name in site.files()} == {"ckpt-00000000"}


def test_open_saves_of_the_same_writer_are_not_swept(site: Site) -> None:
    store = site.store()
    store.begin(0)
    parts = parts_of(site, 0)
    store.begin(1)
    store.commit(0, manifest(0, parts))
    assert site.store().latest().manifest.id == 0


def test_an_abandoned_save_leaves_nothing_and_its_id_is_free(site: Site) -> None:
    store = site.store()
    store.begin(0)
    parts_of(site, 0)
    store.abandon(0)
    store.abandon(0)
    assert site.files() == []
    save(site, store, 0)
    with pytest.raises(CheckpointError, match="committed"):
        store.abandon(0)


def test_ids_only_grow_and_a_save_is_begun_once(site: Site) -> None:
    store = site.store()
    save(site, store, 1)
    for id in (0, 1):
        with pytest.raises(CheckpointError, match="the next is 2"):
            store.begin(id)
    store.begin(2)
    with pytest.raises(CheckpointError, match="cannot be begun"):
        store.begin(2)


def test_commit_wants_a_begun_save_and_all_its_parts(site: Site) -> None:
    store = site.store()
    with pytest.raises(CheckpointError, match="not being saved"):
        store.commit(0, manifest(0))
    store.begin(0)
    parts = parts_of(site, 0)
    with pytest.raises(CheckpointError, match="was given for 0"):
        store.commit(0, manifest(1))
    lost = parts[0].model_copy(update={"name": "us-ps7", "file": "us-ps7.safetensors"})
    longer = parts[0].model_copy(update={"bytes": parts[0].bytes + 1})
    for wrong in ((*parts, lost), (longer, *parts[1:])):
        with pytest.raises(CheckpointCorruptError, match=r"\.safetensors"):
            store.commit(0, manifest(0, wrong))
    assert store.ids() == []
    store.commit(0, manifest(0, parts))
    assert store.ids() == [0]


def test_files_that_no_part_claims_are_removed_at_the_commit(site: Site) -> None:
    store = site.store()
    store.begin(0)
    parts = parts_of(site, 0)
    store.commit(0, manifest(0, parts[1:]))
    assert f"ckpt-00000000/{parts[0].file}" not in site.files()
    assert len(site.files()) == 3


def test_the_newest_stay_and_the_newest_healthy_one(site: Site) -> None:
    store = site.store()
    for id in range(5):
        save(site, store, id, healthy=id != 4)
    assert store.ids() == [3, 4]
    save(site, store, 5, healthy=False)
    save(site, store, 6, healthy=False)
    assert site.store().ids() == [3, 5, 6]
    found = site.store().latest()
    assert found.manifest.id == 3 and len(found.problems) == 2
    assert {name.split("/")[0] for name in site.files()} == {
        "ckpt-00000003", "ckpt-00000005", "ckpt-00000006",
    }  # fmt: skip


@pytest.mark.parametrize("file", ["manifest.json", "averager.safetensors", "eu-ps0.safetensors"])
def test_a_damaged_newest_one_is_passed_over_loudly(
    file: str, site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    store = site.store()
    for id in range(2):
        save(site, store, id)
    site.damage(f"ckpt-00000001/{file}")
    with caplog.at_level(logging.WARNING):
        found = site.store().latest()
    assert found.manifest.id == 0
    assert file in found.problems[0] and file in caplog.text
    site.damage(f"ckpt-00000000/{file}")
    with pytest.raises(CheckpointCorruptError, match="no checkpoint is complete"):
        site.store().latest()


def test_a_truncated_one_does_not_push_out_a_whole_one(site: Site) -> None:
    store = site.store()
    for id in range(2):
        save(site, store, id)
    site.truncate("ckpt-00000001/eu-ps0.safetensors")
    with pytest.raises(CheckpointCorruptError, match="10 bytes long"):
        store.peek(1)
    save(site, store, 2)
    assert store.ids() == [0, 1, 2]


def test_a_part_of_which_a_byte_changed_is_not_read(site: Site) -> None:
    store = site.store()
    save(site, store, 0)
    found = store.open(0)
    site.damage("ckpt-00000000/eu-ps0.safetensors")
    with pytest.raises(CheckpointCorruptError, match=r"eu-ps0.*"):
        found.read("eu-ps0")
    assert found.read("us-ps0")[1] == {"id": 0}


def test_a_part_that_comes_after_the_commit_is_refused(site: Site) -> None:
    store = site.store()
    save(site, store, 0)
    before = site._read("ckpt-00000000/eu-ps0.safetensors")
    with pytest.raises(CheckpointError, match="is too late"):
        write_part(site.places.folder(0), "eu-ps0", {"x": torch.zeros(1)}, {})
    assert site._read("ckpt-00000000/eu-ps0.safetensors") == before


def test_of_two_writers_of_one_manifest_the_second_is_refused(site: Site) -> None:
    first, second = site.store(), site.store()
    first.begin(0)
    parts = parts_of(site, 0)
    first.commit(0, manifest(0, parts, extra={"by": "first"}))
    with pytest.raises(CheckpointConflictError):
        first.commit(0, manifest(0, parts, extra={"by": "again"}))
    with pytest.raises(CheckpointError, match="0"):
        second.commit(0, manifest(0, parts, extra={"by": "second"}))
    with pytest.raises(CheckpointError, match="the next is 1"):
        second.begin(0)
    assert site.store().manifest(0).extra == {"by": "first"}


# ------------------------------------------------------------------ two writers in a bucket


def test_who_begins_last_has_the_save_and_the_other_is_told(bucket: Site) -> None:
    first, second = bucket.store(), bucket.store()
    first.begin(0)
    parts = parts_of(bucket, 0)
    id = second.next_id()  # as a resume does that takes the first for dead
    assert id == 1
    second.begin(id)
    theirs = parts_of(bucket, id)
    with pytest.raises(CheckpointConflictError, match="another writer has begun to save"):
        first.commit(0, manifest(0, parts))
    first.abandon(0)
    with pytest.raises(CheckpointConflictError, match="another writer has begun checkpoint 1"):
        first.begin(1)
    first.abandon(1)  # and that leaves the other's files alone
    second.commit(id, manifest(id, theirs))
    with pytest.raises(CheckpointConflictError, match="the next is 2"):
        first.begin(1)
    assert bucket.store().latest().manifest.id == 1


def test_two_that_begin_one_save_at_once_are_told_apart(bucket: Site) -> None:
    first, second = bucket.store(), bucket.store()
    first.begin(0)
    with pytest.raises(CheckpointConflictError, match="another writer has begun checkpoint 0"):
        second.begin(0)
    first.commit(0, manifest(0, parts_of(bucket, 0)))


def test_parts_that_come_before_the_claim_are_of_the_save(bucket: Site) -> None:
    """Nobody waits for a far store: regions write while the save is being begun."""
    store = bucket.store()
    parts = parts_of(bucket, store.next_id())
    store.begin(0)
    store.commit(0, manifest(0, parts))
    assert bucket.store().latest().manifest.id == 0


def test_manifests_that_are_written_at_once_are_one(bucket: Site) -> None:
    """The condition holds where both have found nothing a moment before."""
    first = bucket.store()
    first.begin(0)
    parts = parts_of(bucket, 0)
    folder = bucket.places.folder(0)
    folder.write("manifest.json", [b"theirs"], 6)
    with pytest.raises(CheckpointConflictError, match=r"manifest\.json: another writer"):
        folder.write("manifest.json", [b"mine"], 4)
    assert bucket._read("ckpt-00000000/manifest.json") == b"theirs"
    with pytest.raises(CheckpointConflictError):
        first.commit(0, manifest(0, parts))


def test_a_part_is_written_once(bucket: Site) -> None:
    bucket.store().begin(0)
    parts_of(bucket, 0)
    with pytest.raises(CheckpointConflictError, match="another writer"):
        write_part(bucket.places.folder(0), "eu-ps0", {"x": torch.zeros(1)}, {})


def test_parts_of_a_region_stay_in_its_own_store(endpoint: str) -> None:
    places = CheckpointPlaces(new_prefix(endpoint), {"eu": new_prefix(endpoint)})
    site = Site(places)
    save(site, site.store(), 0)
    main, eu = Site(CheckpointPlaces(places.main)), Site(CheckpointPlaces(places.regions["eu"]))
    assert eu.files() == ["ckpt-00000000/eu-ps0.safetensors"]
    assert "ckpt-00000000/eu-ps0.safetensors" not in main.files()


# ------------------------------------------------------------------ trouble with a server


@pytest.fixture
def proxy(endpoint: str) -> Iterator[Proxy]:
    with proxy_before(endpoint) as made:
        yield made


@pytest.fixture
def behind(proxy: Proxy, endpoint: str) -> Site:
    """A new bucket, reached through the proxy."""
    made = parse_s3(new_prefix(endpoint))
    uri = s3_uri(made.bucket, made.prefix, endpoint_url=proxy.endpoint, region="us-east-1")
    return Site(CheckpointPlaces(uri))


def is_piece(number: int) -> Callable[[Request], bool]:
    return lambda request: request.is_piece and request.query["partNumber"] == [str(number)]


@pytest.mark.parametrize("kind", ["500", "503", "cut", "lost", "slow"])
def test_only_the_piece_that_failed_is_sent_again(kind: str, proxy: Proxy, behind: Site) -> None:
    store = behind.store()
    store.begin(0)
    proxy.trouble = once(kind, is_piece(2))
    tensor = torch.arange(MANY, dtype=torch.float32)
    info = write_part(behind.places.folder(0), "us-ps0", {"x": tensor}, {})
    sent = [request.query["partNumber"][0] for request in proxy.seen if request.is_piece]
    again = [] if kind == "slow" else ["2"]
    assert sorted(sent) == sorted(["1", "2", "3", *again])
    store.commit(0, manifest(0, (info,)))
    assert torch.equal(store.open(0).read("us-ps0")[0]["x"], tensor)


@pytest.mark.parametrize("file", ["claim", "manifest.json", "us-ps0.safetensors"])
def test_an_answer_that_got_lost_is_no_other_writer(file: str, proxy: Proxy, behind: Site) -> None:
    store = behind.store()
    proxy.trouble = once("lost", lambda r: r.method == "PUT" and r.file == file)
    save(behind, store, 0)
    assert [r.file for r in proxy.seen if r.method == "PUT"].count(file) >= 2
    assert behind.store().latest().manifest.id == 0


def test_an_object_whose_last_answer_got_lost_is_there(proxy: Proxy, behind: Site) -> None:
    behind.store().begin(0)
    proxy.trouble = once("lost", lambda r: r.method == "POST" and "uploadId" in r.query)
    tensor = torch.arange(MANY, dtype=torch.float32)
    info = write_part(behind.places.folder(0), "us-ps0", {"x": tensor}, {})
    assert torch.equal(read_part(behind.places.folder(0), info)[0]["x"], tensor)


def test_a_download_that_breaks_off_goes_on_where_it_was(proxy: Proxy, behind: Site) -> None:
    behind.store().begin(0)
    tensor = torch.arange(MANY, dtype=torch.float32)
    info = write_part(behind.places.folder(0), "us-ps0", {"x": tensor}, {})
    proxy.trouble = once("part", lambda r: r.method == "GET" and r.file == info.file, times=2)
    proxy.seen.clear()
    assert torch.equal(read_part(behind.places.folder(0), info)[0]["x"], tensor)
    assert [r.file for r in proxy.seen].count(info.file) == 3


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "LIMITS", RequestLimits(0.5, 0.5, attempts=2))


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("kind", ["403", "503", "cut"])
def test_a_store_that_goes_on_failing_is_told_and_leaves_the_last_good_one(
    kind: str, proxy: Proxy, behind: Site, caplog: pytest.LogCaptureFixture
) -> None:
    store = behind.store()
    save(behind, store, 0)
    store.begin(1)
    proxy.trouble = lambda r: kind if r.method == "PUT" else None
    tensors = {"x": torch.zeros(MANY)}
    with caplog.at_level(logging.INFO), pytest.raises(StoreError) as caught:
        write_part(behind.places.folder(1), "us-ps0", tensors, {})
    assert "us-ps0" in caught.value.message and behind.places.main.split("/")[2] in str(
        caught.value
    )
    assert SECRET not in str(caught.value) + caplog.text
    bucket = folders.bucket_at(behind.places.main)
    assert bucket.uploads("") == []  # no half of it is left to be paid for
    with pytest.raises(StoreError):
        store.begin(2)
    proxy.trouble = lambda r: None
    store.abandon(1)
    assert behind.store().latest().manifest.id == 0


@pytest.mark.usefixtures("impatient")
def test_a_server_that_does_not_answer_is_given_up(proxy: Proxy, behind: Site) -> None:
    proxy.trouble = lambda r: "cut"
    for act in (behind.store().ids, behind.store().latest, lambda: behind.store().begin(0)):
        with pytest.raises(StoreError, match="did not answer"):
            act()


def test_a_server_that_does_not_know_conditions_is_refused(proxy: Proxy, behind: Site) -> None:
    proxy.trouble = lambda r: "unconditional"
    with pytest.raises(StoreError, match="overwrites objects") as caught:
        behind.store().begin(0)
    assert "checkpoint.store" in caught.value.fix


def test_the_pieces_of_a_writer_that_died_are_swept(bucket: Site) -> None:
    store = bucket.store()
    store.begin(0)
    here = folders.bucket_at(bucket.places.main)
    prefix = here.address.prefix
    upload = here.begin_upload(f"{prefix}/ckpt-00000000/us-ps0.safetensors", {})
    here.put_piece(f"{prefix}/ckpt-00000000/us-ps0.safetensors", upload, 1, b"half")
    orphan = here.begin_upload(f"{prefix}/ckpt-00000001/us-ps0.safetensors", {})
    assert orphan and len(here.uploads(prefix)) == 2
    store.begin(2)  # this writer's own save 0 is going on
    assert [key.split("/")[-2] for key, _ in here.uploads(prefix)] == ["ckpt-00000000"]
    later = bucket.store()
    later.begin(later.next_id())
    assert here.uploads(prefix) == []


def test_whoever_writes_to_a_save_that_was_given_up_is_stopped(proxy: Proxy, behind: Site) -> None:
    """A region whose part takes too long does not go on sending it."""
    store = behind.store()
    store.begin(0)

    def given_up(step: str) -> None:
        if step == "part.opened":
            store.abandon(0)
            # As servers answer; the one behind has an error of its own here.
            proxy.trouble = lambda request: "404" if request.is_piece else None

    with pytest.raises(CheckpointConflictError, match="abandoned this save"):
        write_part(behind.places.folder(0), "us-ps0", {"x": torch.zeros(4 * MANY)}, {}, given_up)
    assert behind.files() == []
    assert len([request for request in proxy.seen if request.is_piece]) < 10
