"""The root of the error tree, and how an error is found by its code."""

from __future__ import annotations

from typing import ClassVar


class GeoRayError(Exception):
    """The root of all errors.

    Args:
        message: what went wrong, naming the key, shard, region or file.
        fix: what to do about it, if more is known than the class's general advice.

    Attributes:
        code: the name that stays the same in every release.
        exit_code: what the process ends with.
        chapter: heading of its section in `docs/errors.md`.
        causes: what usually leads to it.
        advice: what to do about it; shown where the message comes without a fix of its own.
        more: what else is worth knowing when mending it; in `docs/errors.md` only.
    """

    code: ClassVar[str] = "GEO_RAY"
    exit_code: ClassVar[int] = 1
    chapter: ClassVar[str] = ""
    causes: ClassVar[str] = (
        "It is never raised by itself; seeing this code means that a more exact one is missing."
    )
    advice: ClassVar[str] = "Read the message; the event log of the run has the details."
    more: ClassVar[str] = "Please report it."

    def __init__(self, message: str, *, fix: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix or self.advice

    def __str__(self) -> str:
        return f"[{self.code}] {self.message}\n  fix: {self.fix}"

    def __reduce__(self) -> tuple[object, ...]:
        # Ray carries errors between its processes; keyword arguments would be lost otherwise.
        return (_rebuild, (type(self), self.message, self.fix))


def every_class() -> list[type[GeoRayError]]:
    """All classes of the tree, parents before their children."""
    kinds: list[type[GeoRayError]] = [GeoRayError]
    for kind in kinds:  # grows while it is walked
        kinds += kind.__subclasses__()
    return kinds


def from_code(code: str, message: str, fix: str | None) -> GeoRayError:
    """The error with this code; the tree's root if this release has no such code."""
    found = next((kind for kind in every_class() if kind.code == code), GeoRayError)
    return found(message, fix=fix)


def _rebuild(kind: type[GeoRayError], message: str, fix: str) -> GeoRayError:
    return kind(message, fix=fix)
