"""A job as a program: two regions summarise their own rows, a third puts the summaries together.

geo-ray program examples/program.py --graph
geo-ray program examples/program.py --on virtual      # or threads, processes, ray
"""

from typing import Any

import numpy as np

from geo_ray.program.calls import batched_handler, gathered
from geo_ray.program.clock import here
from geo_ray.program.graph import NodeGroup, NodeRestarts, Program, ProgramNode
from geo_ray.program.run import run_program
from geo_ray.transport.emulation import LinkSpec


class Rows:
    """A region's rows, which do not leave it; only sums of them do."""

    def __init__(self, seed: int) -> None:
        self.rows = np.random.default_rng(seed).normal(seed, 1.0, (10_000, 8))

    @batched_handler(batch_size=4, timeout_s=0.05)
    def sums(self, columns: list[int]) -> list[tuple[int, float]]:
        """Number and sum of each asked column, of up to four calls at once."""
        here().takes_s(0.1)
        return [(len(self.rows), float(self.rows[:, column].sum())) for column in columns]


class Means:
    """Asks all regions at once, column by column."""

    def __init__(self, regions: list[Any]) -> None:
        self.regions = regions

    def run(self) -> list[float]:
        """Means of all columns over all regions' rows."""
        asked = [[each.futures.sums(column) for each in self.regions] for column in range(8)]
        answers = [gathered(futures) for futures in asked]
        return [round(sum(s for _, s in each) / sum(n for n, _ in each), 6) for each in answers]


east, west = ProgramNode("rows-east", Rows, (1,)), ProgramNode("rows-west", Rows, (2,))
means = ProgramNode("means", Means, ([east.handle, west.handle],))
program = Program(
    "means",
    (
        NodeGroup("us-east", (east,), machine="aws:m5.2xlarge"),
        NodeGroup("us-west", (west,), machine="aws:m5.2xlarge"),
        NodeGroup("eu-west", (means,), restarts=NodeRestarts(most=1)),
    ),
    links={
        ("us-east", "eu-west"): LinkSpec(rate_mbps=50, delay_s=0.04),
        ("us-west", "eu-west"): LinkSpec(rate_mbps=20, delay_s=0.07),
    },
    places={"us-east": "aws:us-east-1", "us-west": "aws:us-west-2", "eu-west": "aws:eu-west-1"},
)

if __name__ == "__main__":
    print(run_program(program, on="processes"))
