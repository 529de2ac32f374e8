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

from geo_ray.base.errors import ConfigChangedError, ConfigError, RunDirectoryError, RunHeldError
from geo_ray.base.files import make_directory, save_text
from geo_ray.base.load import changes, dump_yaml, load_tree
from geo_ray.experiment.recorded import RecordedConfig
from geo_ray.planner.plan import Plan, load_plan
from geo_ray.runs.lease import LEASE_KEY
from geo_ray.runs.remote import RunObjects, copied_from, empty_copy
from geo_ray.storage.conditional_store import ConditionalStore
from geo_ray.storage.uri import is_s3, join

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
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths of one run.

    Attributes:
        path: the directory, absolute; of a run in a bucket, this machine's copy.
        base_dir: where relative paths of the configuration start.
        address: of a run whose directory is in a bucket, as it was named; None: it is not.
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
    *,
    exact: bool = False,
) -> RunDirectory:
    """Make the directory of a new run: ``run.dir/name``, or ``name-2`` and so on if that is taken.

    In a bucket the name is taken, and the directory is this machine's copy.

    Args:
        experiment: the run.
        base_dir: where relative paths of its configuration start.
        reason: why strategy and codec are what they are, if they were chosen by `auto`.
        followed: the plan of `geo-ray plan` that the experiment follows; kept beside it.
        exact: ``run.dir/name`` or nothing. One whose making was interrupted is completed; two
            processes that make it at once are told apart by its lease.

    Raises:
        RunDirectoryError: if it cannot be written.
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


def is_run(place: Path | str) -> bool:
    """Whether there is a run in a directory or at an address, made to the end.

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
                    f"{path} is in the way: "
                    + ("it has files of something else" if is_foreign else str(error.strerror)),
                    fix="Move it away, or choose another `name` or `run.dir`.",
                ) from error
            if exact and not is_run(path):
                return RunDirectory(path, base_dir)
            if exact:
                raise _made_elsewhere(str(path)) from error
            number += 1
        except OSError as error:
            raise RunDirectoryError(f"cannot make {path}: {error.strerror}") from error


def _is_half_made(path: Path) -> bool:
    """Whether a directory has nothing but what is written before a run's plan."""
    first = (CONFIG_FILE, FOLLOWED_FILE, LEASE_KEY)
    try:
        return all(each.name.lstrip(".").startswith(first) for each in path.iterdir())
    except NotADirectoryError:
        return False


def _made_elsewhere(name: str) -> RunHeldError:
    return RunHeldError(
        f"another process has just made {name}", fix="Run the command again to continue that run."
    )


def followed_plan(run: RunDirectory) -> Plan | None:
    """The plan of `geo-ray plan` that the run follows; None if it follows none.

    Raises:
        PlanError: it cannot be read.
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
    looked for in ``near``, in the directory that the run was started from, and in the present one.
    No file is taken from the run's own directory or bucket: whoever can write there could
    otherwise run code here.

    Args:
        path: the directory.
        allowed: files of the user's, as the configuration names them, that may have changed since.
        read_only: only read the run: import nothing that its configuration names. Nothing can be
            run with the configuration then.
        near: where to look for files before all other places.

    Returns:
        Its paths, and its configuration.

    Raises:
        RunDirectoryError: if ``path`` is no run directory.
        ConfigError: if its configuration cannot be read, or a file that it names is not found or
            lies in the run.
        ConfigChangedError: if a file with the user's task, strategy or codec has changed since.
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
            fix="Run the command where the run was started from, or in a copy of that directory; "
            "or name the configuration next to the file: `geo-ray train CONFIG --resume RUN`.",
        )
    check_files(run, saved)
    experiment = load_tree(file, [], Experiment, base_dir=run.base_dir, may_change=allowed)
    return run, experiment


def check_files(run: RunDirectory, experiment: Experiment) -> None:
    """Refuse to import a file of the user's that lies in the run itself.

    Raises:
        ConfigError: one does, by whatever path the configuration names it.
    """
    place = run.path.resolve()
    for name in own_files(experiment):
        if (run.base_dir / name).resolve().is_relative_to(place):
            raise ConfigError(
                f"{name}, a file of run {run.path.name}, lies in the run's own directory, from "
                "which no code is run",
                fix="Read the file. If you trust it, copy it elsewhere, and name it in a "
                "configuration next to it: `geo-ray train CONFIG --resume RUN`.",
            )


def recorded_run(path: Path) -> tuple[RunDirectory, RecordedConfig]:
    """Open the directory of a run to read it; imports neither PyTorch nor code of the user.

    Args:
        path: the directory.

    Raises:
        RunDirectoryError: if ``path`` is no run directory.
        ConfigError: if its configuration cannot be read.
    """
    path = _existing(path)
    origin, address = _read_origin(path), copied_from(path)
    config = load_tree(path / CONFIG_FILE, [], RecordedConfig)
    return RunDirectory(path, origin.base_dir, address), config


def _existing(path: Path) -> Path:
    path = path.absolute()
    if not path.is_dir():
        raise RunDirectoryError(
            f"{path} is a file, no run" if path.exists() else f"there is no run {path}",
            fix="Name a directory that `geo-ray train` or `geo-ray simulate` has made.",
        )
    return path


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where a run was started from, and with which task.

    Attributes:
        base_dir: where relative paths of its configuration start.
        work_dir: the working directory.
        task_sha256: of the file with the user's task; None if the task is in a package.
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
    """Read where a run was started from."""
    try:
        plan = _read_plan(path)
        base_dir, work_dir = Path(str(plan["base_dir"])), Path(str(plan["work_dir"]))
        digest = plan["task_sha256"]
    except (OSError, ValueError, KeyError) as error:
        raise RunDirectoryError(
            f"{path} is no run directory: {PLAN_FILE} cannot be read ({error})",
            fix="Name a directory that `geo-ray train` made, such as runs/quickstart. One that is "
            "being made has the file in a moment.",
        ) from error
    return _Origin(base_dir, work_dir, None if digest is None else str(digest))


def _read_plan(path: Path) -> dict[str, Any]:
    """Read the ``plan.json`` of a run, which anybody may have written.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no JSON object, or too large.
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
    """Find the directory in which the relative paths of a run's configuration start.

    It is the one that has all files of the run with the content that the run was made with; else
    one that has them all, so that a file which was edited is reported rather than passed over.
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
                    "%s goes on with the files of %s, which it was made with; those of %s differ",
                    *(path.name, each, there[0]),
                )
            return each
    return there[0] if there else origin.base_dir


def _named_files(experiment: Experiment, task_sha256: str | None) -> dict[str, str | None]:
    """Give the relative files that a configuration names, with their SHA-256 where it is known."""
    files = own_files(experiment)
    task = _file_of(experiment.task.use)
    if task is not None:
        files[task] = task_sha256
    manifest = experiment.data.manifest
    if manifest is not None and "://" not in manifest:
        files[manifest] = None
    return {name: sha256 for name, sha256 in files.items() if not Path(name).is_absolute()}


def own_files(experiment: Experiment) -> dict[str, str | None]:
    """Give the files with the user's task, strategy and codecs, and the digests of sections."""
    sections = (experiment.task, experiment.strategy, experiment.codec.up, experiment.codec.down)
    files = {}
    for section in sections:
        name = _file_of(str(getattr(section, "use", "")))
        if name is not None:
            files[name] = getattr(section, "sha256", None)
    return files


def _file_of(use: str) -> str | None:
    """The file of ``path/to/file.py:Class``; None for anything else."""
    where = use.rpartition(":")[0]
    return where if where.endswith(".py") else None


def _sha256(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def adopt(run: RunDirectory, experiment: Experiment, plan: Plan | None = None) -> None:
    """Let a run go by another configuration, in this resumption and in those that follow.

    Args:
        run: its directory.
        experiment: the configuration.
        plan: that it follows; None: the same as before, or none.

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
    """Whether a run continues from another directory, or with a changed file of its task.

    Args:
        run: its directory, with the place of its files as it is now.
        experiment: the configuration to go on with.
        named: files of the user's that may have changed.

    Raises:
        ConfigChangedError: the task's file has changed, and nobody has named it.
    """
    origin = _read_origin(run.path)
    task = _file_of(experiment.task.use)
    digest = None if task is None else _sha256(run.base_dir / task)
    if task is not None and task not in named and origin.task_sha256 not in (None, digest):
        raise ConfigChangedError(
            f"task {experiment.task.use}: {run.base_dir / task} is not the file that the run was "
            "made with",
            fix=f"Restore the file; or, if the change is meant, name it: --allow-change {task}.",
        )
    return (origin.base_dir, origin.task_sha256) != (run.base_dir, digest)


def check_changes(saved: Experiment, wanted: Experiment, named: Collection[str]) -> dict[str, str]:
    """Refuse to resume with a change that nobody has named.

    Keys that only say where and how a run is executed may change without being named.

    Args:
        saved: the configuration that the run went by.
        wanted: the one to go on with.
        named: dotted keys that may change; each stands for all keys below it, too.

    Returns:
        What changes: dotted keys, each with ``old -> new``.

    Raises:
        ConfigChangedError: listing the changes that nobody has named.
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
            fix=f"Leave CONFIG out to go on as the run was. If it is meant, name it: {allow}.",
        )
    return found


def plan_of(experiment: Experiment) -> dict[str, object]:
    """What runs where, as plain values for ``plan.json``."""
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
