"""The files that a gradient passes are those that docs/design/architecture.md names."""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import geo_ray
from tests.support.region_support import InProcess, experiment_of

LIBRARY = Path(geo_ray.__file__).parent
PAGE = LIBRARY.parent / "docs" / "design" / "architecture.md"
PACKAGES = ("codecs/", "runtime/", "strategies/", "training/", "transport/")
LARGE_BYTES = 8192  # more than any header
DEEPEST = 3


def is_large(value: object, depth: int = 0) -> bool:
    """Whether a value is a large buffer, or a message or container with one."""
    if isinstance(value, torch.Tensor):
        return value.nbytes >= LARGE_BYTES
    if isinstance(value, bytes | bytearray | memoryview):
        return memoryview(value).nbytes >= LARGE_BYTES
    if depth == DEEPEST:
        return False
    parts: list[object] = []
    if isinstance(value, list | tuple):
        parts = list(value)
    elif type(value).__module__.startswith("geo_ray") and dataclasses.is_dataclass(value):
        frozen = type(value).__dataclass_params__.frozen  # type: ignore[attr-defined]
        if frozen:  # messages; what is not frozen has state of its own
            parts = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return any(is_large(part, depth + 1) for part in parts)


class Trace:
    """The files of the library whose functions are called, and those that hold large values."""

    def __init__(self) -> None:
        self.called: set[str] = set()
        self.holding: set[str] = set()

    def __call__(self, frame: FrameType, event: str, result: object) -> None:
        path = frame.f_code.co_filename
        if event not in {"call", "return"} or not path.startswith(f"{LIBRARY}/"):
            return
        name = path.removeprefix(f"{LIBRARY}/")
        self.called.add(name)
        if name in self.holding:
            return
        code = frame.f_code
        given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        values = [frame.f_locals.get(each) for each in given] if event == "call" else [result]
        if any(is_large(value) for value in values):
            self.holding.add(name)


@contextmanager
def in_threads(trace: Any) -> Iterator[None]:
    """Trace every thread that starts meanwhile."""
    threading.setprofile(trace)
    try:
        yield
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]


def test_a_gradient_passes_the_files_that_the_page_names(tmp_path: Path) -> None:
    text = PAGE.read_text()
    section = text[text.index("A gradient passes these") : text.index("A message counts as")]
    table, others = section.split("The reply passes through the same files")
    passed, looked_at = (set(re.findall(r"`([\w/]+\.py)`", part)) for part in (table, others))
    assert f"these {len(passed)} files" in section
    experiment = experiment_of(
        regions=[{"name": "us-east"}, {"name": "eu-west", "workers": 2}],
        train={"steps": 4, "eval_every": 0, "statistics_batches": 0, "optimizer_on": "server"},
        strategy={"kind": "sma", "interval": 2},
        task={"use": "digits", "options": {"width": 40}},
    )
    trace = Trace()
    with in_threads(trace), InProcess(experiment, tmp_path) as world:
        first, second = world.run()
    assert first == second
    assert passed <= trace.called
    assert {each for each in trace.holding if each.startswith(PACKAGES)} <= passed | looked_at
