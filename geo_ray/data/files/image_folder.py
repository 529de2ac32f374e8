"""Read folders of JPEG and PNG files, whose first folder is their class.

The images stay encoded: a task decodes them in its ``collate``.
"""

# PyArrow ships no complete types.
# mypy: disable-error-code="attr-defined, no-untyped-call"
from __future__ import annotations

from collections.abc import Collection, Iterator

import pyarrow as pa

from geo_ray.base.errors import ShardCorruptError
from geo_ray.data.files.find import FilePiece, InputFile
from geo_ray.storage.store import Store

_NAMES = ("image", "label", "path")
_SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")
_BATCH_ROWS = 4096
_BATCH_BYTES = 16 << 20


def image_pieces(
    store: Store, folder: InputFile, wanted: Collection[str] | None
) -> Iterator[FilePiece]:
    """Read the images of one class in pieces.

    Args:
        store: the store of the files.
        folder: the class and its files.
        wanted: the columns to read, or None for all.

    Yields:
        Pieces with the columns ``image`` (bytes), ``label`` (the name of the class; missing for
        files outside of a folder) and ``path`` (text).

    Raises:
        ShardCorruptError: a file is neither JPEG nor PNG.
    """
    label = None if folder.path == "." else folder.path
    images: list[bytes] = []
    paths: list[str] = []
    size = 0
    for number, path in enumerate(folder.members, start=1):
        data = b""
        if wanted is None or "image" in wanted:
            data = store.read(path)
            if not data.startswith(_SIGNATURES):
                raise ShardCorruptError(
                    f"{path}: is neither a JPEG nor a PNG file", fix="Write or remove the file."
                )
        images.append(data)
        paths.append(path)
        size += len(data)
        is_last = number == len(folder.members)
        if is_last or len(images) >= _BATCH_ROWS or size >= _BATCH_BYTES:
            columns = {
                "image": pa.array(images, pa.large_binary()),
                "label": pa.array([label] * len(paths), pa.string()),
                "path": pa.array(paths, pa.string()),
            }
            chosen = {n: array for n, array in columns.items() if wanted is None or n in wanted}
            yield FilePiece(_NAMES, chosen, len(paths), number / len(folder.members))
            images, paths, size = [], [], 0
