"""A simulated run from a configuration to a summary, with the files of a real run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from geo_ray.config.experiment import Experiment
from geo_ray.job.account import account
from geo_ray.job.best import BestKeeper
from geo_ray.job.build import check_absent, use_one_thread
from geo_ray.job.data import prepare_manifest
from geo_ray.job.model_file import about_model, save_trained
from geo_ray.job.recorder import Recorder, Sink
from geo_ray.job.rundir import RunDirectory, followed_plan
from geo_ray.job.start.evaluation import check_evaluation
from geo_ray.job.start.notes import warn_at_start
from geo_ray.observe.events.log import EVENTS_FILE, EventLog
from geo_ray.observe.metrics.summary import Summary, Summing, save_summary
from geo_ray.observe.report.ending import failure_noted
from geo_ray.sim.cost import cost_note
from geo_ray.sim.world import LAN_S, World
from geo_ray.tasks.load import load_task
from geo_ray.training.compute.flat import digest

_log = logging.getLogger(__name__)


def simulate(
    experiment: Experiment,
    run: RunDirectory,
    status: Callable[[str], None],
    sinks: Sequence[Sink] = (),
) -> Summary:
    """Simulate the experiment to its end.

    Args:
        experiment: what to do.
        run: its directory.
        status: told each phase.
        sinks: given every event.

    Raises:
        GeoRayError: whatever is wrong with configuration, task or data.
    """
    use_one_thread()
    plan = followed_plan(run)
    status("preparing task and data")
    task = load_task(experiment.task, run.base_dir)
    manifest, _ = prepare_manifest(experiment, task, run.base_dir, run.data)
    check_evaluation(experiment, task, manifest)
    warn_at_start(experiment, manifest, simulated=True)
    if (note := cost_note(experiment, task, manifest)) is not None:
        _log.warning("%s", note)
    summing = Summing(experiment.train.target)
    with failure_noted(run.path), EventLog(run.path / EVENTS_FILE) as log:
        recorder = Recorder(log, [*sinks, summing.feed])
        keeper = BestKeeper.of(experiment, task, run)
        check_absent(experiment)
        lan_s = LAN_S if plan is None else 0.0  # the emulated steps of a plan include its LAN
        world = World(experiment, task, manifest, recorder.emit, lan_s, keeper)
        recorder.started(experiment, run.path.name, 0.0, simulated=True)
        try:
            result = world.run()
        finally:
            if keeper is not None:
                keeper.candidates.close()
        final_P = result.params_P[experiment.averager_region]
        usd = account(run, summing.totals)
        summary = summing.summary(usd=usd, digest=digest(final_P))
        recorder.emit(
            "run_finished",
            result.seconds,
            summary=summary.model_dump(),
            digests={name: digest(params_P) for name, params_P in result.params_P.items()},
        )
    about = about_model(experiment, summary.steps, summary.eval)
    carried_B = result.carried_B[experiment.averager_region]
    save_trained(task, experiment.seed, final_P, run.model, about, carried_B)
    save_summary(summary, run.path)
    return summary
