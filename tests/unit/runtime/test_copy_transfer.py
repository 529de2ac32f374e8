"""The copy for a joining region between two bridges, over real sockets."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from geo_ray.base.errors import CheckpointCorruptError, LinkDownError
from geo_ray.runtime.state_transfer import PIECE_BYTES, CopyTransfer, StreamedParts
from geo_ray.storage.checkpoint import verify_part
from geo_ray.storage.folders import TempFileFolder
from geo_ray.storage.manifest import PartInfo
from geo_ray.storage.parts import read_part, write_part
from geo_ray.transport.wire.message import Message
from tests.support.wan_support import Node, running

TENSORS = {
    "params": torch.arange(3 * PIECE_BYTES // 4 + 77, dtype=torch.float32),
    "step": torch.tensor([7], dtype=torch.int64),
    "nothing": torch.empty(0),
}


def carriers(donor: Node, newcomer: Node) -> tuple[CopyTransfer, CopyTransfer]:
    """One at each end, fed with what arrives there."""
    found = []
    for node, peer in ((donor, newcomer.region), (newcomer, donor.region)):
        carrier = CopyTransfer(node.endpoint.send)
        node.handler = partial(_take, carrier, peer)
        found.append(carrier)
    return found[0], found[1]


def _take(carrier: CopyTransfer, peer: str, message: Message) -> None:
    carrier.routes()[message.kind](peer, message)


def parts_from(newcomer: CopyTransfer, pool: ThreadPoolExecutor, ahead: int) -> StreamedParts:
    def fetch(file: str, offset: int, num_bytes: int) -> Callable[[], bytes]:
        return pool.submit(newcomer.fetch, "eu", file, offset, num_bytes).result

    return StreamedParts("eu", fetch, ahead)


@pytest.mark.parametrize("ahead", [1, 4])
def test_a_part_arrives_as_it_was_written(ahead: int) -> None:
    eu, us, folder = Node("eu"), Node("us"), TempFileFolder()
    with running(eu, us), ThreadPoolExecutor(4) as pool:
        us.dial(eu)
        donor, newcomer = carriers(eu, us)
        info = write_part(folder, "eu-ps0", TENSORS, {"counters": {"steps": 7}})
        donor.serve(folder.piece)
        parts = parts_from(newcomer, pool, ahead)
        verify_part(parts, info)
        tensors, meta = read_part(parts, info)
        assert meta == {"counters": {"steps": 7}}
        assert all(torch.equal(tensors[name], value) for name, value in TENSORS.items())
        assert eu.about("us")["bytes_sent"]["join"] > 2 * info.bytes
        donor.close()
        newcomer.close()


def test_missing_files_of_a_copy_are_refused_by_name() -> None:
    eu, us, folder = Node("eu"), Node("us"), TempFileFolder()
    with running(eu, us), ThreadPoolExecutor(4) as pool:
        us.dial(eu)
        donor, newcomer = carriers(eu, us)
        parts = parts_from(newcomer, pool, 2)
        info = write_part(folder, "eu-ps0", TENSORS, {})
        with pytest.raises(CheckpointCorruptError, match="nothing is transferred"):
            read_part(parts, info)
        donor.serve(folder.piece)
        short = PartInfo(name=info.name, file=info.file, bytes=info.bytes + 1, sha256=info.sha256)
        with pytest.raises(CheckpointCorruptError, match="ends early"):
            verify_part(parts, short)
        folder.clear()
        with pytest.raises(CheckpointCorruptError, match="it no longer exists"):
            read_part(parts, info)
        with pytest.raises(CheckpointCorruptError, match="size is unknown"):
            parts.open(info.file)
        donor.close()
        newcomer.close()


def test_waiting_calls_fail_when_the_bridge_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Message] = []
    newcomer = CopyTransfer(lambda peer, message: asked.append(message))
    with ThreadPoolExecutor(1) as pool:
        piece = pool.submit(newcomer.fetch, "eu", "eu-ps0.safetensors", 0, 10)
        while not asked:
            pass
        newcomer.close()
        with pytest.raises(LinkDownError, match="closes"):
            piece.result(10)
    monkeypatch.setattr("geo_ray.runtime.state_transfer._UNANSWERED_S", 0.05)
    with pytest.raises(LinkDownError, match="'eu' sent nothing of eu-ps0"):
        newcomer.fetch("eu", "eu-ps0.safetensors", 0, 10)


def test_the_newest_copy_counts_and_leaves_no_file() -> None:
    folder = TempFileFolder()
    folder.write("a", [b"1234", memoryview(b"56")], 6)
    folder.write("a", [b"78"], 2)
    assert (folder.piece("a", 0, 9), folder.piece("a", 1, 9), folder.piece("a", 2, 9)) == (
        b"78",
        b"8",
        b"",
    )
