"""`strategy: {kind: auto}`: the configuration is completed from measurements before it is read.

``auto`` is no strategy of its own. Its section says what may be given up; strategy, interval and
codec are put in its place, as the user could have written them, and the reason is told.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from geo_ray.config.auto import AutoConfig
from geo_ray.config.experiment import Experiment
from geo_ray.config.load import checked, load_text, load_tree, read_text
from geo_ray.config.overrides import apply_overrides
from geo_ray.config.own import context
from geo_ray.config.source import ConfigSource
from geo_ray.config.yaml_text import parse_yaml
from geo_ray.errors import ConfigError
from geo_ray.job.build import model_start, parameter_count, use_one_thread
from geo_ray.planning.advisor import Choice, Situation, advise, explain, sections
from geo_ray.tasks.base import SelfContained, Task, num_rows
from geo_ray.tasks.guard import checked_dataset
from geo_ray.tasks.load import load_task
from geo_ray.training.compute.worker import Worker
from geo_ray.transport.links.table import LinkTable, load_links, table_of
from geo_ray.types import Span

_TRIALS = 5


@dataclass(frozen=True, slots=True)
class Advice:
    """What was chosen, and why.

    Attributes:
        choice: the candidate.
        reason: a paragraph.
    """

    choice: Choice
    reason: str


def load_experiment(
    path: ConfigSource,
    overrides: Sequence[str],
    *,
    base_dir: Path | None = None,
    allow_drift: bool = False,
) -> tuple[Experiment, Advice | None]:
    """Read a configuration; complete it if its strategy is ``auto``.

    Args:
        path: a YAML file, or what `source.text_of` made.
        overrides: as for ``--set``.
        base_dir: where relative paths start; default: the file's directory.
        allow_drift: as for `load_tree`.

    Returns:
        The experiment, and the advice if there was any to give.

    Raises:
        ConfigError: the file is wrong, or there are no measurements to go by.
    """
    text = read_text(path)
    tree = apply_overrides(parse_yaml(text, str(path)), overrides)
    keys = tree.value if isinstance(tree.value, dict) else {}
    strategy = keys.get("strategy")
    if not isinstance(strategy, dict) or strategy.get("kind") != "auto":
        known = load_tree(path, overrides, Experiment, base_dir=base_dir, allow_drift=allow_drift)
        return known, None
    wanted = checked(tree, AutoConfig, str(path), "strategy")
    base_dir = path.parent if base_dir is None else base_dir
    where = context(base_dir, allow_drift=allow_drift)
    if keys.get("codec"):
        raise ConfigError(
            f"{path}: strategy auto chooses the codec too, but `codec` is given",
            fix="Leave out `codec`, or name a strategy.",
        )
    plain = [*overrides, "strategy={kind: bsp}"]
    known = load_text(text, plain, Experiment, str(path), where=where)
    situation = measure(known, wanted, base_dir)
    choice = advise(situation)
    chosen = [f"{key}={json.dumps(value)}" for key, value in sections(choice).items() if value]
    experiment = load_text(text, [*overrides, *chosen], Experiment, str(path), where=where)
    return experiment, Advice(choice, explain(choice, situation))


def measure(experiment: Experiment, wanted: AutoConfig, base_dir: Path) -> Situation:
    """What the advisor needs: from the emulation, the link table, or a few steps done here.

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
            f"strategy auto: nothing is known of the links {', '.join(holes)}",
            fix="Measure them with `geo-ray probe`, or give their rates under `emulate`.",
        )
    return links


def _step_s(experiment: Experiment, task: Task) -> float:
    """Seconds of a step on this machine (median): machines are taken to be like it."""
    if not isinstance(task, SelfContained):  # rows of a manifest are for its regions to read
        raise ConfigError(
            "strategy auto: how long a step takes is not known",
            fix="Give strategy.step_s in seconds, or emulate.step_s.",
        )
    use_one_thread()
    buffer = model_start(task, experiment.seed).buffer()
    worker = Worker(
        task,
        buffer,
        buffer.clone(),
        region=experiment.averager_region,
        seed=experiment.seed,
        device=experiment.device,
    )
    rows = experiment.data.batch_size
    train = checked_dataset(task, experiment.seed).train
    columns = {name: column[:rows] for name, column in train.items()}
    times_s = []
    for _ in range(_TRIALS):
        began_s = time.perf_counter()
        worker.step(columns, Span(0, num_rows(columns)))
        times_s.append(time.perf_counter() - began_s)
    return sorted(times_s)[_TRIALS // 2]
