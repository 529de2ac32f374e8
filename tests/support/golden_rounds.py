"""The rules of strategies that work in rounds, in plain float64 tensors: what traces must equal.

Each gives both regions' parameters after every step, and once more after the end. Inner steps are
plain SGD; region a has twice the samples of b; an answer that nobody waits for is merged LAG steps
after its request at the earliest.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LR = 0.1
LAG = 2
AB = ("a", "b")
Grads = dict[str, list[Tensor]]
Trace = list[dict[str, Tensor]]


def shares(weights: str) -> dict[str, float]:
    """By the rows of a step, by those of the data sets (100 and 300), or alike."""
    of = {"samples": (2 / 3, 1 / 3), "data": (0.25, 0.75), "uniform": (0.5, 0.5)}
    return dict(zip(AB, of[weights], strict=True))


def outer(config, state: dict, delta_P: Tensor) -> Tensor:
    """What the outer optimizer subtracts."""
    if config.kind == "sgd":
        return config.lr * delta_P
    m = state.get("m", torch.zeros_like(delta_P))
    if config.kind == "nesterov":
        state["m"] = config.momentum * m + delta_P
        return config.lr * (delta_P + config.momentum * state["m"])
    t = state["t"] = state.get("t", 0) + 1
    v = state.get("v", torch.zeros_like(delta_P))
    state["m"] = config.beta1 * m + (1 - config.beta1) * delta_P
    state["v"] = config.beta2 * v + (1 - config.beta2) * delta_P**2
    m_hat, v_hat = state["m"] / (1 - config.beta1**t), state["v"] / (1 - config.beta2**t)
    return config.lr * m_hat / (v_hat.sqrt() + config.eps)


def blocking(start_P: Tensor, grads: Grads, interval: int, q, step, scale: float = LR) -> Trace:
    """Local steps from a common point; every ``interval`` steps the point moves by ``step``."""
    anchor, w, trace = start_P, dict.fromkeys(AB, start_P), []
    steps = len(grads["a"])
    for t in range(steps + 1):
        if t < steps:
            w = {i: w[i] - scale * grads[i][t] for i in AB}
        due = (t + 1) % interval == 0 if t < steps else steps % interval
        if due:
            anchor = anchor - step({i: anchor - w[i] for i in AB}, q)
            w = dict.fromkeys(AB, anchor)
        trace.append(w)
    return trace


def mean(deltas, q) -> Tensor:
    return sum(q[i] * deltas[i] for i in AB)


def golden_diloco(start_P, grads, s) -> Trace:
    state: dict = {}
    step = lambda d, q: outer(s.outer, state, mean(d, q))  # noqa: E731
    return blocking(start_P, grads, s.interval, shares(s.weights), step)


def golden_esync(start_P, grads, s) -> Trace:
    """Nothing is measured here, so that everybody takes the slowest's steps."""
    state: dict = {}
    step = lambda d, q: outer(s.outer, state, mean(d, q))  # noqa: E731
    return blocking(start_P, grads, s.slowest_steps, shares(s.weights), step)


def golden_hfa(start_P, grads, s) -> Trace:
    """Pushes are changes: no learning rate."""
    state: dict = {}
    step = lambda d, q: outer(s.outer, state, mean(d, q))  # noqa: E731
    return blocking(start_P, grads, s.k2, shares(s.weights), step, scale=1.0)


def golden_sparseloco(start_P, grads, s) -> Trace:
    def step(d, q):
        norms = {i: float(d[i].norm()) for i in AB}
        limit = sum(norms.values()) / 2  # the median of two
        cut = {i: min(1.0, limit / norms[i]) if s.clip else 1.0 for i in AB}
        return s.outer.lr * mean({i: cut[i] * d[i] for i in AB}, q)

    return blocking(start_P, grads, s.interval, shares(s.weights), step)


def golden_fedssgd(start_P, grads, s) -> Trace:
    q, w, total, trace = shares(s.weights), start_P, dict.fromkeys(AB, 0.0), []
    steps = len(grads["a"])
    for t in range(steps + 1):
        if t < steps:
            total = {i: total[i] + grads[i][t] for i in AB}
        count = s.accumulate if t < steps else steps % s.accumulate
        if (t + 1) % s.accumulate == 0 if t < steps else count:
            w = w - LR * mean({i: total[i] / count for i in AB}, q)
            total = dict.fromkeys(AB, 0.0)
        trace.append(dict.fromkeys(AB, w))
    return trace


def golden_demo(start_P, grads, s) -> Trace:
    num, size = start_P.numel(), s.chunk
    n = torch.arange(size, dtype=torch.float64)
    basis = torch.cos(math.pi / size * (n[None, :] + 0.5) * n[:, None]) * math.sqrt(2 / size)
    basis[0] /= math.sqrt(2)
    rows = -(-num // size)

    def chunked(x):
        return torch.cat([x, torch.zeros(rows * size - num, dtype=x.dtype)]).reshape(rows, size)

    w, m, trace = start_P, dict.fromkeys(AB, torch.zeros_like(start_P)), []
    for t in range(len(grads["a"])):
        sent = {}
        for i in AB:
            m[i] = s.beta * m[i] + grads[i][t]
            parts = chunked(m[i]) @ basis.T
            least = parts.abs().sort(dim=1, descending=True).values[:, [min(s.top, size) - 1]]
            kept = torch.where(parts.abs() >= least, parts, 0.0).flatten()[:num]
            sent[i] = kept
            m[i] = m[i] - (chunked(kept) @ basis).flatten()[:num]
        step = (chunked(mean(sent, shares(s.weights))) @ basis).flatten()[:num]
        w = w - LR * step.sign()
        trace.append(dict.fromkeys(AB, w))
    return [*trace, trace[-1]]


def overlapping(start_P, grads, s, due, q) -> Trace:
    """Regions that train on while a round is on its way; both send in the same step."""
    anchor, w, mark, state = start_P, dict.fromkeys(AB, start_P), dict.fromkeys(AB, start_P), {}
    change, since, trace, steps = None, 0, [], len(grads["a"])
    for t in range(steps + 1):
        if t < steps:
            w = {i: w[i] - LR * grads[i][t] for i in AB}
            since += 1
        if due(since, change is not None) or t == steps:
            deltas = {i: mark[i] - w[i] for i in AB}
            if change is not None:
                anchor = anchor - change
                keep = s.merge == "correct"
                w = {i: anchor - deltas[i] if keep else anchor for i in AB}
            mark, since = dict(w), 0
            change = outer(s.outer, state, mean(deltas, q))
        if t == steps:
            w = dict.fromkeys(AB, anchor - change)
        trace.append(w)
    return trace


def golden_nbsync(start_P, grads, s) -> Trace:
    wait = min(LAG, s.max_local_steps)
    due = lambda since, open_: since >= (wait if open_ else 1)  # noqa: E731
    return overlapping(start_P, grads, s, due, shares(s.weights))


def golden_one_step_delay(start_P, grads, s) -> Trace:
    due = lambda since, open_: since >= s.interval  # noqa: E731
    return overlapping(start_P, grads, s, due, shares(s.weights))


def golden_diloco_eager(start_P, grads, s) -> Trace:
    q, w, theta = shares(s.weights), dict.fromkeys(AB, start_P), dict.fromkeys(AB, start_P)
    state, last, trace, steps = {i: {} for i in AB}, None, [], len(grads["a"])

    def sync():
        nonlocal last
        new = {i: theta[i] - w[i] for i in AB}
        for i in AB:
            eager = new[i] if last is None else mean(last, q) + q[i] * (new[i] - last[i])
            theta[i] = w[i] = theta[i] - outer(s.outer, state[i], eager)
        last = new

    for t in range(steps):
        for i in AB:
            w[i] = w[i] - LR * grads[i][t]
        if (t + 1) % s.interval == 0:
            sync()
        trace.append(dict(w))
    if last is not None:
        sync()
    return [*trace, dict.fromkeys(AB, mean(w, q))]


def golden_diloco_streaming(start_P, grads, s) -> Trace:
    q, w, anchor = shares(s.weights), {i: start_P.clone() for i in AB}, start_P.clone()
    cuts = [len(start_P) * n // s.fragments for n in range(s.fragments + 1)]
    if len(start_P) >= 16 * s.fragments:
        cuts = [c // 16 * 16 for c in cuts[:-1]] + [len(start_P)]
    state, pending, since, number, trace = {}, None, 0, 0, []

    def merge():
        nonlocal pending
        if pending is not None:
            part, change, sent = pending
            anchor[part] -= change
            for i in AB:
                if s.merge == "correct":
                    w[i][part] = anchor[part] + (w[i][part] - sent[i])
                else:
                    w[i][part] = s.alpha * w[i][part] + (1 - s.alpha) * anchor[part]
            pending = None

    for t in range(len(grads["a"])):
        for i in AB:
            w[i] = w[i] - LR * grads[i][t]
        since += 1
        if since >= s.tau:
            merge()
        gap = s.interval * (number + 1) // s.fragments - s.interval * number // s.fragments
        if since >= gap:
            part = slice(cuts[number], cuts[number + 1])
            delta = mean({i: anchor[part] - w[i][part] for i in AB}, q)
            sent = {i: w[i][part].clone() for i in AB}
            pending = part, outer(s.outer, state.setdefault(number, {}), delta), sent
            since, number = 0, (number + 1) % s.fragments
        trace.append({i: w[i].clone() for i in AB})
    merge()
    return [*trace, dict.fromkeys(AB, anchor - mean({i: anchor - w[i] for i in AB}, q))]


def golden_muloco(start_P, grads, s) -> Trace:
    state: dict = {}
    return blocking(
        start_P,
        grads,
        s.interval,
        shares(s.weights),
        lambda deltas, q: outer(s.outer, state, mean(deltas, q)),
    )


def golden_cocodc(start_P, grads, s) -> Trace:
    """Late fragments are corrected; the averager sends for the one that moves fastest."""
    q, w, anchor = shares(s.weights), {i: start_P.clone() for i in AB}, start_P.clone()
    size, parts = len(start_P), s.fragments
    cuts = [size * n // parts // 16 * 16 for n in range(parts)] + [size]
    if size < 16 * parts:
        cuts = [size * n // parts for n in range(parts + 1)]
    every = max(parts, int(s.utilization * s.interval / s.tau))
    state, pending, since, sends, chosen, trace = {}, None, 0, 0, 0, []
    history: list[tuple[int, float]] = []  # fragment and length of its change, by exchange

    def merge():
        nonlocal pending
        if pending is None:
            return
        part, change, sent = pending
        anchor[part] -= change
        for i in AB:
            d = w[i][part] - sent[i]
            c = torch.zeros_like(d)
            if d.abs().max() > 0:
                c = (s.compensation * d**2 / (d**2).mean()).clamp(max=1)
            w[i][part] = anchor[part] + d - c * (anchor[part] - sent[i])
        pending = None

    def choose() -> int:
        now = len(history)
        last = {p: max((k for k in range(now) if history[k][0] == p), default=None)
                for p in range(parts)}  # fmt: skip
        for p in range(parts):
            if last[p] is None:
                return p
        late = min(range(parts), key=lambda p: last[p])
        if now - last[late] >= every:
            return late

        def speed(p: int) -> float:
            earlier = [k for k in range(last[p]) if history[k][0] == p]
            return history[last[p]][1] / (last[p] - (earlier[-1] if earlier else -1))

        return max(range(parts), key=speed)

    for t in range(len(grads["a"])):
        for i in AB:
            w[i] = w[i] - LR * grads[i][t]
        since += 1
        if since >= s.tau:
            merge()
        turn = sends % every
        gap = s.interval * (turn + 1) // every - s.interval * turn // every
        if since >= gap:
            part = slice(cuts[chosen], cuts[chosen + 1])
            delta = mean({i: anchor[part] - w[i][part] for i in AB}, q)
            change = outer(s.outer, state.setdefault(chosen, {}), delta)
            pending = part, change, {i: w[i][part].clone() for i in AB}
            history.append((chosen, float(change.norm())))
            since, sends, chosen = 0, sends + 1, choose()
        trace.append({i: w[i].clone() for i in AB})
    merge()
    return [*trace, dict.fromkeys(AB, anchor - mean({i: anchor - w[i] for i in AB}, q))]
