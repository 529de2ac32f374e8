"""Ray's own object transfer beside our transport over one WAN link. Needs root (the WAN lab).

20 MB from one region to the other, 100 Mbit/s, 50 ms one way, 0.1 % loss, CUBIC, real TCP:

  ray    two Ray nodes, one per namespace, as `geo_ray.lab.lab` starts them (a pull may take
         longer than Ray's 10 s: it would send twice); `ray.get` of an object that lies in the
         other region's object store, from the call until it is here
  ours   `Endpoint.send`, TLS on, until the other region's handler has the message; `ours_cold` is
         the first message of a connection, `ours` one of later rounds

Both after a first small exchange. `ray_over_ours` is how many times longer Ray takes. A limit
beside both: what the link needs for the payload (rate x 1448/1500) and one delay.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.common import support
from benchmarks.common.lab_runs import lab_runs
from benchmarks.transport.wan import DELAY_S, MB, limit_bytes_per_s, linked
from geo_ray.lab.lab import Lab, start_ray
from geo_ray.lab.stats import LabStats
from geo_ray.lab.topology import DefaultLink, LabRegionConfig, Topology

NODE = Path(__file__).with_name("wan_ray_node.py")
RATE_MBPS, LOSS = 100, 0.001
CONTROL: Final = "cubic"
SIZE_BYTES = 20 * MB


def through_ray(count: int) -> tuple[list[float], LabStats]:
    """Seconds per object."""
    topology = Topology(
        congestion_control=CONTROL,
        link=DefaultLink(rate_mbps=RATE_MBPS, delay_s=DELAY_S, loss=LOSS),
        regions=(LabRegionConfig(name="A"), LabRegionConfig(name="B")),
    )
    with Lab(topology) as lab:
        environment = {**os.environ, **start_ray(lab)}
        lab.reset()
        support.say("both Ray nodes are up")
        argv = [sys.executable, str(NODE), "B", str(SIZE_BYTES), str(count)]
        driver = lab.popen("A", argv, env=environment, stdout=subprocess.PIPE, text=True)
        said, _ = driver.communicate()
        stats = lab.stats()
        if driver.returncode:
            raise RuntimeError(f"the Ray driver ended with {driver.returncode}")
    return list(json.loads(said.splitlines()[-1])), stats


def through_ours(count: int) -> tuple[list[list[float]], LabStats]:
    """Seconds of the first message, and of later ones."""
    with linked(RATE_MBPS, LOSS, CONTROL) as (a, _, lab):
        lab.reset()
        a.ask("send", size_bytes=1 << 20, count=1, pause_s=0.5)
        cold = a.ask("send", size_bytes=SIZE_BYTES, count=1, pause_s=0.5)
        a.ask("send", size_bytes=SIZE_BYTES, count=3 * count, pause_s=0.5)  # streams are found
        warm = a.ask("send", size_bytes=SIZE_BYTES, count=count, pause_s=0.5)
        return [cold["times_s"], warm["times_s"]], lab.stats()


def main() -> None:
    options = support.parse(__doc__)
    machine = support.hardware()
    count = 1 if options.quick else 5
    with lab_runs(options.out) as runs:
        support.say("our transport")
        cold_s, ours_s = runs.need("ours", partial(through_ours, count))
        support.say("Ray")
        ray_s = runs.need("ray", partial(through_ray, count))
    limit_s = SIZE_BYTES / limit_bytes_per_s(RATE_MBPS) + DELAY_S
    ours = statistics.median(ours_s)
    figures = [
        support.Figure("ray", statistics.median(ray_s), "s", None, limit_s, ray_s),
        support.Figure("ours", ours, "s", None, limit_s, ours_s),
        support.Figure("ours_cold", cold_s[0], "s", None, limit_s, cold_s),
        support.Figure(
            "ray_over_ours", statistics.median(ray_s) / ours, "ratio", None, ours,
            [each / ours for each in ray_s],
        ),
    ]  # fmt: skip
    support.finish("wan_ray", machine, figures, options.out, runs.finish())


if __name__ == "__main__":
    main()
