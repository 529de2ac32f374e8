"""How long it takes to replay a large history: 1,000 sites and 10,000 jobs under PD-ORS.

seconds     of the whole history (--quick: 200 sites, 300 jobs)
decision_s  the longest of one job
memory_gib  of the process at its largest
"""

from __future__ import annotations

import resource
import time

from benchmarks.common import support
from geo_ray.scheduler.policies.pd_ors import PdOrsPolicy
from geo_ray.scheduler.replay import replay_jobs
from geo_ray.scheduler.schedule import check_schedule
from geo_ray.scheduler.workload import LoadShape, generated_cluster, generated_jobs


def main() -> None:
    options = support.parse(__doc__)
    machine = support.hardware()
    shape = LoadShape(200, 300, 100) if options.quick else LoadShape(1000, 10_000, 400)
    cluster, jobs = generated_cluster(shape, 0), generated_jobs(shape, 0)
    began_s = time.perf_counter()

    def message(slot: int) -> None:
        if slot % 20 == 0:
            support.say(f"slot {slot}, {time.perf_counter() - began_s:.0f} s")

    done = replay_jobs(cluster, jobs, PdOrsPolicy(window=20), on_slot=message)
    took_s = time.perf_counter() - began_s
    check_schedule(done)
    memory_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    figures = [
        support.Figure("seconds", took_s, "s", "<= 600"),
        support.Figure("decision_s", max(done.decision_s), "s"),
        support.Figure("memory_gib", memory_gib, "GiB"),
        support.Figure("jobs_ended", float(len(done.finished_s)), "jobs"),
    ]
    support.finish("replay", machine, figures, options.out)


if __name__ == "__main__":
    main()
