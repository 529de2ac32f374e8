"""The directory of a run: its configuration as composed, its plan, its log, its checkpoints."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from geo_ray.config.load import diff, digest, dump_yaml, load_tree
from geo_ray.config.recorded import RecordedConfig
from geo_ray.errors import ConfigDriftError, RunDirectoryError
from geo_ray.job.far.copy import empty_copy
from geo_ray.job.far.objects import RunObjects
from geo_ray.lease.store import ConditionalStore
from geo_ray.planning.plan import Plan, load_plan
from geo_ray.stores.uri import is_s3, join

if TYPE_CHECKING:  # PyTorch takes seconds to import, and readers of a run do without it
    from geo_ray.config.experiment import Experiment

CONFIG_FILE = "config.lock.yaml"
PLAN_FILE = "plan.json"
FOLLOWED_FILE = "followed_plan.json"
MODEL_FILE = "model.safetensors"
BEST_FILE = "model-best.safetensors"


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths of one run.

    Attributes:
        path: the directory, absolute; of a run in a bucket, this machine's copy.
        base_dir: where relative paths of the configuration start.
        address: of a run whose directory is in a bucket; None: it is not.
    """

    path: Path
    base_dir: Path
    address: str | None = None

    @property
    def shown(self) -> str:
        """What users call it."""
        return str(self.path) if self.address is None else self.address

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints go."""
        return self.path / "checkpoints"

    @property
    def data(self) -> str:
        """Where generated data go: a directory, or an address."""
        return str(self.path / "data") if self.address is None else join(self.address, "data")

    @property
    def links(self) -> Path:
        """What was learned about the links between regions."""
        return self.path / "links.json"

    @property
    def model(self) -> Path:
        """The trained model, a safetensors file with the module's names."""
        return self.path / MODEL_FILE

    @property
    def best_model(self) -> Path:
        """The best evaluated model, if `train.keep_best` asks for it; a file like `model`."""
        return self.path / BEST_FILE


def create(
    experiment: Experiment,
    base_dir: Path,
    reason: str | None = None,
    followed: Plan | None = None,
) -> RunDirectory:
    """Make the directory of a new run: ``run.dir/name``, or ``name-2`` and so on if that is taken.

    In a bucket the name is taken, and the directory is this machine's copy.

    Args:
        experiment: the run.
        base_dir: where relative paths of its configuration start.
        reason: why strategy and codec are what they are, if they were chosen by `auto`.
        followed: the plan of `geo-ray plan` that the experiment follows; kept beside it.

    Raises:
        RunDirectoryError: if it cannot be written.
        StoreError: the bucket does not answer or refuses.
    """
    run = _begin(experiment, base_dir.absolute())
    path = run.path
    _write(path / CONFIG_FILE, dump_yaml(experiment))
    plan = plan_of(experiment, run.base_dir) | {"reason": reason, "address": run.address}
    if followed is not None:
        plan |= {"predicted_seconds": followed.total_s, "predicted_usd": followed.total_usd}
        _write(path / FOLLOWED_FILE, followed.model_dump_json(indent=2) + "\n")
    _write(path / PLAN_FILE, json.dumps(plan, indent=2) + "\n")
    return run


def address_in(path: Path) -> str | None:
    """The address of a run in a bucket of which a directory is a copy; None: it is none."""
    try:
        address = json.loads((path / PLAN_FILE).read_text()).get("address")
    except (OSError, ValueError, AttributeError):
        return None
    return None if address is None else str(address)


def local_root(experiment: Experiment) -> Path:
    """Where this machine keeps what is of no single run, such as profiles."""
    return Path("runs" if is_s3(experiment.run.dir) else experiment.run.dir)


def lease_of(run: RunDirectory) -> ConditionalStore | None:
    """Where the lease of a run in a bucket lies; None: in its directory."""
    return None if run.address is None else RunObjects(run.address).lease()


def discard(run: RunDirectory) -> None:
    """Remove a run that did not begin: its name is free again."""
    if run.address is not None:
        RunObjects(run.address).discard()
    shutil.rmtree(run.path, ignore_errors=True)


def _begin(experiment: Experiment, base_dir: Path) -> RunDirectory:
    root = Path(experiment.run.dir).absolute()
    number = 1
    while True:
        name = experiment.name if number == 1 else f"{experiment.name}-{number}"
        path = root / name
        if is_s3(experiment.run.dir):
            address = join(experiment.run.dir, name)
            if RunObjects(address).begin():
                return RunDirectory(empty_copy(address), base_dir, address)
            number += 1
            continue
        try:
            root.mkdir(parents=True, exist_ok=True)
            path.mkdir()
            return RunDirectory(path, base_dir)
        except FileExistsError as error:
            if not path.is_dir():
                raise RunDirectoryError(
                    f"{path} is in the way: {error.strerror}",
                    fix="Move it away, or choose another `name` or `run.dir`.",
                ) from error
            number += 1
        except OSError as error:
            raise RunDirectoryError(f"cannot make {path}: {error.strerror}") from error


def following(run: RunDirectory, experiment: Experiment, plan: Plan) -> Experiment:
    """The configuration of a run that follows another plan from its next resumption on.

    Args:
        run: its directory; nothing in it is changed.
        experiment: its configuration so far.
        plan: what to follow; of `geo-ray plan --from`.

    Raises:
        PlanError: the plan is for something else.
    """
    from geo_ray.config.experiment import Experiment
    from geo_ray.job.follow_plan import changes_of, check_model

    steps = experiment.train.steps * max(1, experiment.worker_steps)
    own = plan.model_copy(update={"base_steps": steps, "steps": steps, "lr_gain": 1.0})
    changed = load_tree(
        run.path / CONFIG_FILE, changes_of(own, experiment), Experiment, base_dir=run.base_dir
    )
    check_model(plan, changed, run.base_dir)
    return changed


def followed_plan(run: RunDirectory) -> Plan | None:
    """The plan of `geo-ray plan` that the run follows; None if it follows none.

    Raises:
        PlanError: it cannot be read.
    """
    path = run.path / FOLLOWED_FILE
    return load_plan(path) if path.exists() else None


def reopen(
    path: Path, *, allow_drift: bool = False, to_look_at: bool = False
) -> tuple[RunDirectory, Experiment]:
    """Open the directory of an earlier run.

    Args:
        path: the directory.
        allow_drift: also if a file with the user's strategy or codec has changed since.
        to_look_at: only read the run: import nothing that its configuration names. Nothing can be
            run with the configuration then.

    Returns:
        Its paths, and its configuration.

    Raises:
        RunDirectoryError: if ``path`` is no run directory.
        ConfigError: if its configuration cannot be read.
        ConfigDriftError: if a file with the user's strategy or codec has changed since.
    """
    from geo_ray.config.experiment import Experiment

    run = _opened(path)
    experiment = load_tree(
        run.path / CONFIG_FILE,
        [],
        Experiment,
        base_dir=run.base_dir,
        allow_drift=allow_drift,
        to_look_at=to_look_at,
    )
    return run, experiment


def look(path: Path) -> tuple[RunDirectory, RecordedConfig]:
    """Open the directory of a run to read it; imports no PyTorch and no code of the user.

    Args:
        path: the directory.

    Raises:
        RunDirectoryError: if ``path`` is no run directory.
        ConfigError: if its configuration cannot be read.
    """
    run = _opened(path)
    return run, load_tree(run.path / CONFIG_FILE, [], RecordedConfig)


def _opened(path: Path) -> RunDirectory:
    path = path.absolute()
    if not path.is_dir():
        raise RunDirectoryError(
            f"{path} is a file, no run" if path.exists() else f"there is no run {path}",
            fix="Name a directory that `geo-ray train` or `geo-ray simulate` has made.",
        )
    try:
        plan = json.loads((path / PLAN_FILE).read_text())
        base_dir, address = Path(str(plan["base_dir"])), plan.get("address")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunDirectoryError(
            f"{path} is no run directory: {PLAN_FILE} cannot be read ({error})",
            fix="Name a directory that `geo-ray train` made, such as runs/quickstart.",
        ) from error
    return RunDirectory(path, base_dir, None if address is None else str(address))


def adopt(run: RunDirectory, experiment: Experiment, plan: Plan | None = None) -> None:
    """Let a run go by another configuration, in this resumption and in those that follow.

    Args:
        run: its directory.
        experiment: the configuration.
        plan: that it follows; None: the same as before, or none.

    Raises:
        RunDirectoryError: the directory cannot be written.
    """
    _write(run.path / CONFIG_FILE, dump_yaml(experiment))
    if plan is not None:
        _write(run.path / FOLLOWED_FILE, plan.model_dump_json(indent=2) + "\n")


def check_drift(saved: Experiment, wanted: Experiment, *, allow: bool) -> None:
    """Refuse to resume with another configuration than the run was made with.

    Raises:
        ConfigDriftError: listing the differences, unless they are allowed.
    """
    if allow or digest(saved) == digest(wanted):
        return
    lines = "\n    ".join(diff(saved, wanted))
    raise ConfigDriftError(f"the configuration differs from that of the run:\n    {lines}")


def plan_of(experiment: Experiment, base_dir: Path) -> dict[str, object]:
    """What runs where, as plain values for ``plan.json``."""
    chosen = experiment.model_dump(include={"strategy", "codec"})
    return {
        "base_dir": str(base_dir),
        "averager_region": experiment.averager_region,
        **chosen,
        "regions": [
            {
                "name": region.name,
                "workers": region.workers,
                "ps_shards": region.ps_shards,
                "cpus_per_worker": region.cpus_per_worker,
                "gpus_per_worker": region.gpus_per_worker,
            }
            for region in experiment.regions
        ],
        "predicted_seconds": None,
        "predicted_usd": None,
    }


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunDirectoryError(f"cannot write {path}: {error.strerror}") from error
