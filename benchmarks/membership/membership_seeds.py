"""Random histories of a simulated run's members, over all strategies; asked: 0 violations.

    python -m benchmarks.membership.membership_seeds --seeds 100000

Each seed draws a strategy, regions, links, speeds and checkpoints, lets regions join, leave, be
lost and come back, the averager's too, cuts links, and resumes the run from its last checkpoint:
`benchmarks.membership.histories`.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from benchmarks.common import support
from benchmarks.membership.histories import History
from geo_ray.job.build import use_one_thread

SHOWN = ("region_joined", "region_drained", "region_lost", "hub_moved", "ended", "checkpoint")
QUICK_SEEDS = 40


def main() -> None:
    parser = support.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="how many, from --first on")
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    use_one_thread()
    count = QUICK_SEEDS if options.quick else options.seeds
    violations, counts = 0, dict.fromkeys(SHOWN, 0)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        for seed in range(options.first, options.first + count):
            history = History(seed, Path(directory))
            try:
                history.run()
            except Exception as error:  # whatever it is: the seed tells how to see it again
                violations += 1
                support.say(f"seed {seed}: {error!r}")
            for kind in SHOWN:
                counts[kind] += history.counts.get(kind, 0)
            if seed % 100 == 99:
                support.say(f"{seed + 1 - options.first} of {count}, {violations} violations")
    per_s = count / (time.monotonic() - began_s)
    figures = [
        support.Figure("violations", violations, "count", "<= 0"),
        support.Figure("seeds", count, "count", ">= 2000"),
        support.Figure("seeds_per_s", per_s, "1/s"),
        *(support.Figure(kind, number, "count") for kind, number in counts.items()),
    ]
    support.finish("membership_seeds", support.hardware(), figures, options.out)


if __name__ == "__main__":
    main()
