"""The rules of asynchronous strategies in plain float64 tensors: what traces must equal.

As in `golden_rounds`. Region a steps before b; the averager's side is exact about who knows what.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor

from tests.support.golden_rounds import AB, LAG, LR, Grads, Trace, outer, shares

SAMPLES = {"a": 16, "b": 8}


def factor(s, lag: int) -> float:
    c = s.staleness
    if c.weight in ("sqrt", "poly"):
        return (1 + lag) ** -(0.5 if c.weight == "sqrt" else c.a)
    if c.weight == "hinge":
        return 1.0 if lag <= c.b else 1 / (c.a * (lag - c.b) + 1)
    return 1.0 if c.weight == "none" else 1 / (1 + lag)


class Hub:
    """The global model, its versions, and what each region was given."""

    def __init__(self, start_P: Tensor) -> None:
        self.now, self.version = start_P, 0
        self.given, self.at = dict.fromkeys(AB, start_P), dict.fromkeys(AB, 0)
        self.rows: dict[str, int] = {}

    def relative(self, s, i: str, rows: int) -> float:
        self.rows[i] = rows
        return rows * len(self.rows) / sum(self.rows.values()) if s.weights == "samples" else 1.0

    def step(self, change: Tensor) -> None:
        self.now, self.version = self.now - change, self.version + 1

    def give(self, i: str) -> Tensor:
        self.given[i], self.at[i] = self.now, self.version
        return self.now


def turns(start_P: Tensor, grads: Grads, interval: int, take_in) -> Trace:
    """Who has done its local steps speaks, is answered at once, and goes on from the answer."""
    averager, w, since, trace = Hub(start_P), dict.fromkeys(AB, start_P), dict.fromkeys(AB, 0), []
    for t in range(len(grads["a"])):
        for i in AB:
            w[i], since[i] = w[i] - LR * grads[i][t], since[i] + 1
            if since[i] == interval:
                take_in(averager, i, w[i], SAMPLES[i] * interval)
                w[i], since[i] = averager.give(i), 0
        trace.append(dict(w))
    for i in AB:
        if since[i]:
            take_in(averager, i, w[i], SAMPLES[i] * since[i])
    return [*trace, dict.fromkeys(AB, averager.now)]


def golden_fedasync(start_P, grads, s) -> Trace:
    def take_in(averager, i, w, rows):
        share = (
            s.alpha * factor(s, averager.version - averager.at[i]) * averager.relative(s, i, rows)
        )
        averager.step(min(share, 1.0) * (averager.now - w))

    return turns(start_P, grads, s.interval, take_in)


def delayed(config, state: dict, g: Tensor, senders: int) -> Tensor:
    period = config.period or senders
    state["s"] = state.get("s", 0.0) + g
    state["i"] = state.get("i", 0) + 1
    if state["i"] % period:
        return config.lr * g / period
    state["m"] = config.momentum * state.get("m", 0.0) + state.pop("s") / period
    return config.lr * (config.momentum * state["m"] + g / period)


def golden_async_local_sgd(start_P, grads, s) -> Trace:
    state: dict = {}

    def take_in(averager, i, w, rows):
        g = factor(s, averager.version - averager.at[i]) * (averager.given[i] - w)
        averager.step(delayed(s.outer, state, g * averager.relative(s, i, rows), 2))

    return turns(start_P, grads, s.interval, take_in)


def golden_dc_asgd(start_P, grads, s) -> Trace:
    averager, w, trace = Hub(start_P), dict.fromkeys(AB, start_P), []
    total, count, square, state = dict.fromkeys(AB, 0.0), dict.fromkeys(AB, 0), None, {}

    def take_in(i):
        nonlocal square
        g = total[i] / count[i]
        square = g * g if square is None else s.decay * square + (1 - s.decay) * g * g
        slope = s.compensation * g * g / (square.sqrt() + 1e-7 if s.adaptive else 1.0)
        g = g + slope * (averager.now - averager.given[i])
        averager.step(outer(s.outer, state, factor(s, averager.version - averager.at[i]) * g))
        total[i], count[i] = 0.0, 0

    for t in range(len(grads["a"])):
        for i in AB:
            total[i], count[i] = total[i] + grads[i][t], count[i] + 1
            if count[i] == s.interval:
                take_in(i)
                w[i] = averager.give(i)
        trace.append(dict(w))
    for i in AB:
        if count[i]:
            take_in(i)
    return [*trace, dict.fromkeys(AB, averager.now)]


def golden_halos(start_P, grads, s) -> Trace:
    averager, zero = Hub(start_P), torch.zeros_like(start_P)
    w, anchor = dict.fromkeys(AB, start_P), dict.fromkeys(AB, start_P)
    sent, answer, state, own = {}, {}, {}, {i: {} for i in AB}
    since, age, trace = dict.fromkeys(AB, 0), dict.fromkeys(AB, 0), []

    def outgoing(i):
        weight = factor(s, averager.version - averager.at[i]) * averager.relative(
            s, i, SAMPLES[i] * since[i]
        )
        if since[i]:
            averager.step(delayed(s.outer, state, weight * (anchor[i] - w[i]), 2))
        sent[i], since[i], age[i] = w[i], 0, 0

    def hear(i):
        if i not in answer:
            return
        theta = answer.pop(i)
        if s.in_flight == "paper":
            w[i] = anchor[i] = (1 - s.alpha) * w[i] + s.alpha * theta
        else:
            pending = sent[i] - w[i]
            anchor[i] = (1 - s.alpha) * sent[i] + s.alpha * theta
            w[i] = anchor[i] - pending

    for t in range(len(grads["a"])):
        for i in AB:
            w[i] = w[i] - delayed(s.local, own[i], grads[i][t] + zero, 1)
            since[i], age[i] = since[i] + 1, age[i] + 1
            if age[i] >= LAG:
                hear(i)
            if since[i] >= s.interval and i not in answer:
                outgoing(i)
                answer[i] = averager.give(i)
        trace.append(dict(w))
    for i in AB:
        hear(i)
    for i in AB:
        outgoing(i)
    return [*trace, dict.fromkeys(AB, averager.now)]


def golden_gaia(start_P, grads, s) -> Trace:
    share = 0.5 if s.combine == "mean" else 1.0
    zero = torch.zeros_like(start_P)
    w, base = dict.fromkeys(AB, start_P), dict.fromkeys(AB, start_P)
    outbox, answer = dict.fromkeys(AB, zero), {}
    since, age, trace = dict.fromkeys(AB, 0), dict.fromkeys(AB, 0), []

    def outgoing(i, change):
        j = "b" if i == "a" else "a"
        outbox[j] = outbox[j] + share * change
        outbox[i] = outbox[i] - (1 - share) * change
        base[i], since[i], age[i] = base[i] - change, 0, 0

    def hear(i):
        came = answer.pop(i, zero)
        w[i], base[i] = w[i] - came, base[i] - came

    for t in range(len(grads["a"])):
        for i in AB:
            w[i] = w[i] - LR * grads[i][t]
            since[i], age[i] = since[i] + 1, age[i] + 1
            if age[i] >= LAG:
                hear(i)
            if since[i] >= s.interval and i not in answer:
                change, limit = base[i] - w[i], s.threshold / (t + 1) ** 0.5 * w[i].abs()
                outgoing(i, torch.where(change.abs() > limit, change, 0.0))
                answer[i], outbox[i] = outbox[i], zero
        trace.append(dict(w))
    for i in AB:
        hear(i)
        outgoing(i, base[i] - w[i])
    return [*trace, {i: w[i] - outbox[i] for i in AB}]


def golden_fedavg(start_P, grads, s) -> Trace:
    """Two sites: the first round takes both, then both or one, by the draw."""
    averager, w, state = Hub(start_P), dict.fromkeys(AB, start_P), {}
    chosen, since, rests, trace = set(AB), dict.fromkeys(AB, 0), set(), []
    q = shares(s.weights)

    def close(everybody=False):
        nonlocal chosen
        fresh = [i for i in AB if i in waiting and i not in rests and since[i]]
        if fresh:
            total = sum(q[i] for i in fresh)
            deltas = [q[i] / total * (averager.given[i] - w[i]) for i in fresh]
            averager.step(outer(s.outer, state, sum(deltas)))
        count = 2 if everybody else max(1, -int(-s.fraction * 2 // 1))
        chosen = set(random.Random(f"{s.seed}/{averager.version}").sample(AB, count))
        for i in waiting - chosen:
            rests.add(i)
        for i in waiting & chosen:
            rests.discard(i)
            w[i], since[i] = averager.give(i), 0
        waiting.difference_update(chosen)

    waiting: set[str] = set()
    for t in range(len(grads["a"])):
        for i in AB:
            if i in waiting:
                continue
            w[i], since[i] = w[i] - LR * grads[i][t], since[i] + 1
            if since[i] == s.interval:
                waiting.add(i)
                if chosen <= waiting:
                    close()
        trace.append(dict(w))
    if waiting:
        close(everybody=True)
    waiting.update(AB)
    close(everybody=True)
    return [*trace, dict.fromkeys(AB, averager.now)]


def golden_fedat(start_P, grads, s) -> Trace:
    """Two sites of unknown speed: one tier, until both have spoken twice; then one each, if so."""
    averager, w = Hub(start_P), dict.fromkeys(AB, start_P)
    models: dict[int, Tensor] = {}
    counts: dict[int, int] = {}
    tiers, spoken, is_sorted = dict.fromkeys(AB, 0), dict.fromkeys(AB, 0), False
    since, waiting, trace = dict.fromkeys(AB, 0), set(), []
    q = shares(s.weights)

    def close(m):
        inside = [i for i in AB if i in waiting and tiers[i] == m and since[i]]
        if not inside:
            return
        models[m] = sum(q[i] * w[i] for i in inside) / sum(q[i] for i in inside)
        counts[m] = counts.get(m, 0) + 1
        known = sorted(models)
        weights = [counts[k] for k in reversed(known)]
        mixed = sum(c * models[k] for c, k in zip(weights, known, strict=True)) / sum(weights)
        averager.step(averager.now - mixed)

    def sort():
        nonlocal tiers, is_sorted
        if not is_sorted and min(spoken.values()) >= 2:
            tiers, is_sorted = {"a": 0, "b": min(s.tiers, 2) - 1}, True
            models.clear()
            counts.clear()

    def go_on(who):
        for i in who:
            w[i], since[i] = averager.give(i), 0
        waiting.difference_update(who)

    for t in range(len(grads["a"])):
        for i in AB:
            w[i], since[i] = w[i] - LR * grads[i][t], since[i] + 1
            if since[i] < s.interval:
                continue
            waiting.add(i)
            spoken[i] += 1
            if len(waiting) == 2:
                sort()
            full = [m for m in set(tiers.values()) if {j for j in AB if tiers[j] == m} <= waiting]
            for m in full:
                close(m)
            go_on({j for j in AB if tiers[j] in full})
        trace.append(dict(w))
    waiting.update(AB)
    spoken = {i: spoken[i] + 1 for i in AB}
    sort()
    for m in sorted(set(tiers.values())):
        close(m)
    return [*trace, dict.fromkeys(AB, averager.now)]


def golden_fedgsync(start_P, grads, s) -> Trace:
    """Two sites are one group: the first round waits for both, later ones for either."""
    averager, w, state = Hub(start_P), dict.fromkeys(AB, start_P), {}
    last, since, waiting = torch.zeros_like(start_P), dict.fromkeys(AB, 0), []
    grouped, trace = False, []

    def close():
        nonlocal last
        lags = {i: averager.version - averager.at[i] for i in waiting}
        used = [i for i in waiting if since[i] and (s.max_lag is None or lags[i] <= s.max_lag)]
        a = {i: 1 / (1 + lags[i]) for i in used}
        deltas = [a[i] * (averager.given[i] - w[i]) for i in used]
        last = max(a.values()) * sum(deltas) / sum(a.values()) if used else s.absent * last
        averager.step(outer(s.outer, state, last))
        for i in waiting:
            w[i], since[i] = averager.give(i), 0
        waiting.clear()

    for t in range(len(grads["a"])):
        for i in AB:
            w[i], since[i] = w[i] - LR * grads[i][t], since[i] + 1
            if since[i] == s.interval:
                waiting.append(i)
                if grouped or len(waiting) == 2:
                    grouped = True
                    close()
        trace.append(dict(w))
    waiting.extend(AB)
    close()
    return [*trace, dict.fromkeys(AB, averager.now)]


def golden_decoupled(start_P, grads, s) -> Trace:
    w, base = {i: start_P.clone() for i in AB}, {i: start_P.clone() for i in AB}
    now, num = start_P.clone(), len(start_P)
    cuts = [num * n // s.fragments for n in range(s.fragments + 1)]
    if num >= 16 * s.fragments:
        cuts = [c // 16 * 16 for c in cuts[:-1]] + [num]
    parts = [slice(*cuts[n : n + 2]) for n in range(s.fragments)]
    state: dict = {n: {} for n in range(s.fragments)}
    number, since, age = dict.fromkeys(AB, 0), dict.fromkeys(AB, 0), dict.fromkeys(AB, 0)
    held, answer, sent, trace = {}, {}, {}, []

    def fire(n):
        who = [i for i in AB if i in held and held[i][0] == n]
        weight = {i: held[i][2] ** 2 for i in who}
        rel = {i: weight[i] / sum(weight.values()) for i in who}
        if s.merge == "mean":
            total = sum(rel[i] * held[i][1] for i in who)
        else:
            total = sum(rel[i] * held[i][1] / held[i][1].norm() for i in who)
            total = total / total.norm() * sum(rel[i] * held[i][1].norm() for i in who)
        now[parts[n]] -= outer(s.outer, state[n], total)
        for i in who:
            answer[i] = n, now[parts[n]].clone()
            del held[i]

    def hear(i):
        if i in answer:
            n, theta = answer.pop(i)
            base[i][parts[n]] = theta
            done = sent[i] - w[i][parts[n]]
            w[i][parts[n]] = s.alpha * sent[i] + (1 - s.alpha) * theta - done

    for t in range(len(grads["a"])):
        for i in AB:
            w[i] = w[i] - LR * grads[i][t]
            since[i], age[i] = since[i] + 1, age[i] + 1
            if age[i] >= LAG:
                hear(i)
            if since[i] >= max(1, s.interval // s.fragments) and i not in answer and i not in held:
                part = parts[number[i]]
                sent[i] = w[i][part].clone()
                held[i] = number[i], base[i][part] - w[i][part], SAMPLES[i] * since[i]
                number[i], since[i], age[i] = (number[i] + 1) % s.fragments, 0, 0
                if sum(h[0] == held[i][0] for h in held.values()) >= min(s.quorum, 2):
                    fire(held[i][0])
        trace.append({i: w[i].clone() for i in AB})
    for n in sorted({h[0] for h in held.values()}):
        fire(n)
    for i in AB:
        hear(i)
    return [*trace, dict.fromkeys(AB, now - sum((base[i] - w[i]) / 2 for i in AB))]
