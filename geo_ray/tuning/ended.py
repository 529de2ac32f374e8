"""Trials of a search that have ended, as JSON lines: what a resumed search continues from.

Ray Tune pickles its own state, and unpickling runs whatever code is in it. So a resumed search
never reads that state. It starts Ray Tune again, gives the searcher the trials that have ended as
its first points, and each of these repeats its reports instead of being run.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import Field, JsonValue, ValidationError
from ray.tune.result import AUTO_RESULT_KEYS

from geo_ray.config.base import StrictModel
from geo_ray.config.canonical import canonical_json
from geo_ray.errors import TuningDirectoryError

ENDED_FILE: Final = "trials.jsonl"
_OF_RAY: Final = {*AUTO_RESULT_KEYS, "done", "trial_id", "experiment_tag", "should_checkpoint"}
_log = logging.getLogger(__name__)


class EndedTrial(StrictModel):
    """A trial that has ended.

    Attributes:
        drawn: its values, by name of the parameter.
        reports: what it has reported, in order.
    """

    drawn: dict[str, JsonValue]
    reports: tuple[dict[str, str | bool | int | float | None], ...] = Field(min_length=1)

    @property
    def key(self) -> str:
        """The same for trials with the same values."""
        return key_of(self.drawn)


def key_of(drawn: Mapping[str, Any]) -> str:
    """The key of a trial by its values, as Ray Tune has drawn them."""
    return canonical_json(_plain(drawn)).decode()


def plain_report(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a trial itself has reported, without what Ray Tune adds."""
    found = {name: _plain(value) for name, value in result.items() if name not in _OF_RAY}
    return {k: v for k, v in found.items() if v is None or isinstance(v, (str, bool, int, float))}


def add_ended(path: Path, drawn: Mapping[str, Any], reports: Collection[Mapping[str, Any]]) -> None:
    """Append a trial that has ended, on a line of its own also behind a torn one.

    Raises:
        OSError: as the system says.
    """
    line = json.dumps({"drawn": _plain(drawn), "reports": list(reports)}) + "\n"
    with path.open("a+b") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        is_torn = file.read() not in (b"", b"\n")
        file.write((f"\n{line}" if is_torn else line).encode())
        file.flush()
        os.fsync(file.fileno())


def read_ended(path: Path, names: Collection[str]) -> dict[str, EndedTrial]:
    """Read the trials that have ended, by key; damaged lines cost their trials.

    Args:
        path: the file; need not exist.
        names: of the parameters of the search. A trial with others is not of it.

    Raises:
        TuningDirectoryError: the file cannot be read.
    """
    try:
        lines = path.read_bytes().splitlines() if path.exists() else []
    except OSError as error:
        raise TuningDirectoryError(
            f"{path} cannot be read: {error.strerror}", fix="Check the permissions of the file."
        ) from error
    found: dict[str, EndedTrial] = {}
    for number, line in enumerate(lines, 1):
        try:
            trial = EndedTrial.model_validate_json(line)
        except ValidationError:
            _log.warning("line %d of %s is no trial; that trial is run again", number, path)
            continue
        if set(trial.drawn) == set(names):
            found[trial.key] = trial
    return found


def _plain(value: Any) -> Any:
    """A value without NumPy's types, of which Ray Tune's draws are."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value.item() if hasattr(value, "item") else value
