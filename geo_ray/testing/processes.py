"""Whether another process comes to the same: nothing may lie in this one's memory or its hashes.

The other one is a fresh interpreter with another seed of Python's hashes, which is told what to do
in JSON and answers in JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import torch

from geo_ray.base.model import StrictModel
from geo_ray.codecs.base import Codec, Coded
from geo_ray.strategies.base import Strategy
from geo_ray.testing.checks import BrokenPromiseError, expect
from geo_ray.testing.codecs import gauss, heavy
from geo_ray.testing.strategies import whole_run
from geo_ray.training.parameters import digest

_NUM: Final = 1003
_STEPS: Final = 3
_TIMEOUT_S: Final = 300.0
_WRAPPER: Final = "geo_ray.testing.other_process"


def check_codec(codec: Codec, base_dir: Path) -> None:
    """What was encoded here means the same there; and there the same bytes are made.

    Raises:
        BrokenPromiseError: it is otherwise.
    """
    coded = encoded(codec)
    told = [{"num": c.num, "data": bytes(c.data_B.tolist()).hex()} for c in coded]
    found = _asked({"codec": _section(codec), "base_dir": str(base_dir), "coded": told})
    expect(
        found["decoded"] == decoded(codec, coded),
        "another process decodes the bytes to other values: what decode needs must be in the bytes",
    )
    expect(
        found["encoded"] == [digest(each.data_B) for each in coded],
        "another process makes other bytes of the same vectors",
    )


def check_strategy(strategy: Strategy, base_dir: Path) -> None:
    """The same run ends with the same bits.

    Raises:
        BrokenPromiseError: it does not.
    """
    found = _asked({"strategy": _section(strategy), "base_dir": str(base_dir)})
    same = found["digests"] == whole_run(strategy, 1)
    expect(same, "in another process the same gradients end with different bits")


def encoded(codec: Codec) -> list[Coded]:
    """Some vectors, one stream of each kind."""
    found = []
    for make in (gauss, lambda num, step: heavy(num) * (step + 1)):
        memory: dict[str, torch.Tensor] = {}
        found += [codec.encode(make(_NUM, step), memory, step) for step in range(_STEPS)]
    return found


def decoded(codec: Codec, coded: list[Coded]) -> list[str]:
    """Digests of what comes back."""
    return [digest(codec.decode(each)) for each in coded]


def _section(subject: object) -> dict[str, Any]:
    if not isinstance(subject, StrictModel):
        raise BrokenPromiseError("it is no StrictModel")
    return subject.model_dump(mode="json")


def _asked(what: dict[str, Any]) -> dict[str, Any]:
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-m", _WRAPPER],
        input=json.dumps(what),
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    lines = done.stdout.splitlines() or [""]
    try:
        answer: dict[str, Any] = json.loads(lines[-1])
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise BrokenPromiseError(f"another process cannot do it: {last}") from None
    if "error" in answer:
        raise BrokenPromiseError(f"in another process: {answer['error']}")
    return answer
