"""Reading one value of a typed tree from a JSON file that somebody may have edited."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from pydantic import BaseModel, ValidationError

from geo_ray.errors import GeoRayError

T = TypeVar("T", bound=BaseModel)

_MOST_BYTES: Final = 16 * 1024 * 1024
_MOST_COMPLAINTS: Final = 5


def load_json(path: Path, root: type[T], what: str, wrong: Callable[[str], GeoRayError]) -> T:
    """Read a file.

    Args:
        path: the file; read up to 16 MiB.
        root: the class of the whole tree.
        what: it is, for messages.
        wrong: makes the error from its message.

    Raises:
        GeoRayError: of ``wrong``; the file cannot be read, or is not valid: names the first keys.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise wrong(f"{what} {path} is larger than {_MOST_BYTES} bytes")
        return root.model_validate_json(data)
    except OSError as error:
        raise wrong(f"{what} {path} cannot be read: {error.strerror or error}") from None
    except ValidationError as error:
        keys = [
            f"{'.'.join(map(str, item['loc'])) or 'file'}: {item['msg']}"
            for item in error.errors(include_url=False, include_input=False)[:_MOST_COMPLAINTS]
        ]
        raise wrong(f"{what} {path} is not valid: {'; '.join(keys)}") from None
