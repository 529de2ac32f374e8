"""The root of the error tree, and how an error is found by its code."""

from __future__ import annotations

from typing import ClassVar


class GeoRayError(Exception):
    """Root of the tree.

    Args:
        message: what went wrong, naming the key, shard, region or file.
        fix: what to do about it, if more is known than the class's general advice.
    """

    code: ClassVar[str] = "GEO_RAY"
    exit_code: ClassVar[int] = 1
    advice: ClassVar[str] = "Read the message; the event log of the run has the details."

    def __init__(self, message: str, *, fix: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix or self.advice

    def __str__(self) -> str:
        return f"[{self.code}] {self.message}\n  fix: {self.fix}"

    def __reduce__(self) -> tuple[object, ...]:
        # Ray carries errors between its processes; keyword arguments would be lost otherwise.
        return (_rebuild, (type(self), self.message, self.fix))


def from_code(code: str, message: str, fix: str | None) -> GeoRayError:
    """The error with this code; the tree's root if this release has no such code."""
    kinds: list[type[GeoRayError]] = [GeoRayError]
    for kind in kinds:  # grows while it is walked
        kinds += kind.__subclasses__()
    found = next((kind for kind in kinds if kind.code == code), GeoRayError)
    return found(message, fix=fix)


def _rebuild(kind: type[GeoRayError], message: str, fix: str) -> GeoRayError:
    return kind(message, fix=fix)
