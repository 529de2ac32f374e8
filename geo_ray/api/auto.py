"""`strategy: {kind: auto}`: completes a configuration from measurements before it is validated.

The section ``auto`` states the acceptable loss. It is replaced by a strategy, an interval and a
codec, written as a user would write them, and the reason is reported.

The advisor's loss estimates come from other tasks. Therefore a choice is tried in a simulation
of a few rounds, and compared with the same steps of synchronous training, if the task provides
its data and the trial is cheap. A choice with too little progress is vetoed. The length of the
trial depends on the choice: an averager with momentum overshoots only after about ten rounds, and
one that applies changes directly shows within four rounds whether the model trains.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import torch

from geo_ray.base.canonical import JSONValue, sha256_hex
from geo_ray.base.errors import ConfigError, NonFiniteError
from geo_ray.base.load import checked, load_text
from geo_ray.base.overrides import apply_overrides
from geo_ray.base.types import Span
from geo_ray.base.user_section import context
from geo_ray.base.yaml import ConfigSource, parse_yaml, read_text
from geo_ray.data.tasks.base import Columns, SelfContained, Task, num_rows
from geo_ray.data.tasks.checked_calls import checked_dataset
from geo_ray.data.tasks.load import load_task
from geo_ray.experiment.experiment import AutoConfig, Experiment
from geo_ray.experiment.regions import loop_problems
from geo_ray.planner.advisor import Choice, Family, Situation, advise, candidates, explain, sections
from geo_ray.runs.build import model_start, parameter_count, use_one_thread
from geo_ray.runs.data import prepare_manifest
from geo_ray.runs.directory import own_files
from geo_ray.simulator.world import World
from geo_ray.telemetry.events import Event
from geo_ray.training.worker import Worker
from geo_ray.transport.links import LinkTable, load_links, table_of

_TRIALS: Final = 5
_TRIAL_LOSS_ROWS: Final = 256
_MOST_WORK: Final = 10**9  # rows times parameters
_MOST_VETOES: Final = 4
_MOST_KEPT: Final = 256


@dataclass(frozen=True, slots=True)
class _TrialRule:
    """The trial of a choice.

    Attributes:
        rounds: simulated rounds.
        least_progress: minimum decrease of the training loss, as a fraction of the decrease of
            synchronous training.
    """

    rounds: int
    least_progress: float


_WITH_MOMENTUM: Final = _TrialRule(10, 0.75)
_AS_IT_IS: Final = _TrialRule(4, 0.25)  # the first rounds of a delayed or local optimizer are slow

_trials: dict[str, tuple[bool, str]] = {}
"""Results of this process by configuration, so that a configuration is tried once."""


@dataclass(frozen=True, slots=True)
class Advice:
    """The choice and its reason.

    Attributes:
        choice: the chosen candidate.
        reason: explanation, as a paragraph.
    """

    choice: Choice
    reason: str


def load_experiment(
    path: ConfigSource,
    overrides: Sequence[str],
    *,
    base_dir: Path | None = None,
    may_change: Collection[str] = (),
    loads_loops: bool = False,
) -> tuple[Experiment, Advice | None]:
    """Read a configuration; complete it if its strategy is ``auto``.

    Args:
        path: a YAML file, or the result of `source.text_of`.
        overrides: as for ``--set``.
        base_dir: base of relative paths; default: the file's directory.
        may_change: as for `load_tree`.
        loads_loops: execute the files of loops, and report those that cannot be loaded.

    Returns:
        The experiment, and the advice if the strategy was ``auto``.

    Raises:
        ConfigError: the file is invalid, or measurements are missing.
    """
    text = read_text(path)
    tree = apply_overrides(parse_yaml(text, str(path)), overrides)
    keys = tree.value if isinstance(tree.value, dict) else {}
    strategy, regions = keys.get("strategy"), keys.get("regions")
    base_dir = path.parent if base_dir is None else base_dir
    found = loop_problems(regions, base_dir) if loads_loops else {}
    where = context(base_dir, may_change=may_change)
    if not isinstance(strategy, dict) or strategy.get("kind") != "auto":
        return load_text(text, overrides, Experiment, str(path), where=where, found=found), None
    wanted = checked(tree, AutoConfig, str(path), "strategy")
    if keys.get("codec"):
        raise ConfigError(
            f"{path}: strategy auto chooses the codec too, but `codec` is given",
            fix="Omit `codec`, or choose a strategy.",
        )
    synchronous = "{kind: sma, interval: 1}" if _is_served(regions) else "{kind: bsp}"
    plain = [*overrides, f"strategy={synchronous}"]
    known = load_text(text, plain, Experiment, str(path), where=where, found=found)
    situation = measure(known, wanted, base_dir)
    trial, vetoed, notes = ChoiceTrial(known, base_dir), list[tuple[Family, int]](), list[str]()
    while True:
        choice = advise(situation, vetoed)
        chosen_sections = sections(choice, situation)
        chosen = [f"{key}={json.dumps(value)}" for key, value in chosen_sections.items() if value]
        experiment = load_text(text, [*overrides, *chosen], Experiment, str(path), where=where)
        is_good, note = trial.run(experiment, choice)
        notes.append(note)
        if is_good:
            return experiment, Advice(choice, " ".join([explain(choice, situation), *notes]))
        vetoed += [(choice.family, choice.interval)]
        if len(vetoed) >= _MOST_VETOES:  # the trials compare with synchronous training
            vetoed += [(c.family, c.interval) for c in candidates(situation) if c.interval > 1]


def _is_served(regions: JSONValue) -> bool:
    """Return whether a region joins or is a group, so that `bsp` does not fit."""
    return isinstance(regions, list) and any(
        isinstance(region, dict) and (region.get("join") or region.get("group") is not None)
        for region in regions
    )


class ChoiceTrial:
    """Tries choices in short simulations on this machine.

    Args:
        plain: the configuration with synchronous training.
        base_dir: base of its relative paths.
    """

    def __init__(self, plain: Experiment, base_dir: Path) -> None:
        self._plain = plain
        self._task = load_task(plain.task, base_dir)
        self._base_dir = base_dir
        self._plain_losses: dict[int, float] = {}

    def run(self, experiment: Experiment, choice: Choice) -> tuple[bool, str]:
        """Try a choice.

        Args:
            experiment: the configuration with the choice.
            choice: the choice.

        Returns:
            Whether the choice is accepted, and a sentence about the trial.
        """
        if choice.interval == 1:
            return True, ""
        if experiment.data.generate is None:
            return True, "It was not tried in a simulation, because the rows are in their regions."
        key = _digest(experiment, self._base_dir)
        if key not in _trials:
            if len(_trials) >= _MOST_KEPT:
                _trials.clear()
            _trials[key] = self._tried(experiment, choice)
        return _trials[key]

    def _tried(self, experiment: Experiment, choice: Choice) -> tuple[bool, str]:
        """Simulate a choice; see `run`."""
        has_momentum = experiment.strategy.traits.averager.plain_outer is not None
        rule = _WITH_MOMENTUM if has_momentum else _AS_IT_IS
        steps = min(experiment.train.steps, rule.rounds * choice.interval)
        rows = experiment.rows * steps // experiment.train.steps
        num_params = parameter_count(self._task, experiment.seed)
        if rows * num_params > _MOST_WORK:
            return (
                True,
                "It was not tried in a simulation, because that would take long for this model.",
            )
        use_one_thread()
        if not self._plain_losses:
            self._plain_losses[0] = self._loss_of(model_start(self._task, experiment.seed).buffer())
        if steps not in self._plain_losses:
            self._plain_losses[steps] = self._loss_after(self._plain, steps)
        start, plain = self._plain_losses[0], self._plain_losses[steps]
        found = self._loss_after(experiment, steps)
        name = f"{choice.family} with {choice.interval} steps per exchange"
        if not start - found >= rule.least_progress * (start - plain):
            return False, (
                f"{name} was tried and rejected: {steps} simulated steps bring the training loss "
                f"from {start:.3g} to {found:.3g}, synchronous training to {plain:.3g}."
            )
        return True, (
            f"{steps} simulated steps of it bring the training loss from {start:.3g} to "
            f"{found:.3g}, those of synchronous training to {plain:.3g}."
        )

    def _loss_after(self, experiment: Experiment, steps: int) -> float:
        """Return the loss of the model after the steps; infinite if it diverges."""
        train = experiment.train.model_copy(
            update={
                "steps": steps,
                "eval_every": 0,
                "target": None,
                "patience": None,
                "keep_best": None,
            }
        )
        short = experiment.model_copy(update={"train": train})
        with tempfile.TemporaryDirectory() as scratch:
            manifest, _ = prepare_manifest(short, self._task, self._base_dir, Path(scratch))
            try:
                result = World(short, self._task, manifest, _unrecorded).run()
            except NonFiniteError:
                return math.inf
        leader = short.averager_region
        buffers_B = result.buffers_B[leader]
        parts = [] if buffers_B is None else [buffers_B.view(torch.float32)]
        return self._loss_of(torch.cat([*parts, result.params_P[leader]]))

    def _loss_of(self, buffer: torch.Tensor) -> float:
        """Return the mean loss of training rows with the state in a worker's buffer."""
        worker = _worker(self._plain, self._task, buffer)
        result = worker.step(*_first_rows(self._plain, self._task, _TRIAL_LOSS_ROWS))
        return math.inf if result.loss is None else result.loss


def _digest(experiment: Experiment, base_dir: Path) -> str:
    """Return a digest of the inputs of a trial."""
    tree = experiment.model_dump(mode="json", exclude={"name", "run", "cluster", "checkpoint"})
    files = {name: sha256_hex((base_dir / name).read_bytes()) for name in own_files(experiment)}
    known = [tree, str(base_dir.absolute()), files]  # a file may be edited between two loads
    return sha256_hex(json.dumps(known, sort_keys=True).encode())


def _unrecorded(kind: str, t_s: float, **fields: object) -> Event:
    """Ignore an event of a trial."""
    return Event(kind, t_s, fields)


def measure(experiment: Experiment, wanted: AutoConfig, base_dir: Path) -> Situation:
    """Collect the advisor's inputs: from the emulation, the link table, or measured steps.

    Raises:
        ConfigError: no link is known.
    """
    task = load_task(experiment.task, base_dir)
    names = experiment.region_names
    steps_s = {name: experiment.step_s(name) for name in names}
    if None in steps_s.values():
        here_s = wanted.step_s or _step_s(experiment, task)
        steps_s = {name: here_s if step_s is None else step_s for name, step_s in steps_s.items()}
    specs = experiment.links()
    links = table_of(specs) if specs else load_links(base_dir / wanted.links)
    return Situation(
        num_params=parameter_count(task, experiment.seed),
        step_s={name: step_s for name, step_s in steps_s.items() if step_s is not None},
        links=_known(links, experiment),
        averager=experiment.averager_region,
        loss_budget=wanted.loss_budget,
        inner_momentum=experiment.optimizer.has_momentum,
        is_served=experiment.is_served,
    )


def _known(links: LinkTable, experiment: Experiment) -> LinkTable:
    averager_region = experiment.averager_region
    pairs = [
        p
        for r in experiment.region_names
        if r != averager_region
        for p in ((r, averager_region), (averager_region, r))
    ]
    holes = [f"{src} to {dst}" for src, dst in pairs if links.find(src, dst) is None]
    if holes:
        raise ConfigError(
            f"strategy auto: unknown links: {', '.join(holes)}",
            fix="Measure them with `geo-ray probe`, or give their rates under `emulate`.",
        )
    return links


def _step_s(experiment: Experiment, task: Task) -> float:
    """Return the median seconds of a step on this machine, which represents all machines."""
    if not isinstance(task, SelfContained):  # only the regions read rows of a manifest
        raise ConfigError(
            "strategy auto: the duration of a step is unknown",
            fix="Give strategy.step_s in seconds, or emulate.step_s.",
        )
    use_one_thread()
    worker = _worker(experiment, task, model_start(task, experiment.seed).buffer())
    columns, span = _first_rows(experiment, task, experiment.data.batch_size)
    times_s = []
    for _ in range(_TRIALS):
        began_s = time.perf_counter()
        worker.step(columns, span)
        times_s.append(time.perf_counter() - began_s)
    return sorted(times_s)[_TRIALS // 2]


def _worker(experiment: Experiment, task: Task, buffer: torch.Tensor) -> Worker:
    """Build a worker from a buffer of model buffers and parameters."""
    return Worker(
        task,
        buffer,
        buffer.clone(),
        region=experiment.averager_region,
        seed=experiment.seed,
        device=experiment.device,
    )


def _first_rows(experiment: Experiment, task: Task, rows: int) -> tuple[Columns, Span]:
    """Return the first training rows of a self-contained task."""
    train = checked_dataset(cast(SelfContained, task), experiment.seed).train
    columns = {name: column[:rows] for name, column in train.items()}
    return columns, Span(0, num_rows(columns))
