"""A large object on its way into a bucket: in pieces, of which a failed one is sent again alone."""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Final

from geo_ray.errors import GeoRayError
from geo_ray.stores.bucket import Bucket
from geo_ray.util.threads import give_way

_log = logging.getLogger(__name__)
PIECE_BYTES: Final = 8 << 20
_MOST_PIECES: Final = 10_000  # that an object may have
_LANES: Final = 2  # pieces on their way at a time
_NAME: Final = "geo-ray-upload"


def upload_once(
    bucket: Bucket,
    key: str,
    chunks: Iterable[memoryview | bytes],
    num_bytes: int,
    note: Callable[[str], None] = lambda step: None,
) -> None:
    """Write an object that must not be there yet; it is there whole or not at all.

    The bytes pass through a few buffers of one piece each, whatever the object's size. A piece is
    sent again, as often as `RequestLimits` says, if the server fails or the connection breaks off.
    Who sends them gives way to all that compute. An answer that got lost does no harm: whether the
    object there is this one is asked for.

    Args:
        bucket: where.
        key: under which.
        chunks: the content; each is valid until the next is asked for.
        num_bytes: of the whole; decides about the size of pieces.
        note: told the steps that are done.

    Raises:
        FileExistsError: there is another object.
        StoreError: the store does not answer, refuses or is full. Nothing of the object stays.
    """
    mine = {_NAME: secrets.token_hex(16)}
    try:
        if num_bytes <= PIECE_BYTES:
            data = bytearray()
            for chunk in chunks:
                data += chunk
            note("opened")
            bucket.put(key, data, once=True, metadata=mine)
        else:
            _in_pieces(bucket, key, chunks, num_bytes, mine, note)
    except FileExistsError:
        if not _is_there(bucket, key, mine):
            raise
    note("written")


def _is_there(bucket: Bucket, key: str, mine: dict[str, str]) -> bool:
    try:
        return bucket.metadata(key).get(_NAME) == mine[_NAME]
    except FileNotFoundError:
        return False


def _in_pieces(
    bucket: Bucket,
    key: str,
    chunks: Iterable[memoryview | bytes],
    num_bytes: int,
    mine: dict[str, str],
    note: Callable[[str], None],
) -> None:
    upload = bucket.begin_upload(key, mine)
    note("opened")
    size = max(PIECE_BYTES, -(-num_bytes // _MOST_PIECES))
    rooms: SimpleQueue[bytearray] = SimpleQueue()
    for _ in range(_LANES + 1):
        rooms.put(bytearray(size))

    def send(number: int, room: bytearray) -> str:
        try:
            return bucket.put_piece(key, upload, number, room)
        finally:
            rooms.put(room)

    tags: list[str] = []
    sent: deque[Future[str]] = deque()
    try:
        with ThreadPoolExecutor(_LANES, "upload", give_way) as lanes:
            try:
                for number, room in enumerate(_filled(chunks, rooms), 1):
                    sent.append(lanes.submit(send, number, room))
                    note("chunk_written")
                    while sent and sent[0].done():
                        tags.append(sent.popleft().result())  # after one that failed none is sent
                tags += [each.result() for each in sent]
            except BaseException:
                lanes.shutdown(wait=False, cancel_futures=True)
                raise
        bucket.end_upload(key, upload, tags, once=True)
    except BaseException as error:
        _drop(bucket, key, upload)
        if isinstance(error, FileNotFoundError) and _is_there(bucket, key, mine):
            return  # it was made of its pieces, and the answer was lost
        raise _gone(error) from None


def _gone(error: BaseException) -> BaseException:
    """An upload that was given up by somebody else is no file that is missing."""
    if isinstance(error, FileNotFoundError):
        return FileExistsError(str(error))
    return error


def _drop(bucket: Bucket, key: str, upload: str) -> None:
    """Let the server forget the pieces; what it does not hear is swept by the next save."""
    try:
        bucket.drop_upload(key, upload)
    except GeoRayError as error:
        _log.warning("pieces of %s stay in %s: %s", key, bucket.place, error.message)


def _filled(
    chunks: Iterable[memoryview | bytes], rooms: SimpleQueue[bytearray]
) -> Iterator[bytearray]:
    """Buffers full of the content, the last one cut to what is left."""
    room, used = rooms.get(), 0
    for chunk in chunks:
        rest = memoryview(chunk)
        while rest:
            size = min(len(rest), len(room) - used)
            room[used : used + size] = rest[:size]
            used += size
            rest = rest[size:]
            if used == len(room):
                yield room
                room, used = rooms.get(), 0
    if used:
        del room[used:]
        yield room
