"""The regions of `dgt.py` as processes in the WAN lab, or beside each other on emulated links."""

from __future__ import annotations

import base64
import json
import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from benchmarks.codecs.dgt_runs import CLIENTS, DELAY_S, RATE_MBPS, SERVER
from benchmarks.common.node_process import NodeProcess
from geo_ray.lab.lab import Lab
from geo_ray.lab.stats import LabStats
from geo_ray.lab.topology import Topology
from geo_ray.transport.security.certs import issue_for_run

NODE = Path(__file__).resolve().parent / "dgt_node.py"
PORT = 4800


class Sites:
    """All regions, and the links between them."""

    def __init__(self, sites: dict[str, NodeProcess], lab: Lab | None) -> None:
        self._sites = sites
        self._lab = lab
        self._pool = ThreadPoolExecutor(len(sites))
        self._number = 0

    def lose(self, loss: float) -> None:
        """Let the lab's links lose packets from now on."""
        if self._lab is not None:
            self._lab.set("*", "*", delay_s=DELAY_S, loss=loss)

    def reset(self) -> None:
        """Let the lab's counters begin anew."""
        if self._lab is not None:
            self._lab.reset()

    def stats(self) -> LabStats | None:
        """The lab's counters; None if there is no lab."""
        return None if self._lab is None else self._lab.stats()

    def train(self, experiment: dict[str, Any], manifest: str) -> dict[str, dict[str, Any]]:
        """One training; what every region tells of it."""
        self._number += 1
        order = {
            "experiment": experiment,
            "manifest": manifest,
            "run": f"run-{self._number}",
            "port": PORT + self._number if self._lab is not None else 0,
            "origin_unix_s": time.time(),
        }
        hosts = (
            dict.fromkeys(self._sites, "127.0.0.1") if self._lab is None else self._lab.addresses
        )
        opened = self._all("open", {r: order | {"host": hosts[r]} for r in self._sites})
        address = opened[SERVER]["address"]
        self._all("connect", {r: {"address": address} for r in self._sites})
        answers = self._all("train", {r: {} for r in self._sites})
        self._all("close", {r: {} for r in self._sites})
        return answers

    def _all(self, do: str, orders: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        asked = {r: self._pool.submit(self._sites[r].ask, do, **o) for r, o in orders.items()}
        return {region: answer.result() for region, answer in asked.items()}


@contextmanager
def fleet(emulated: bool) -> Iterator[Sites]:
    """Start every region's process, in the lab or beside each other."""
    regions = (SERVER, *CLIENTS)
    key = base64.b64encode(secrets.token_bytes(32)).decode()
    certificates = {} if emulated else issue_for_run("bench", regions)
    line = {"rate_mbps": RATE_MBPS, "queue_bytes": int(RATE_MBPS * 1e6 / 8 * 0.2)}
    topology = {
        "regions": [{"name": SERVER, "up": line, "down": line}, *({"name": r} for r in CLIENTS)],
        "link": {"delay_s": DELAY_S},
    }
    lab_of = Lab(Topology.model_validate_json(json.dumps(topology))) if not emulated else None
    with lab_of or nullcontext() as lab:
        sites: dict[str, NodeProcess] = {}
        try:
            for region in regions:
                own = certificates.get(region)
                pem = own and [
                    base64.b64encode(part).decode()
                    for part in (own.ca_pem, own.cert_pem, own.key_pem)
                ]
                hello = {"region": region, "key": key, "certificate": pem}
                sites[region] = NodeProcess(NODE, region, hello, lab)
            yield Sites(sites, lab)
        finally:
            for site in sites.values():
                site.end()
