"""The process that repeats what a check has done: JSON on standard input, JSON out."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from geo_ray.base.errors import GeoRayError
from geo_ray.codecs.base import Coded
from geo_ray.testing.processes import decoded, encoded
from geo_ray.testing.run import object_of
from geo_ray.testing.strategies import whole_run
from geo_ray.training.parameters import digest


def answer_to(what: dict[str, Any]) -> dict[str, Any]:
    """Do what was asked for."""
    base_dir = Path(what["base_dir"])
    if "strategy" in what:
        subject = object_of("strategy", what["strategy"], base_dir)
        return {"digests": whole_run(subject.strategy, 1)} if subject.strategy else {}
    codec = object_of("codec", what["codec"], base_dir).codec
    if codec is None:
        return {}
    coded = [
        Coded(
            codec.kind,
            each["num"],
            torch.tensor(list(bytes.fromhex(each["data"])), dtype=torch.uint8),
        )
        for each in what["coded"]
    ]
    # Decoded first: what encode may leave in this process is no help.
    values = decoded(codec, coded)
    return {"decoded": values, "encoded": [digest(each.data_B) for each in encoded(codec)]}


def main() -> None:
    """Answer one request."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a class that prints is no answer
        try:
            answer = answer_to(json.load(sys.stdin))
        except GeoRayError as error:
            answer = {"error": error.message}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
