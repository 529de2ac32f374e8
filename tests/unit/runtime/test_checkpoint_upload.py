"""Parts that are uploaded to the run actor's machine and read from there, over real sockets."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from geo_ray.base.errors import (
    CheckpointCorruptError,
    CheckpointError,
    FrameError,
    GeoRayError,
    RunDirectoryError,
    TransportError,
)
from geo_ray.runtime import checkpoint_upload
from geo_ray.runtime.checkpoint_upload import (
    MODEL,
    PIECE_BYTES,
    SIGHT_FILE,
    UPLOAD_LAN,
    CheckpointUploadServer,
    UploadClient,
    UploadFolder,
    UploadPlaces,
    UploadRegistration,
    write_run_marker,
)
from geo_ray.runtime.spec import Resume, RunSpec
from geo_ray.storage.checkpoint import CheckpointStore, verify_part
from geo_ray.storage.manifest import CheckpointManifest, PartInfo
from geo_ray.storage.parts import read_part, write_part
from geo_ray.storage.places import CheckpointPlaces
from geo_ray.transport.lan import LanClient
from geo_ray.transport.wire.fields import Meta
from tests.support.train_support import experiment_of

TENSORS = {
    "params": torch.arange(3 * PIECE_BYTES // 4 + 77, dtype=torch.float32),
    "step": torch.tensor([7], dtype=torch.int64),
    "nothing": torch.empty(0),
}
NAME = "eu-ps0"
FILE = "eu-ps0.safetensors"


class Site:
    """A run actor's machine, and a process of another one in region `eu`."""

    def __init__(self, tmp_path: Path) -> None:
        self.run = tmp_path / "run"
        self.run.mkdir()
        (tmp_path / "elsewhere").mkdir()
        self.store = CheckpointStore(self.run / "checkpoints")
        self.upload_server = CheckpointUploadServer(
            self.run / "checkpoints", self.run, "us", lambda: "127.0.0.1"
        )
        self.places = CheckpointPlaces(str(self.run / "checkpoints"))
        write_run_marker(self.run, "tiny-1234")
        self.spec = RunSpec(
            experiment_json=experiment_of(tmp_path).model_dump_json(),
            base_dir=str(tmp_path),
            working_dir=str(tmp_path),
            manifest_address="",
            run_id="tiny-1234",
            run_dir=str(tmp_path / "elsewhere"),
            places=self.places,
        )
        self.carried = self.admitted(self.spec).places

    def admitted(self, spec: RunSpec) -> RunSpec:
        entry = UploadRegistration(spec, "eu")
        public = entry.upload_key()
        assert public is not None
        return entry.spec(self.upload_server.grant(public))

    @property
    def line(self) -> UploadClient:
        assert isinstance(self.carried, UploadPlaces)
        return self.carried.line

    def manifest(self, *parts: PartInfo) -> CheckpointManifest:
        return CheckpointManifest(id=0, step=1, created="", config_digest="0" * 64, parts=parts)

    def left(self) -> list[str]:
        """Half-written files."""
        return [path.name for path in self.run.rglob("*.tmp")]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    try:
        yield made
    finally:
        made.upload_server.close()


def test_a_part_counts_with_the_manifest_and_is_read_again_to_the_bit(site: Site) -> None:
    site.store.begin(0)
    folder = site.carried.folder(0)
    info = write_part(folder, NAME, TENSORS, {"counters": {"steps": 7}})
    assert site.store.ids() == []
    beside = write_part(site.run, "same", TENSORS, {"counters": {"steps": 7}})
    assert info.bytes == (site.run / "checkpoints" / "ckpt-00000000" / FILE).stat().st_size
    assert beside.bytes == info.bytes
    site.store.commit(0, site.manifest(info))  # which reads and hashes all of it
    verify_part(folder, info)
    tensors, meta = read_part(folder, info)
    assert meta == {"counters": {"steps": 7}}
    assert all(torch.equal(tensors[name], value) for name, value in TENSORS.items())
    resume = Resume(site.places, 0, {NAME: info})
    goes_on = site.admitted(replace(site.spec, resume=resume)).resume
    assert goes_on is not None and torch.equal(
        torch.as_tensor(goes_on.read(NAME)[0]["params"]), TENSORS["params"]
    )
    assert site.left() == []


def test_every_byte_between_regions_is_counted_once(site: Site) -> None:
    site.store.begin(0)
    info = write_part(site.carried.folder(0), NAME, TENSORS, {})
    assert site.upload_server.saved([info], "us") == {("eu", "us"): info.bytes}
    assert site.upload_server.saved([info], "us") == {}
    verify_part(site.carried.folder(0), info)
    assert site.upload_server.resumed([info], "us") == {("us", "eu"): info.bytes}
    assert site.upload_server.crossed() == {("eu", "us"): info.bytes, ("us", "eu"): info.bytes}
    site.upload_server.region = "eu"
    verify_part(site.carried.folder(0), info)
    assert site.upload_server.saved([], "us") == {}


def test_the_final_model_goes_into_the_run_s_directory(site: Site) -> None:
    info = write_part(site.carried.model_folder("anything"), "model-eu", TENSORS, {})
    assert torch.equal(read_part(site.run, info)[0]["params"], TENSORS["params"])


@pytest.mark.parametrize("lost", range(6))
@pytest.mark.parametrize("answers", [True, False], ids=["after", "before"])
def test_a_connection_that_is_lost_costs_nothing_but_time(
    site: Site, monkeypatch: pytest.MonkeyPatch, lost: int, answers: bool
) -> None:
    """At any request, before the server has it or after: nothing is written twice."""
    monkeypatch.setattr(checkpoint_upload, "_WAIT_S", 0.01)
    requests, request = 0, LanClient.request

    def flaky(self: LanClient, meta: Meta, payload: Any = None, **more: Any) -> Any:
        nonlocal requests
        requests += 1
        if requests - 1 == lost and not answers:
            self.close()
        reply = request(self, meta, payload, **more)
        if requests - 1 == lost and answers:
            self.close()
            return request(self, meta, payload, **more)
        return reply

    monkeypatch.setattr(LanClient, "request", flaky)
    site.store.begin(0)
    info = write_part(site.carried.folder(0), NAME, TENSORS, {})
    verify_part(site.carried.folder(0), info)
    assert requests > 6
    site.store.commit(0, site.manifest(info))


def test_a_part_that_ends_early_leaves_nothing(site: Site) -> None:
    site.store.begin(0)

    def failing() -> Iterator[bytes]:
        yield b"x" * (PIECE_BYTES + 1)
        raise ValueError("the writer dies")

    folder = site.carried.folder(0)
    with pytest.raises(ValueError, match="dies"):
        folder.write(FILE, failing(), 3 * PIECE_BYTES)
    assert not folder.has(FILE) and len(site.left()) == 1
    write_part(folder, NAME, TENSORS, {})  # again, by a successor
    assert site.left() == []
    with pytest.raises(ValueError, match="dies"):
        folder.write("us-ps0.safetensors", failing(), 3 * PIECE_BYTES)
    site.upload_server.close()
    assert site.left() == []


def test_a_part_that_comes_too_late_is_refused(site: Site) -> None:
    site.store.begin(0)
    folder = site.carried.folder(0)
    info = write_part(folder, NAME, TENSORS, {})
    site.store.commit(0, site.manifest(info))
    with pytest.raises(CheckpointError, match="too late"):
        write_part(folder, NAME, TENSORS, {})
    with pytest.raises(CheckpointError, match="too late"):
        folder.write(FILE, [b"x"], 1)
    site.store.open(0)


def test_a_checkpoint_that_was_given_up_takes_no_parts(site: Site) -> None:
    with pytest.raises(RunDirectoryError):
        write_part(site.carried.folder(3), NAME, TENSORS, {})
    site.store.begin(0)

    def given_up() -> Iterator[bytes]:
        yield b"x" * PIECE_BYTES
        site.store.abandon(0)
        yield b"x" * PIECE_BYTES

    with pytest.raises(RunDirectoryError):
        site.carried.folder(0).write(FILE, given_up(), 2 * PIECE_BYTES)
    assert site.store.ids() == [] and site.left() == []


def test_a_changed_byte_is_noticed(site: Site) -> None:
    site.store.begin(0)
    folder = site.carried.folder(0)
    info = write_part(folder, NAME, TENSORS, {})
    path = site.run / "checkpoints" / "ckpt-00000000" / FILE
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointCorruptError, match="SHA-256"):
        read_part(folder, info)
    path.write_bytes(data[:-1])
    with pytest.raises(CheckpointCorruptError, match="ends early"):
        read_part(folder, info)
    path.unlink()
    with pytest.raises(CheckpointCorruptError, match="cannot be read"):
        read_part(folder, info)


@pytest.mark.parametrize(
    "file",
    ["../secret.safetensors", "/etc/passwd", "config.lock.yaml", "manifest.json", "..", ""],
)
def test_nothing_but_parts_is_given_or_taken(site: Site, file: str) -> None:
    site.store.begin(0)
    for folder in (0, MODEL):
        carried = UploadFolder(site.line, folder, "")
        with pytest.raises(GeoRayError, match=r"is not the name of a part|is not a model"):
            carried.write(file, [b"x"], 1)
        with pytest.raises(GeoRayError, match=r"is not the name of a part|is not a model"):
            carried.open(file, 1).readinto(bytearray(1))
    with pytest.raises(GeoRayError, match="is not a model"):
        UploadFolder(site.line, MODEL, "").write("weights.safetensors", [b"x"], 1)


def test_links_are_not_followed(site: Site, tmp_path: Path) -> None:
    site.store.begin(0)
    (tmp_path / "secret").write_text("secret")
    path = site.run / "checkpoints" / "ckpt-00000000" / FILE
    path.symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointCorruptError):
        site.carried.folder(0).open(FILE, 6).readinto(bytearray(6))
    write_part(site.carried.folder(0), NAME, TENSORS, {})
    assert (tmp_path / "secret").read_text() == "secret" and not path.is_symlink()


@pytest.mark.parametrize(
    "change",
    [{"op": "remove"}, {"offset": 1}, {"whole": 0}, {"folder": -1}, {"folder": "x"}, {"op": 3}],
)
def test_strange_requests_are_refused(site: Site, change: Meta) -> None:
    site.store.begin(0)
    about: Meta = {"op": "write", "folder": 0, "file": FILE, "upload": "u", "offset": 0, "whole": 1}
    with (
        LanClient(
            site.line.address, site.line.key, {"peer": "eu/part"}, config=UPLOAD_LAN
        ) as client,
        pytest.raises((FrameError, RunDirectoryError)),
    ):
        client.request(about | change, b"x")


def test_a_stranger_is_not_let_in(site: Site) -> None:
    with pytest.raises(TransportError):
        LanClient(site.line.address, b"k" * 32, {"peer": "eu"}, connect_timeout_s=1.0)
    other = UploadRegistration(site.spec, "eu").upload_key()
    assert other is not None
    with pytest.raises(TransportError, match="not meant for this process"):
        UploadRegistration(site.spec, "eu").spec(site.upload_server.grant(other))


def test_a_process_with_the_directory_needs_no_upload_server(site: Site) -> None:
    def upload_key(**changes: Any) -> bytes | None:
        return UploadRegistration(replace(site.spec, **changes), "eu").upload_key()

    assert upload_key(run_dir=str(site.run)) is None
    assert upload_key(run_dir=str(site.run), run_id="another") is not None  # of the same name
    assert upload_key(places=CheckpointPlaces("s3://bucket/p")) is None
    (site.run / SIGHT_FILE).write_bytes(b"\xff")
    assert upload_key(run_dir=str(site.run)) is not None


class Reply:
    def __init__(self, answer: Callable[[], Any]) -> None:
        self.remote = answer


class Server:
    """An actor, as far as the upload_server asks it."""

    def __init__(self, entry: UploadRegistration) -> None:
        self.upload_key = Reply(entry.upload_key)
        self.spec: RunSpec | None = None
        self.use_upload_server = self
        self._entry = entry

    def remote(self, grant: Any) -> None:
        self.spec = self._entry.spec(grant)


def test_only_processes_without_the_directory_open_the_upload_server(tmp_path: Path) -> None:
    made = Site(tmp_path)
    upload_server = CheckpointUploadServer(
        made.run / "checkpoints", made.run, "us", lambda: "127.0.0.1"
    )
    sees = Server(UploadRegistration(replace(made.spec, run_dir=str(made.run)), "us"))
    upload_server.admit({"us": sees}, dict)
    assert upload_server._server is None and sees.spec is None
    remote = Server(UploadRegistration(made.spec, "eu"))
    upload_server.admit({"us": sees, "eu": remote}, dict)
    assert sees.spec is None and remote.spec is not None and remote.spec.places.is_remote
    upload_server.close()
    made.upload_server.close()


def test_the_upload_server_cannot_be_pickled(site: Site) -> None:
    with pytest.raises(TypeError):
        pickle.dumps(site.upload_server)
