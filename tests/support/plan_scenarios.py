"""Random small jobs, prices and links, for tests that enumerate all their plans."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tests.support.plan_enumerator import Enumerated, Question

NOW = {"source": "a seed", "fetched_at": "2026-11-20T00:00:00Z", "valid_for_s": 1e9}
RATES = [
    {"currency": "EUR", "usd": 1.5, "on": "2026-01-02", "source": "a bank"},
    {"currency": "EUR", "usd": 1.1, "on": "2026-11-20", "source": "a bank"},
    {"currency": "CNY", "usd": 0.14, "on": "2026-11-20", "source": "a bank"},
]


# What the page says of each strategy that is tried, for the enumerator.
STRATEGIES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"kind": "diloco"}, {}),
    ({"kind": "sma"}, {"first_in_full": True}),
    (
        {"kind": "async_local_sgd", "by_speed": False},
        {"last": "always", "synchronous": False, "one_by_one": True},
    ),
    (
        {"kind": "async_local_sgd"},
        {"last": "always", "synchronous": False, "one_by_one": True, "by_speed": True},
    ),
    ({"kind": "one_step_delay"}, {"blocking": "when_late", "last": "always"}),
    (
        {"kind": "diloco_streaming", "fragments": 2, "tau": 1},
        {"blocking": "when_late", "last": "always", "fragments": 2, "hidden_steps": 1},
    ),
    (
        {"kind": "asgd_ga"},
        {"blocking": "never", "last": "always", "synchronous": False, "one_by_one": True},
    ),
    (
        {"kind": "asgd_ga", "staleness": {"bound": 2}},
        {"blocking": "never", "last": "always", "bound": 2, "one_by_one": True},
    ),
]


def prices_of(rng: random.Random, names: list[str], tiers: bool) -> list[dict[str, Any]]:
    """Every region is in some cloud; two may be in the same."""
    found = []
    shared = age_tiers(rng)
    for name in names:
        currency = rng.choice(["USD", "USD", "EUR", "CNY"])
        place = {"cloud": cloud_of(name), "region": f"at-{name}", "currency": currency, **NOW}
        for i in range(3):
            price = rng.choice([5, 10, 20]) * rng.uniform(0.02, 0.06)
            for market, share in (("on_demand", 1.0), ("spot", rng.uniform(0.3, 1.0))):
                record = {**place, "type": f"t{i}", "market": market, "unit": "hour"}
                record["amount"] = price * share
                if tiers and market == "on_demand":
                    record["age_tiers"] = shared if rng.random() < 0.6 else age_tiers(rng)
                if rng.random() < 0.05:
                    record["availability"] = "none"
                found.append(record)
        found.append({**place, "item": "disk", "type": "ssd", "unit": "GB-month", "amount": 0.1})
        out = {**place, "item": "egress", "unit": "GB", "amount": rng.choice([2.0, 9.0])}
        found.append({**out, "to": "internet"})
        found.append({**out, "to": "*", "unit": "Mbps-month", "amount": rng.uniform(100, 900)})
    return found


def cloud_of(name: str) -> str:
    return "hall" if name in ("a", "b") else "cellar"


def age_tiers(rng: random.Random) -> list[dict[str, float]]:
    edges = sorted(rng.uniform(0.1, 6) for _ in range(rng.randint(1, 3)))
    factors = sorted((rng.uniform(0.2, 0.95) for _ in edges), reverse=True)
    if rng.random() < 0.1:  # an old machine may cost more
        factors[-1] = 1.2
    return [{"after_h": e, "factor": f} for e, f in zip(edges, factors, strict=True)]


def scenario(rng: random.Random, tiers: bool) -> tuple[dict[str, Any], Question]:
    """Return a configuration without limits, and the same for the enumerator."""
    names = ["a", "b", "c"][: rng.choice([2, 2, 2, 3])]
    strategy, behaves = rng.choice(STRATEGIES)
    places = {}
    for name in names:
        kinds = rng.sample(range(3), 2 if len(names) == 2 else 1)
        machines = [
            {
                "type": f"t{i}",
                "cap": rng.randint(1, 2),
                "rows_per_s": rng.uniform(2, 12),
                "markets": rng.choice([["on_demand"], ["spot"], ["on_demand", "spot"]]),
            }
            for i in kinds
        ]
        places[name] = {
            "cloud": cloud_of(name),
            "at": f"at-{name}",
            "rows": rng.choice([1000, 2000, 3500]),
            "machines": machines,
        }
        if rng.random() < 0.5:
            places[name] |= {"disk": "ssd", "disk_gb": rng.choice([100, 500])}
        if rng.random() < 0.5:
            places[name]["server"] = "t0"
    residency = {}
    if rng.random() < 0.3:
        residency[rng.choice(["gradients", "checkpoints"])] = {names[0]: names[:2]}
    plan = {
        "regions": places,
        "residency": residency,
        "objective": rng.choice(["cost", "cost", "time"]),
        "loss_budget": rng.choice([0.02, 0.05]),
        "intervals": rng.sample([4, 16, 33, 64], 2),
        "codecs": rng.sample([None, "fp16", "int8", "int4", "chunked_topk"], 2),
        "spot": {"preemptions_per_h": rng.choice([0.0, 0.05, 1.0]), "lost_s": 180},
        "startup_s": rng.choice([0, 120]),
        "step_overhead_s": rng.choice([0.0, 0.05]),
        "lan_s_per_machine": rng.choice([0.0, 0.03]),
    }
    config = {
        "name": "random",
        "task": {"use": "bytelm", "options": {"dim": 16, "layers": 1, "heads": 1, "context": 8}},
        "data": {"generate": {}, "batch_size": rng.randint(2, 7)},
        "optimizer": {"kind": "sgd", "lr": 0.1},
        "regions": [{"name": name, "workers": rng.randint(1, 2)} for name in names],
        "strategy": {**strategy, "interval": 16},
        "train": {"steps": rng.choice([1, 64]) * rng.randint(2, 140)},
        "plan": plan,
    }
    prices = prices_of(rng, names, tiers)
    links = {
        (src, dst): (10 ** rng.uniform(-2, 1), rng.uniform(0.02, 0.3))
        for src in names
        for dst in names
        if src != dst
    }
    return config, Question(config, prices, RATES, links, 0, **behaves)


def with_own_networks(rng: random.Random, config: dict[str, Any]) -> None:
    """Give every machine type its own network and, for some, its memory."""
    plan = config["plan"]
    del plan["lan_s_per_machine"]
    is_tight = rng.random() < 0.3
    if is_tight:
        plan["activation_mb_per_row"] = 1.0
    for place in plan["regions"].values():
        for machine in place["machines"]:
            machine["cap"] = rng.randint(1, 3)
            machine["rows_per_s"] = rng.choice([4, 12, 40]) * rng.uniform(0.7, 1.3)
            machine["network_gbps"] = 10 ** rng.uniform(-3.3, -1.3)
            machine["accelerators"] = rng.choice([0, 1, 1, 2])
            if is_tight:
                machine["host_gb"] = rng.choice([0.0035, 0.0085, 1.0])
                machine["accelerator_gb"] = rng.choice([0.0025, 0.0065, 1.0])
    config["train"]["optimizer_on"] = rng.choice(["auto", "auto", "server", "worker"])
    config["train"]["state_every"] = rng.choice([1, 3, 20, 100])
    config["optimizer"]["kind"] = rng.choice(["sgd", "momentum", "adamw"])


def links_file(question: Question, path: Path) -> Path:
    links = [
        {
            "src": src,
            "dst": dst,
            "goodput_mbps": mbps,
            "rtt_s": rtt_s,
            "samples": 1,
            "measured_at_unix_s": 0,
        }
        for (src, dst), (mbps, rtt_s) in question.links.items()
    ]
    path.write_text(json.dumps({"version": 1, "links": links}))
    return path


def limits_of(rng: random.Random, plans: list[Enumerated]) -> dict[str, float]:
    """Return a deadline, a budget, both or none: between existing plans, or below all of them."""
    found = {}
    if rng.random() < 0.6:
        seconds = sorted(plan.seconds for plan in plans)
        found["deadline_h"] = rng.choice(seconds[: len(seconds) // 2 + 1]) / 3600
    if rng.random() < 0.5:
        dollars = sorted(plan.usd for plan in plans)
        found["budget_usd"] = rng.choice(dollars[: len(dollars) // 2 + 1])
    factor = rng.choice([1 + 1e-7, 1 + 1e-7, 1.02, 0.9, 0.5])
    return {key: value * factor for key, value in found.items()}
