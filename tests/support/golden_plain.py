"""The rules of the plain strategies in float64 tensors; see `golden_rounds` for the conditions."""

from __future__ import annotations

import torch

from tests.support.golden_rounds import LAG, LR, Trace


def golden_bsp(start_P, grads, strategy) -> Trace:
    q = {"a": 2 / 3, "b": 1 / 3} if strategy.weights == "samples" else {"a": 0.5, "b": 0.5}
    w, trace = start_P, []
    for t in range(len(grads["a"])):
        w = w - LR * sum(q[i] * grads[i][t] for i in q)
        trace.append({"a": w, "b": w})
    return [*trace, trace[-1]]


def golden_sma(start_P, grads, strategy) -> Trace:
    q = {"a": 2 / 3, "b": 1 / 3} if strategy.weights == "samples" else {"a": 0.5, "b": 0.5}
    w, trace = dict.fromkeys(q, start_P), []
    for t in range(len(grads["a"])):
        w = {i: w[i] - LR * grads[i][t] for i in q}
        if (t + 1) % strategy.interval == 0:
            w = dict.fromkeys(q, sum(q[i] * w[i] for i in q))
        trace.append(w)
    return [*trace, dict.fromkeys(q, sum(q[i] * w[i] for i in q))]


def golden_additive(start_P, grads, interval, wait, combine) -> Trace:
    share = 0.5 if combine == "mean" else 1.0
    zero_P = torch.zeros_like(start_P)
    w, total = dict.fromkeys("ab", start_P), dict.fromkeys("ab", zero_P)  # total: A_i
    outbox, answer = dict.fromkeys("ab", zero_P), {}
    since, age, trace = dict.fromkeys("ab", 0), dict.fromkeys("ab", 0), []

    def outgoing(i):
        j = "b" if i == "a" else "a"
        outbox[j] = outbox[j] + share * total[i]
        outbox[i] = outbox[i] - (1 - share) * total[i]  # at home it counted in full
        total[i], since[i] = zero_P, 0

    def hear(i):
        w[i] = w[i] - answer.pop(i, zero_P)

    for t in range(len(grads["a"])):
        for i in "ab":
            w[i], total[i] = w[i] - LR * grads[i][t], total[i] + LR * grads[i][t]
            since[i], age[i] = since[i] + 1, age[i] + 1
            due = since[i] >= interval
            if age[i] >= LAG or (due and wait == "when_busy"):
                hear(i)
            if due and i not in answer:
                outgoing(i)
                answer[i], outbox[i], age[i] = outbox[i], zero_P, 0
                if wait == "always":
                    hear(i)
        trace.append(dict(w))
    for i in "ab":
        hear(i)
        outgoing(i)
    for i in "ab":
        w[i] = w[i] - outbox[i]
    return [*trace, w]


def golden_asgd(start_P, grads, strategy) -> Trace:
    return golden_additive(start_P, grads, 1, strategy.wait, strategy.combine)


def golden_asgd_ga(start_P, grads, strategy) -> Trace:
    return golden_additive(start_P, grads, strategy.interval, strategy.wait, strategy.combine)


def golden_ama(start_P, grads, strategy) -> Trace:
    version, at = 0, {}
    w, snapshot, newest, answer = dict.fromkeys("ab", start_P), {}, {}, {}
    since, age, trace = dict.fromkeys("ab", 0), dict.fromkeys("ab", 0), []

    def hear(i):
        if i in answer:
            w[i] = w[i] + strategy.alpha * (answer.pop(i) - snapshot[i])

    for t in range(len(grads["a"])):
        for i in "ab":
            w[i] = w[i] - LR * grads[i][t]
            since[i], age[i] = since[i] + 1, age[i] + 1
            if age[i] >= LAG:
                hear(i)
            if since[i] >= strategy.interval and i not in answer:
                snapshot[i] = newest[i] = w[i]
                version += 1
                at[i] = version
                inverse = strategy.staleness.weight == "inverse"
                q = {j: 1 / (1 + version - at[j]) if inverse else 1.0 for j in newest}
                answer[i] = sum(q[j] * newest[j] for j in q) / sum(q.values())
                since[i] = age[i] = 0
        trace.append(dict(w))
    for i in "ab":
        hear(i)
    return [*trace, dict.fromkeys("ab", (w["a"] + w["b"]) / 2)]
