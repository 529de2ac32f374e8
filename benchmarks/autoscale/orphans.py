"""Machines that are left behind when the autoscaler dies again and again.

A simulated cloud that loses one answer in ten, refuses one call in ten, and lists new machines up
to 90 s late; an autoscaler that is killed before or after any of its calls, 200 times for each
seed, while machines are also ended by hand. Asked when all has settled, and again when the job is
over.

  orphans            machines that ran when the job was over
  doubles            machines beyond those wanted when all had settled
  most_at_once       machines beyond those wanted that ever ran at once (replacements included)
"""

from __future__ import annotations

from benchmarks.autoscale.kills import random_kills
from benchmarks.common import support

KILLS = 200


def main() -> None:
    arguments = support.parse(__doc__)
    machine = support.hardware()
    seeds = range(2 if arguments.quick else 10)
    found = [random_kills(seed, KILLS, support.say) for seed in seeds]
    doubles, orphans, most = ([float(each[i]) for each in found] for i in range(3))
    figures = [
        support.Figure("orphans", sum(orphans), "machines", "<= 0", None, orphans),
        support.Figure("doubles", sum(doubles), "machines", "<= 0", None, doubles),
        support.Figure("most_at_once", max(most), "machines", None, None, most),
        support.Figure("kills", float(KILLS * len(found)), "kills"),
    ]
    support.finish("orphans", machine, figures, arguments.out)


if __name__ == "__main__":
    main()
