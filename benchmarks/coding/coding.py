"""Coded computation: what it gains in a straggler model, and what encoding and decoding cost.

The gain is computed in a model (`coding_model.py`), nothing runs there: times of a step are in
units of a plain step without stragglers, n is the number of workers.

  wait_all      the plain step
  drop_S        the S slowest are left out: S / n of the gradients are lost
  repetition_S  gradient coding in groups of S + 1, S + 1 times the work, exact
  cyclic_S      gradient coding in a circle, S + 1 times the work, exact
  mds_K         a product from the first K of n answers, n / K times the work, exact

Shuffles are ratios of bytes, coded by multicast over one unicast per missing block. Costs are real
and single-threaded: GB/s of what goes in, by the core's time. Errors are of fp32 gradients of
normal numbers, |decoded - sum| / |sum| for the worst of up to 200 sets of survivors.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from benchmarks.coding import coding_model
from benchmarks.common import support
from geo_ray.strategies import coded_shuffle
from geo_ray.strategies.coded_shuffle import Multicast
from geo_ray.strategies.gradient_code import GradientCode, cyclic, fractional_repetition
from geo_ray.strategies.mds_code import MdsCode, worst_condition

WORKERS = (4, 8, 16)
TAILS = (0.5, 1.0, 4.0)
CACHED = (0.25, 0.5, 0.75)
MDS_COLUMNS = {"vector": 1, "matrix64": 64}
MOST_SETS = 200


def main() -> None:
    options = support.parse(__doc__)
    machine = support.hardware()
    torch.set_num_threads(1)
    quick = options.quick
    figures = []
    for name, measure in {
        "stragglers": lambda: stragglers(*((3, 500) if quick else (9, 5000))),
        "shuffles": lambda: shuffles(*((2, 2) if quick else (9, 4))),
        "errors": errors,
        "gradients": lambda: gradient_costs(*((1, 3) if quick else (10, 9))),
        "products": lambda: product_costs(*((1152, 3) if quick else (4608, 9))),
        "blocks": lambda: xor_costs(*((1, 3) if quick else (8, 15))),
    }.items():
        support.say(name)
        figures += measure()
    support.finish("coding", machine, figures, options.out)


def stragglers(seeds: int, steps: int) -> list[support.Figure]:
    """Mean times of a step, medians over seeds; each beside the plain step's."""
    figures = []
    for model, tail, n in itertools.product(("delay", "rate"), TAILS, WORKERS):
        runs = [coding_model.step_times(model, tail, n, steps, seed) for seed in range(seeds)]
        plain = float(np.median([run["wait_all"] for run in runs]))
        for name in runs[0]:
            values = [run[name] for run in runs]
            label = f"{model}_tail{tail:g}_n{n}_{name}"
            middle = float(np.median(values))
            figures.append(support.Figure(label, middle, "steps", None, plain, values))
    return figures


def shuffles(seeds: int, epochs: int) -> list[support.Figure]:
    """Bytes of all epochs, coded over plain; and how long a plan takes."""
    figures = []
    for n, cached in itertools.product(WORKERS, CACHED):
        began_s = time.thread_time()
        runs = [coding_model.shuffles(n, cached, epochs, seed) for seed in range(seeds)]
        plan_s = (time.thread_time() - began_s) / (seeds * epochs)
        coded, plain = (
            [float(sum(getattr(found, kind) for found in run)) for run in runs]
            for kind in ("coded_bytes", "unicast_bytes")
        )
        label = f"shuffle_n{n}_cached{cached:g}"
        figures.append(support.ratio(f"{label}_coded_over_plain", coded, plain))
        figures.append(support.Figure(f"{label}_plan_ms", 1e3 * plan_s, "ms"))
    return figures


def errors() -> list[support.Figure]:
    """What rounding leaves of the sum, for the worst losses that are tolerated."""
    figures = []
    for n, tolerate in ((4, 1), (8, 1), (8, 2), (16, 1), (16, 3), (16, 4)):
        codes = {"cyclic": cyclic(n, tolerate)}
        if n % (tolerate + 1) == 0:
            codes["repetition"] = fractional_repetition(n, tolerate)
        for name, code in codes.items():
            figures.append(
                support.Figure(f"{name}_n{n}_s{tolerate}_fp32_error", worst_error(code), "ratio")
            )
    return figures


def worst_error(code: GradientCode) -> float:
    n, generator = code.num_workers, torch.Generator().manual_seed(0)
    grads_NP = torch.randn(n, 1000, generator=generator)
    exact_P = grads_NP.double().sum(0)
    coded_NP = [code.encode(w, [grads_NP[p] for p in code.partitions_of(w)]) for w in range(n)]
    lost = list(itertools.combinations(range(n), code.tolerate))
    if len(lost) > MOST_SETS:
        chosen = np.random.default_rng(0).permutation(len(lost))[: MOST_SETS - n]
        neighbours = [tuple((i + j) % n for j in range(code.tolerate)) for i in range(n)]
        lost = [*neighbours, *(lost[place] for place in chosen)]
    found = []
    for missing in lost:
        total_P, _ = code.combine({w: coded_NP[w] for w in range(n) if w not in missing})
        found.append(float((total_P.double() - exact_P).norm() / exact_P.norm()))
    return max(found)


def gradient_costs(millions: int, rounds: int) -> list[support.Figure]:
    """A worker's encoding and the server's combining, beside the plain sum of eight gradients."""
    n, num = 8, millions * 1_000_000
    grads = [torch.randn(num) for _ in range(n)]
    total_P = torch.zeros(num)

    def plain() -> None:
        total_P.zero_()
        for grad_P in grads:
            total_P.add_(grad_P)

    actions: dict[str, Callable[[], object]] = {"sum": plain}
    for name, code in {"cyclic": cyclic(n, 1), "repetition": fractional_repetition(n, 1)}.items():
        coded = dict(enumerate(grads[1:], start=1))  # worker 0 is missing
        actions[f"{name}_encode"] = lambda c=code: c.encode(0, grads[:2])
        actions[f"{name}_combine"] = lambda c=code, given=coded: c.combine(given)
    times_s = take_turns(actions, rounds)
    inputs = {"sum": n, "encode": 2, "combine": n - 1}
    gigabytes = {name: 4e-9 * num * inputs[name.split("_")[-1]] for name in actions}
    figures = speeds("gradient", times_s, gigabytes)
    for name in ("cyclic", "repetition"):
        pair = times_s[f"{name}_combine"], times_s["sum"]
        figures.append(support.ratio(f"gradient_{name}_combine_time_over_sum", *pair))
    return figures


def product_costs(size: int, rounds: int) -> list[support.Figure]:
    """Encoding a square fp64 matrix and decoding products, beside the plain product."""
    matrix_MN = torch.randn(size, size, dtype=torch.float64)
    figures = []
    for n in WORKERS:
        k = n - n // 4
        code = MdsCode(k, n)
        label, condition = f"mds_{k}of{n}", worst_condition(np.array(code.weights_RK))
        figures.append(support.Figure(f"{label}_worst_condition", condition, "ratio"))
        blocks = code.encode(matrix_MN)
        actions: dict[str, Callable[[], object]] = {"encode": lambda c=code: c.encode(matrix_MN)}
        for kind, columns in MDS_COLUMNS.items():
            shape = (size, columns) if columns > 1 else (size,)
            other = torch.randn(shape, dtype=torch.float64)
            answers = [block @ other for block in blocks]
            first, last = dict(enumerate(answers[:k])), dict(enumerate(answers))
            for worker in range(n - k):
                del last[worker]  # as many as possible are solved for
            actions[f"{kind}_plain"] = lambda other=other: matrix_MN @ other
            actions[f"{kind}_join"] = lambda c=code, given=first: c.decode(given, size)
            actions[f"{kind}_solve"] = lambda c=code, given=last: c.decode(given, size)
            error = relative(code.decode(last, size), matrix_MN @ other)
            figures.append(support.Figure(f"{label}_{kind}_error", error, "ratio"))
        times_s = take_turns(actions, rounds)
        encoded_gbps = [8e-9 * size**2 / value for value in times_s["encode"]]
        figures.append(support.median(f"{label}_encode_gbps", encoded_gbps, "GB/s"))
        for kind in MDS_COLUMNS:
            for part in ("encode", f"{kind}_join", f"{kind}_solve"):
                named = f"{label}_{kind}_{part.split('_')[-1]}_time_over_plain"
                figures.append(support.ratio(named, times_s[part], times_s[f"{kind}_plain"]))
    return figures


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def xor_costs(megabytes: int, rounds: int) -> list[support.Figure]:
    """Messages of groups of two to eight blocks, beside a plain copy of a block."""
    size_bytes = megabytes * 1_000_000
    draw = np.random.default_rng(0)
    blocks = {number: draw.bytes(size_bytes) for number in range(8)}
    actions: dict[str, Callable[[], object]] = {"copy": lambda: bytearray(blocks[0])}
    gigabytes = {"copy": 1e-9 * size_bytes}
    for count in (2, 4, 8):
        group = Multicast(tuple((worker, worker) for worker in range(count)))
        message = coded_shuffle.encode(group, blocks)
        given = group, 0, message, blocks, size_bytes
        actions[f"encode_{count}"] = lambda group=group: coded_shuffle.encode(group, blocks)
        actions[f"decode_{count}"] = lambda given=given: coded_shuffle.decode(*given)
        gigabytes |= dict.fromkeys(
            (f"encode_{count}", f"decode_{count}"), 1e-9 * size_bytes * count
        )
    return speeds("xor", take_turns(actions, rounds), gigabytes)


def take_turns(actions: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of the core's time; one round before only warms up."""
    times_s: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds + 1):
        for name, action in actions.items():
            began_s = time.thread_time()
            action()
            times_s[name].append(time.thread_time() - began_s)
    return {name: values[1:] for name, values in times_s.items()}


def speeds(
    prefix: str, times_s: Mapping[str, list[float]], gigabytes: Mapping[str, float]
) -> list[support.Figure]:
    return [
        support.median(f"{prefix}_{name}_gbps", [gigabytes[name] / s for s in values], "GB/s")
        for name, values in times_s.items()
    ]


if __name__ == "__main__":
    main()
