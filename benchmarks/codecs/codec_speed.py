"""Codecs: speed both ways on one core, ratio, and what is lost.

Speeds are gigabytes of fp32 input per second of one core's time (user and kernel), so that other
programs on the machine disturb them less; on an idle machine that is the time of the clock. Codecs
take turns. Beside them, the bound: a plain copy into new memory (`torch.clone`) and into memory
that is there already.

  gauss    normal numbers
  heavy    Student's t with three degrees of freedom: a few large elements
  layers   normal numbers whose scale differs by 10^6 between runs of 10000 elements

The error is |decoded - x| / |x| of one call, without error feedback and with an empty memory: a
sparse codec loses most of a vector at once and sends it later. Speed and ratio are those of normal
numbers; for `nonzeros`, of which 95 % are zero.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import support
from geo_ray.codecs.base import Codec
from geo_ray.codecs.registry import CODECS

MILLIONS = (1, 10, 25)
ERRORS_AT_MILLIONS = 10
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "int8_block4096": ("int8", {"block": 4096}),
    "int4_block256": ("int4", {"block": 256}),
    "topk_fp16": ("topk", {"values": "fp16"}),
    "topk_10pct": ("topk", {"ratio": 0.1}),
    "topk_01pct": ("topk", {"ratio": 0.001}),
}
SPARSE = "nonzeros"
TARGETS = {"int8_encode": ">= 1", "int8_decode": ">= 2", "topk_encode": ">= 0.3"}


def main() -> None:
    options = support.parse(__doc__)
    machine = support.hardware()
    torch.set_num_threads(1)
    codecs: dict[str, Codec] = {kind: found() for kind, found in CODECS.items()}
    codecs |= {name: CODECS[kind](**extra) for name, (kind, extra) in VARIANTS.items()}
    figures = []
    for millions in MILLIONS[:1] if options.quick else MILLIONS:
        support.say(f"{millions} M elements")
        figures += speeds(codecs, millions, rounds=3 if options.quick else 9)
    millions = 1 if options.quick else ERRORS_AT_MILLIONS
    support.say(f"errors at {millions} M elements")
    figures += losses(codecs, millions * 1_000_000)
    support.finish("codec_speed", machine, figures, options.out)


def speeds(codecs: dict[str, Codec], millions: int, rounds: int) -> list[support.Figure]:
    """Medians of encode and decode, in GB/s."""
    inputs = vectors(millions * 1_000_000)
    x_P, sparse_P = inputs["gauss"], inputs["sparse"]
    given = {name: sparse_P if name == SPARSE else x_P for name in codecs}
    warm_P, memories = torch.zeros_like(x_P), {name: {} for name in codecs}
    coded = {name: codec.encode(given[name], memories[name], 0) for name, codec in codecs.items()}
    found: dict[str, list[float]] = {}

    def note(name: str, action: Callable[[], object]) -> None:
        began_s = time.thread_time()
        action()
        found.setdefault(name, []).append(time.thread_time() - began_s)

    for number in range(-1, rounds):
        note("clone", x_P.clone)
        note("copy", lambda: warm_P.copy_(x_P))
        for name, codec in codecs.items():
            arguments = given[name], memories[name], number + 1
            note(f"{name}_encode", lambda c=codec, a=arguments: c.encode(*a))
            note(f"{name}_decode", lambda c=codec, n=name: c.decode(coded[n]))
    gigabytes = 4 * x_P.numel() / 1e9
    return [
        support.median(
            f"{name}_gbps_{millions}m",
            [gigabytes / seconds for seconds in times_s[1:]],  # the first only warms up
            "GB/s",
            TARGETS.get(name),
        )
        for name, times_s in found.items()
    ]


def losses(codecs: dict[str, Codec], num: int) -> list[support.Figure]:
    """Ratio to fp32 for normal numbers, and errors for all kinds of vectors."""
    figures = []
    inputs = vectors(num)
    for name, codec in codecs.items():
        for label, x_P in inputs.items():
            coded = codec.encode(x_P, {}, 0)
            if label == ("sparse" if name == SPARSE else "gauss"):
                figures.append(support.Figure(f"{name}_ratio", 4 * num / coded.size_bytes, "ratio"))
            error = float((codec.decode(coded) - x_P).norm() / x_P.norm())
            if label != "sparse":
                figures.append(support.Figure(f"{name}_error_{label}", error, "ratio"))
    return figures


def vectors(num: int) -> dict[str, Tensor]:
    """What is encoded; see the module's docstring."""
    draw = np.random.default_rng(0)
    gauss_P = draw.standard_normal(num, np.float32)
    scale_P = 10.0 ** -draw.uniform(0, 6, -(-num // 10_000)).repeat(10_000)[:num]
    return {
        "gauss": torch.from_numpy(gauss_P),
        "heavy": torch.from_numpy(draw.standard_t(3, num).astype(np.float32)),
        "sparse": torch.from_numpy(np.where(draw.random(num) < 0.05, gauss_P, np.float32(0))),
        "layers": torch.from_numpy((gauss_P * scale_P).astype(np.float32)),
    }


if __name__ == "__main__":
    main()
