"""Updates that take turns, between real bridges over real sockets."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from geo_ray.experiment.experiment import Experiment
from geo_ray.storage.folders import directory_of
from geo_ray.transport.wire.message import Message
from tests.support.region_support import InProcess, experiment_of, transfers_of

REGIONS = [{"name": name} for name in ("us-east", "eu-west", "ap-south", "sa-east")]
MORE = [*REGIONS, {"name": "af-south"}, {"name": "me-west"}]
SLOW = {"link": {"rate_mbps": 0.2, "delay_s": 0.002}}
PLAIN_SGD = {"kind": "sgd", "lr": 0.05}


def experiment(**changes: Any) -> Experiment:
    sections: dict[str, Any] = {
        "regions": REGIONS,
        "strategy": {"kind": "asgd_ga", "interval": 2, "wait": "always"},
        "optimizer": PLAIN_SGD,
        "train": {"steps": 12, "eval_every": 0},
        "transfers": {"small_bytes": 0, "averager_mbps": 100.0},
    }
    return experiment_of(**(sections | changes))


def params_of(world: InProcess) -> dict[str, torch.Tensor]:
    return {
        name: torch.cat([shard.params_S for shard in site.shards])
        for name, site in world.sites.items()
    }


def messages_of(world: InProcess) -> Counter[str]:
    """Counts messages that bridges receive from now on, by kind."""
    heard: Counter[str] = Counter()
    for site in world.sites.values():
        assert site.bridge is not None
        for kind, route in list(site.bridge._routes.items()):

            def counted(peer: str, message: Message, route=route) -> None:
                heard[message.kind] += 1
                route(peer, message)

            site.bridge._routes[kind] = counted
    return heard


def always_ask(world: InProcess) -> None:
    """Prevent sending before a first grant; otherwise an idle averager is not asked."""
    for site in world.sites.values():
        transfers_of(site)._open = False


def let_sums_be_worth_it(world: InProcess) -> None:
    """As if links had been measured: that to the averager slow, those between others fast."""
    always_ask(world)
    uploads = transfers_of(world.sites["us-east"]).uploads
    uploads.seed({region["name"]: 0.2 for region in MORE})
    uploads._line.into_mbps |= {region["name"]: 1000.0 for region in MORE}


def check_all_agree(world: InProcess) -> None:
    world.check_books()
    params = params_of(world)
    for name in params:
        torch.testing.assert_close(params[name], params["us-east"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("order", ["fifo", "shortest_first"])
@pytest.mark.parametrize(
    "strategy",
    [
        {"kind": "asgd", "wait": "always"},
        {"kind": "asgd_ga", "interval": 2, "wait": "never"},
        {"kind": "ama", "interval": 2},
    ],
    ids=lambda s: s["kind"],
)
def test_all_regions_end_equal(tmp_path: Path, strategy: dict[str, Any], order: str) -> None:
    turns = {"small_bytes": 0, "averager_mbps": 100.0, "order": order}
    with InProcess(experiment(strategy=strategy, transfers=turns), tmp_path) as world:
        heard = messages_of(world)
        always_ask(world)
        world.run()
        check_all_agree(world)
        assert heard["ask"] == heard["update"] > 0
        assert 0 < heard["grant"] <= heard["ask"]


def test_small_updates_do_not_wait_for_a_grant(tmp_path: Path) -> None:
    turns = {"small_bytes": 1 << 30, "averager_mbps": 100.0}
    with InProcess(experiment(transfers=turns), tmp_path) as world:
        heard = messages_of(world)
        world.run()
        check_all_agree(world)
        assert heard["update"] > 0 and heard["grant"] == 0


def test_no_update_exceeds_the_staleness_bound_and_dropped_ones_come_later(
    tmp_path: Path,
) -> None:
    turns = {"small_bytes": 0, "averager_mbps": 100.0, "max_staleness": 1}
    with InProcess(experiment(transfers=turns), tmp_path) as world:
        world.run()
        check_all_agree(world)
        events = [e for site in world.sites.values() for e in site.event_buffer.take(100_000)]
        taken = [e for e in events if e["kind"] == "exchange"]
        # Final updates are always taken, and all at once.
        last = {site.server.plan.region: site.server.seq for site in world.sites.values()}
        stale = [e["staleness"] for e in taken if e["seq"] < last[e["region"]]]
        assert stale and max(stale) <= 1
        assert [e for e in events if e["kind"] == "update_dropped"]


def test_updates_are_summed_on_the_way_and_all_regions_end_equal(tmp_path: Path) -> None:
    turns = {"small_bytes": 0, "averager_mbps": 0.2, "aggregate": True}
    asked = experiment(regions=MORE, transfers=turns, emulate=SLOW)
    with InProcess(asked, tmp_path) as world:
        heard = messages_of(world)
        let_sums_be_worth_it(world)
        world.run()
        check_all_agree(world)
        assert heard["sum"] > 0 and heard["transfer_part"] > 0
        assert heard["bundle"] > 0 and heard["bundled"] > 0


def test_a_checkpoint_with_sums_is_of_one_moment(tmp_path: Path) -> None:
    turns = {"small_bytes": 0, "averager_mbps": 0.2, "aggregate": True, "max_staleness": 8}
    asked = experiment(regions=MORE, transfers=turns, emulate=SLOW)
    with InProcess(asked, tmp_path) as world:
        let_sums_be_worth_it(world)
        stopped = threading.Event()
        begun = []

        def ask_for_checkpoints() -> None:
            # Only some: a checkpoint takes final updates for ordinary ones, which are sent again.
            for number in range(1, 6):
                if stopped.wait(0.1):
                    return
                directory_of(world.parts, number).mkdir(parents=True, exist_ok=True)
                if world.sites["us-east"].bridge.path.request_checkpoint(number, halt=False):
                    begun.append(number)

        asker = threading.Thread(target=ask_for_checkpoints)
        asker.start()
        try:
            world.run()
        finally:
            stopped.set()
            asker.join()
        check_all_agree(world)
        saved: Counter[int] = Counter()
        for site in world.sites.values():
            for event in site.event_buffer.take(100_000):
                if event["kind"] == "parts":
                    saved[event["id"]] += len(event["parts"])
        assert begun and max(saved.values()) == len(MORE) + 1
