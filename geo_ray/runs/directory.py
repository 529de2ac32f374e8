"""The directory of a run: composed configuration, plan, event log and checkpoints."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import TypeAdapter, ValidationError

from geo_ray.base.canonical import JSONValue
from geo_ray.base.errors import ConfigChangedError, ConfigError, RunDirectoryError, RunHeldError
from geo_ray.base.files import make_directory, save_text
from geo_ray.base.load import changes, dump_yaml, load_tree
from geo_ray.base.yaml import parse_yaml, read_text
from geo_ray.experiment.recorded import RecordedConfig
from geo_ray.planner.plan import Plan, load_plan
from geo_ray.runs.lease import LEASE_KEY
from geo_ray.runs.remote import RunObjects, copied_from, empty_copy
from geo_ray.storage.conditional_store import ConditionalStore
from geo_ray.storage.uri import is_s3, join
from geo_ray.telemetry.export.base import Scalar

if TYPE_CHECKING:
    from geo_ray.experiment.experiment import Experiment


CONFIG_FILE = "config.lock.yaml"
PLAN_FILE = "plan.json"
FOLLOWED_FILE = "followed_plan.json"
MODEL_FILE = "model.safetensors"
BEST_FILE = "model-best.safetensors"
_MOST_PLAN_BYTES: Final = 1_000_000
_PLAN: Final = TypeAdapter(dict[str, Any])
_EXECUTION: Final = ("run", "cluster", "observe", "checkpoint", "plan", "provider", "autoscale")
_NO_HYPERPARAMETERS: Final = (*_EXECUTION, "name", "transport", "lan")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths of one run.

    Attributes:
        path: the absolute directory; for a run in a bucket, this machine's copy.
        base_dir: base of relative paths in the configuration.
        address: address of a run in a bucket; None for a directory.
    """

    path: Path
    base_dir: Path
    address: str | None = None

    @property
    def shown(self) -> str:
        """The user's name of the run."""
        return str(self.path) if self.address is None else self.address

    @property
    def checkpoints(self) -> Path:
        """Directory of checkpoints."""
        return self.path / "checkpoints"

    @property
    def data(self) -> str:
        """Directory or address of generated data."""
        return str(self.path / "data") if self.address is None else join(self.address, "data")

    @property
    def links(self) -> Path:
        """Measured links between regions."""
        return self.path / "links.json"

    @property
    def model(self) -> Path:
        """The trained model, a safetensors file with the module's names."""
        return self.path / MODEL_FILE

    @property
    def best_model(self) -> Path:
        """The best evaluated model, with `train.keep_best`; a file like `model`."""
        return self.path / BEST_FILE


def create(
    experiment: Experiment,
    base_dir: Path,
    reason: str | None = None,
    followed: Plan | None = None,
    *,
    exact: bool = False,
) -> RunDirectory:
    """Create the directory of a new run: ``run.dir/name``, or ``name-2`` and so on if that exists.

    In a bucket the name is reserved, and the directory is this machine's copy.

    Args:
        experiment: the run.
        base_dir: base of relative paths in its configuration.
        reason: reason for strategy and codec, if `auto` chose them.
        followed: the plan that the experiment follows; stored in the directory.
        exact: use only ``run.dir/name``. An incomplete directory is completed; the lease decides
            between two processes that create it at the same time.

    Raises:
        RunDirectoryError: the directory cannot be written.
        StoreError: the bucket does not answer or refuses.
    """
    run = _begin(experiment, base_dir.absolute(), exact=exact)
    path = run.path
    save_text(path / CONFIG_FILE, dump_yaml(experiment))
    plan = plan_of(experiment) | {"reason": reason}
    plan |= _origin(experiment, run.base_dir)
    if followed is not None:
        plan |= {"predicted_seconds": followed.total_s, "predicted_usd": followed.total_usd}
        save_text(path / FOLLOWED_FILE, followed.model_dump_json(indent=2) + "\n")
    save_text(path / PLAN_FILE, json.dumps(plan, indent=2) + "\n")
    return run


def local_root(experiment: Experiment) -> Path:
    """Return this machine's directory for shared files, such as profiles."""
    return Path("runs" if is_s3(experiment.run.dir) else experiment.run.dir)


def lease_of(run: RunDirectory) -> ConditionalStore | None:
    """Return the store of the lease of a run in a bucket; None: in its directory."""
    return None if run.address is None else RunObjects(run.address).lease()


def discard(run: RunDirectory) -> None:
    """Remove a run that did not begin, to free its name."""
    if run.address is not None:
        RunObjects(run.address).discard()
    shutil.rmtree(run.path, ignore_errors=True)


def is_run(place: Path | str) -> bool:
    """Return whether a complete run exists in a directory or at an address.

    Raises:
        StoreError: the bucket does not answer or refuses.
    """
    if isinstance(place, str):
        return PLAN_FILE in RunObjects(place).files()
    return (place / PLAN_FILE).is_file()


def _begin(experiment: Experiment, base_dir: Path, *, exact: bool) -> RunDirectory:
    root = Path(experiment.run.dir).absolute()
    number = 1
    while True:
        name = experiment.name if number == 1 else f"{experiment.name}-{number}"
        path = root / name
        if is_s3(experiment.run.dir):
            address = join(experiment.run.dir, name)
            if RunObjects(address).begin() or (exact and not is_run(address)):
                return RunDirectory(empty_copy(address), base_dir, address)
            if exact:
                raise _made_elsewhere(address)
            number += 1
            continue
        try:
            make_directory(path)
            return RunDirectory(path, base_dir)
        except FileExistsError as error:
            is_foreign = exact and not is_run(path) and not _is_half_made(path)
            if is_foreign or not path.is_dir():
                raise RunDirectoryError(
                    f"{path} exists already: "
                    + ("it has other files" if is_foreign else str(error.strerror)),
                    fix="Move it away, or choose another `name` or `run.dir`.",
                ) from error
            if exact and not is_run(path):
                return RunDirectory(path, base_dir)
            if exact:
                raise _made_elsewhere(str(path)) from error
            number += 1
        except OSError as error:
            raise RunDirectoryError(f"cannot create {path}: {error.strerror}") from error


def _is_half_made(path: Path) -> bool:
    """Return whether a directory has only the files that precede a run's plan."""
    first = (CONFIG_FILE, FOLLOWED_FILE, LEASE_KEY)
    try:
        return all(each.name.lstrip(".").startswith(first) for each in path.iterdir())
    except NotADirectoryError:
        return False


def _made_elsewhere(name: str) -> RunHeldError:
    return RunHeldError(
        f"another process has just created {name}",
        fix="Run the command again to continue that run.",
    )


def followed_plan(run: RunDirectory) -> Plan | None:
    """Return the plan that the run follows, or None.

    Raises:
        PlanError: the plan cannot be read.
    """
    path = run.path / FOLLOWED_FILE
    return load_plan(path) if path.exists() else None


def reopen(
    path: Path,
    *,
    allowed: Collection[str] = (),
    read_only: bool = False,
    near: Path | None = None,
) -> tuple[RunDirectory, Experiment]:
    """Open the directory of an earlier run.

    Files that the configuration names by a relative path (task, strategy, codec, manifest) are
    looked up in ``near``, in the directory from which the run was started, and in the working
    directory. No file is taken from the run's own directory or bucket, because a process with write
    access there could otherwise execute code here.

    Args:
        path: the directory.
        allowed: user files in the configuration that may have changed since.
        read_only: only read the run, without importing user code; the configuration cannot be run
            then.
        near: the first place to look up files.

    Returns:
        Paths and configuration of the run.

    Raises:
        RunDirectoryError: ``path`` is not a run directory.
        ConfigError: its configuration cannot be read, or one of its files is not found or is in the
            run directory.
        ConfigChangedError: the file of a custom task, strategy or codec has changed since.
    """
    from geo_ray.experiment.experiment import Experiment

    path = _existing(path)
    origin, address = _read_origin(path), copied_from(path)
    file = path / CONFIG_FILE
    saved = load_tree(file, [], Experiment, base_dir=origin.base_dir, read_only=True)
    base_dir = _find_base_dir(path, origin, _named_files(saved, origin.task_sha256), near)
    run = RunDirectory(path, base_dir.absolute(), address)
    if read_only:
        return run, saved
    files = own_files(saved)
    missing = [name for name in files if not (run.base_dir / name).is_file()]
    if missing:
        places = " or ".join(dict.fromkeys([str(origin.base_dir), str(Path.cwd())]))
        raise ConfigError(
            f"{missing[0]}, a file of run {path.name}, does not exist in {places}",
            fix="Run the command in the directory from which the run was started, or in a copy of "
            "it; or give a configuration next to the file: `geo-ray train CONFIG --resume RUN`.",
        )
    check_files(run, saved)
    experiment = load_tree(file, [], Experiment, base_dir=run.base_dir, may_change=allowed)
    return run, experiment


def check_files(run: RunDirectory, experiment: Experiment) -> None:
    """Reject user files that are in the run directory itself.

    Raises:
        ConfigError: a file of the configuration is in the run directory.
    """
    place = run.path.resolve()
    for name in own_files(experiment):
        if (run.base_dir / name).resolve().is_relative_to(place):
            raise ConfigError(
                f"{name}, a file of run {run.path.name}, is in the run's own directory, from which "
                "no code is executed",
                fix="Check the file. If you trust it, copy it elsewhere, and use a configuration "
                "next to it: `geo-ray train CONFIG --resume RUN`.",
            )


def recorded_run(path: Path) -> tuple[RunDirectory, RecordedConfig]:
    """Open the directory of a run for reading; imports neither PyTorch nor user code.

    Args:
        path: the directory.

    Raises:
        RunDirectoryError: ``path`` is not a run directory.
        ConfigError: its configuration cannot be read.
    """
    path = _existing(path)
    origin, address = _read_origin(path), copied_from(path)
    config = load_tree(path / CONFIG_FILE, [], RecordedConfig)
    return RunDirectory(path, origin.base_dir, address), config


def hyperparameters(path: Path) -> dict[str, Scalar]:
    """Return the configuration of a run as flat values by key, such as ``optimizer.lr``.

    Without sections that do not influence the result, and without null and empty values. Items of
    lists have their name as key, or their number; a list of plain values is JSON.

    Args:
        path: directory of the run.

    Raises:
        ConfigError: its configuration cannot be read.
    """
    file = path / CONFIG_FILE
    tree = parse_yaml(read_text(file), str(file)).value
    found: dict[str, Scalar] = {}
    for name, value in (tree if isinstance(tree, dict) else {}).items():
        if name not in _NO_HYPERPARAMETERS:
            _flatten(name, value, found)
    return found


def _flatten(key: str, value: JSONValue, into: dict[str, Scalar]) -> None:
    if isinstance(value, dict):
        for name, inner in value.items():
            _flatten(f"{key}.{name}", inner, into)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for number, item in enumerate(value):
            if isinstance(item, dict):
                rest = {inner: each for inner, each in item.items() if inner != "name"}
                _flatten(f"{key}.{item.get('name', number)}", rest, into)
    elif isinstance(value, list):
        if value:
            into[key] = json.dumps(value)
    elif value is not None:
        into[key] = value


def _existing(path: Path) -> Path:
    path = path.absolute()
    if not path.is_dir():
        raise RunDirectoryError(
            f"{path} is a file, not a run" if path.exists() else f"no run {path}",
            fix="Give a directory written by `geo-ray train` or `geo-ray simulate`.",
        )
    return path


@dataclass(frozen=True, slots=True)
class _Origin:
    """Origin of a run: directories and task.

    Attributes:
        base_dir: base of relative paths in its configuration.
        work_dir: the working directory.
        task_sha256: digest of the user's task file; None if the task is in a package.
    """

    base_dir: Path
    work_dir: Path
    task_sha256: str | None


def _origin(experiment: Experiment, base_dir: Path) -> dict[str, object]:
    task = _file_of(experiment.task.use)
    return {
        "base_dir": str(base_dir),
        "work_dir": str(Path.cwd()),
        "task_sha256": None if task is None else _sha256(base_dir / task),
    }


def _read_origin(path: Path) -> _Origin:
    """Read the origin of a run."""
    try:
        plan = _read_plan(path)
        base_dir, work_dir = Path(str(plan["base_dir"])), Path(str(plan["work_dir"]))
        digest = plan["task_sha256"]
    except (OSError, ValueError, KeyError) as error:
        raise RunDirectoryError(
            f"{path} is not a run directory: {PLAN_FILE} cannot be read ({error})",
            fix="Give a directory written by `geo-ray train`, such as runs/quickstart. For a run "
            "that is being created, retry in a moment.",
        ) from error
    return _Origin(base_dir, work_dir, None if digest is None else str(digest))


def _read_plan(path: Path) -> dict[str, Any]:
    """Read the ``plan.json`` of a run, which is untrusted input.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a JSON object, or too large.
    """
    with (path / PLAN_FILE).open("rb") as file:
        data = file.read(_MOST_PLAN_BYTES + 1)
    if len(data) > _MOST_PLAN_BYTES:
        raise ValueError(f"it has more than {_MOST_PLAN_BYTES} bytes")
    try:
        return _PLAN.validate_json(data)
    except ValidationError as error:
        raise ValueError(error.errors()[0]["msg"]) from None


def _find_base_dir(
    path: Path, origin: _Origin, files: Mapping[str, str | None], near: Path | None
) -> Path:
    """Find the base of the relative paths in a run's configuration.

    It is a directory that has all files of the run with their original content; otherwise one
    that has all files, so that an edited file is reported rather than ignored.
    """
    here = Path.cwd()
    places = [] if near is None else [near]
    if origin.base_dir.is_relative_to(origin.work_dir):
        places.append(here / origin.base_dir.relative_to(origin.work_dir))
    places += [origin.base_dir, here]
    there = [each for each in places if all((each / name).is_file() for name in files)]
    for each in there:
        if all(sha256 in (None, _sha256(each / name)) for name, sha256 in files.items()):
            if each != there[0]:
                _log.warning(
                    "%s uses its original files in %s; those in %s differ",
                    *(path.name, each, there[0]),
                )
            return each
    return there[0] if there else origin.base_dir


def _named_files(experiment: Experiment, task_sha256: str | None) -> dict[str, str | None]:
    """Give the relative files that a configuration names, with their SHA-256 if known."""
    files = own_files(experiment)
    task = _file_of(experiment.task.use)
    if task is not None:
        files[task] = task_sha256
    manifest = experiment.data.manifest
    if manifest is not None and "://" not in manifest:
        files[manifest] = None
    return {name: sha256 for name, sha256 in files.items() if not Path(name).is_absolute()}


def own_files(experiment: Experiment) -> dict[str, str | None]:
    """Give the files of the custom task, strategy and codecs, and the digests of sections."""
    sections = (experiment.task, experiment.strategy, experiment.codec.up, experiment.codec.down)
    files = {}
    for section in sections:
        name = _file_of(str(getattr(section, "use", "")))
        if name is not None:
            files[name] = getattr(section, "sha256", None)
    return files


def _file_of(use: str) -> str | None:
    """Return the file of ``path/to/file.py:Class``, or None."""
    where = use.rpartition(":")[0]
    return where if where.endswith(".py") else None


def _sha256(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def adopt(run: RunDirectory, experiment: Experiment, plan: Plan | None = None) -> None:
    """Change the configuration of a run for this resume and later ones.

    Args:
        run: its directory.
        experiment: the configuration.
        plan: a new plan to follow; None: no change.

    Raises:
        RunDirectoryError: the directory cannot be written.
    """
    save_text(run.path / CONFIG_FILE, dump_yaml(experiment))
    try:
        written = _read_plan(run.path)
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"cannot read {run.path / PLAN_FILE}: {error}") from error
    written |= _origin(experiment, run.base_dir)
    save_text(run.path / PLAN_FILE, json.dumps(written, indent=2) + "\n")
    if plan is not None:
        save_text(run.path / FOLLOWED_FILE, plan.model_dump_json(indent=2) + "\n")


def has_moved(run: RunDirectory, experiment: Experiment, named: Collection[str] = ()) -> bool:
    """Return whether a run continues from another directory, or with a changed task file.

    Args:
        run: its directory, with the current location of its files.
        experiment: the configuration to continue with.
        named: user files that may have changed.

    Raises:
        ConfigChangedError: the task's file has changed without being allowed.
    """
    origin = _read_origin(run.path)
    task = _file_of(experiment.task.use)
    digest = None if task is None else _sha256(run.base_dir / task)
    if task is not None and task not in named and origin.task_sha256 not in (None, digest):
        raise ConfigChangedError(
            f"task {experiment.task.use}: {run.base_dir / task} is not the file with which the run "
            "was made",
            fix=f"Restore the file; or allow the change with --allow-change {task}.",
        )
    return (origin.base_dir, origin.task_sha256) != (run.base_dir, digest)


def check_changes(saved: Experiment, wanted: Experiment, named: Collection[str]) -> dict[str, str]:
    """Reject changes of the configuration that are not allowed.

    Keys that only determine where and how a run is executed may always change.

    Args:
        saved: configuration of the run.
        wanted: configuration to continue with.
        named: dotted keys that may change; each includes all keys below it.

    Returns:
        The changes: dotted keys, each with ``old -> new``.

    Raises:
        ConfigChangedError: lists the changes that are not allowed.
    """
    found = changes(saved, wanted)
    may = (*named, *_EXECUTION)
    unnamed = {
        key: change
        for key, change in found.items()
        if not any(key == each or key.startswith(f"{each}.") for each in may)
    }
    if unnamed:
        lines = "\n    ".join(f"{key}: {change}" for key, change in unnamed.items())
        allow = " ".join(f"--allow-change {key}" for key in unnamed)
        raise ConfigChangedError(
            f"the configuration differs from that of the run:\n    {lines}",
            fix="Omit CONFIG to continue with the run's configuration, or allow the changes: "
            f"{allow}.",
        )
    return found


def plan_of(experiment: Experiment) -> dict[str, object]:
    """Return the placement of processes as plain values for ``plan.json``."""
    chosen = experiment.model_dump(include={"strategy", "codec"})
    return {
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
