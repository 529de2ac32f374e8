"""What a checkpoint to an object store costs the step of a parameter server: 51.2 M parameters.

One process, no Ray: a shard with AdamW applies a gradient again and again, and its part goes to a
real S3 server (moto, a process of its own, in Linux's idle class) over loopback, as a run has it
done. Between two steps the shard waits for so long as workers compute. What is left of a step is
what everybody waits for.

  delay_most    how much longer a step took beside the part's way to the store than the median of
                those before, as a share of the whole step, waiting included; of the worst one
  delay_mean    the same of all steps beside it
  noise_most    the same of the slowest step before
  part_mb_per_s bytes of the part over the seconds until the store had it
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from typing import Final

import torch

from benchmarks.checkpoints.store_checkpoints import BUCKET, CREDENTIALS, s3_server
from benchmarks.common import support
from geo_ray.storage.bucket import Bucket, RequestLimits
from geo_ray.storage.manifest import PartInfo
from geo_ray.storage.places import CheckpointPlaces
from geo_ray.storage.uri import parse_s3, s3_uri
from geo_ray.strategies.sma import Sma
from geo_ray.training.checkpoint_parts import HeldShard
from geo_ray.training.optimizers import AdamW
from geo_ray.training.shard import Contribution, Shard

SIZE: Final = 51_200_000
BEFORE: Final = 4
WARM_UP: Final = 2


def main() -> None:
    parser = support.parser(__doc__)
    parser.add_argument("--gradient_s", type=float, default=2.0, help="seconds between two steps")
    options = parser.parse_args()
    machine = support.hardware()
    os.environ.update(CREDENTIALS)
    torch.set_num_threads(1)
    size = SIZE // 8 if options.quick else SIZE
    with s3_server() as endpoint:
        uri = s3_uri(BUCKET, "runs", endpoint_url=endpoint, region="us-east-1")
        Bucket(parse_s3(uri), RequestLimits()).ask("make", BUCKET, "create_bucket")
        before, beside, speed = measure(uri, size, options.gradient_s)
    usual_s = statistics.median(before)
    whole_s = options.gradient_s + usual_s
    figures = [
        support.median("delay_most", [(max(beside) - usual_s) / whole_s], "ratio", "<= 0.02"),
        support.median("delay_mean", [(statistics.mean(beside) - usual_s) / whole_s], "ratio"),
        support.median("noise_most", [(max(before) - usual_s) / whole_s], "ratio"),
        support.median("part_mb_per_s", [speed], "MB/s"),
    ]
    support.finish("server_steps", machine, figures, options.out)


def measure(uri: str, size: int, gradient_s: float) -> tuple[list[float], list[float], float]:
    """Seconds of steps before and beside an upload, and its MB/s."""
    places = CheckpointPlaces(uri)
    places.prepare("here")
    held = HeldShard(Shard(torch.zeros(size), AdamW(lr=1e-4), Sma(interval=100)), "here", 0, places)
    gradient = torch.full((size,), 1e-3)
    before = [step(held.shard, gradient, gradient_s) for _ in range(WARM_UP + BEFORE)][WARM_UP:]
    written: list[PartInfo] = []
    held.shard.snapshot(0)
    began_s = time.perf_counter()
    writer = threading.Thread(target=lambda: written.append(held.write_part(0)))
    writer.start()
    beside = []
    while writer.is_alive():
        beside.append(step(held.shard, gradient, gradient_s))
    took_s = time.perf_counter() - began_s
    support.say(f"before: {', '.join(f'{s:.2f}' for s in before)} s")
    support.say(f"beside: {', '.join(f'{s:.2f}' for s in beside)} s")
    return before, beside, written[0].bytes / 1e6 / took_s


def step(shard: Shard, gradient: torch.Tensor, gradient_s: float) -> float:
    """Seconds of one step, without the wait for its gradient."""
    time.sleep(gradient_s)
    began_s = time.perf_counter()
    shard.put(0, gradient)
    shard.apply([Contribution(0, 4)])
    return time.perf_counter() - began_s


if __name__ == "__main__":
    main()
