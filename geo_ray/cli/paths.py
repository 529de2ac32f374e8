"""Paths and options shared by commands, checked before slow imports."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import click

from geo_ray.base.canonical import JSONValue
from geo_ray.base.errors import ConfigError, RunDirectoryError
from geo_ray.base.output import ticking

if TYPE_CHECKING:
    from geo_ray.sweep.search_config import TuningConfig


_PACKAGES: Final = {"torch": "PyTorch", "ray": "Ray", "pyarrow": "Arrow"}


def loading(*modules: str) -> None:
    """Import slow modules, and report the elapsed time every few seconds.

    Modules of geo_ray are reported only if they take long.

    Args:
        modules: names, such as "torch" or "geo_ray.api.train"; none: torch.
    """
    missing = [name for name in modules or ("torch",) if name not in sys.modules]
    packages = [_PACKAGES[name] for name in missing if name in _PACKAGES]
    what = f"loading {' and '.join(packages) or 'geo_ray'}"
    with telling(what) if packages else ticking(what, _say):
        for name in missing:
            importlib.import_module(name)


@contextmanager
def telling(what: str) -> Iterator[None]:
    """Report a step on standard error, and its elapsed time every few seconds.

    Args:
        what: the step, such as "checking sma".
    """
    _say(what)
    with ticking(what, _say):
        yield


def _say(text: str) -> None:
    click.echo(text, err=True)


def config_file(_: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Return the path of an existing file; for click's ``callback``.

    Raises:
        ConfigError: the file does not exist; names similar files.
    """
    if path is None or path.is_file():
        return path
    if path.is_dir():
        raise ConfigError(
            f"{path} is a directory, not a file", fix="Give a YAML file, such as run.yaml."
        )
    what = "plan" if parameter.name == "plan_file" else "configuration"
    endings = (".json",) if what == "plan" else (".yaml", ".yml")
    raise ConfigError(
        f"no {what} {path}{_near(path, endings)}",
        fix="Give a file written by `geo-ray plan --out`."
        if what == "plan"
        else "Give a YAML file; `geo-ray init` writes examples.",
    )


_MADE_BY = {
    "links": ("link table", "Give a file written by `geo-ray probe --out`."),
    "profile_file": ("profile", "Give a file written by `geo-ray profile`."),
    "loss_file": ("measured loss", "Give a file written by `geo-ray profile --loss`."),
    "prices": ("price file", "Give a file in the format of `geo-ray prices show --json`."),
}


def existing_file(_: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Return the path of a file of the kind that the option's name implies; for ``callback``.

    Raises:
        ConfigError: the file does not exist; names similar files.
    """
    what, fix = _MADE_BY[str(parameter.name)]
    if path is None or path.is_file():
        return path
    if path.is_dir():
        raise ConfigError(f"{path} is a directory, not a {what}", fix=fix)
    raise ConfigError(f"no {what} {path}{_near(path)}", fix=fix)


def existing_files(
    context: click.Context, parameter: click.Parameter, paths: tuple[Path, ...]
) -> tuple[Path, ...]:
    """Do the same for an option that may be given several times."""
    return tuple(path for path in paths if existing_file(context, parameter, path))


RunRef: TypeAlias = Path | str
"""The directory of a run, or its address in a bucket."""


class RunReference(click.ParamType):  # type: ignore[type-arg]  # click 8.1 has no arguments there
    """Parameter type of a run: a directory, or an ``s3://`` address."""

    name = "run"

    def convert(self, value: RunRef, _: object, __: object) -> RunRef:
        """See click."""
        return value if isinstance(value, Path) or value.startswith("s3://") else Path(value)


def run_directory(_: click.Context, __: click.Parameter, path: RunRef | None) -> RunRef | None:
    """Return the directory or address of a run; for click's ``callback``.

    Raises:
        RunDirectoryError: the run does not exist; names similar directories.
    """
    if path is None or isinstance(path, str) or path.is_dir():
        return path
    raise RunDirectoryError(
        f"{path} is a file, not a run" if path.exists() else f"no run {path}{_near(path)}",
        fix="Give a directory written by `geo-ray train` or `geo-ray simulate`; for a cluster, the "
        "directory that `geo-ray up` printed.",
    )


def check_config(path: Path, overrides: Sequence[str], *, loads_loops: bool = False) -> None:
    """Check a configuration before Ray is imported, and its YAML before PyTorch is imported.

    Args:
        path: file of the configuration.
        overrides: as for ``--set``.
        loads_loops: execute the files of loops, and report those that cannot be loaded.

    Raises:
        ConfigError: the configuration is invalid.
    """
    keys = _keys_of(path, overrides)
    strategy = keys.get("strategy")
    if isinstance(strategy, dict) and strategy.get("kind") == "auto":
        return  # it is completed by measurements first
    loading("torch", "geo_ray.experiment.experiment")
    from geo_ray.base.load import load_tree
    from geo_ray.experiment.experiment import Experiment
    from geo_ray.experiment.regions import loop_problems

    with ticking(f"loading {path}", _say):
        found = loop_problems(keys.get("regions"), path.parent) if loads_loops else {}
        load_tree(path, overrides, Experiment, found=found)


def check_search(path: Path, overrides: Sequence[str]) -> TuningConfig:
    """Read a search and check its own keys before Ray is imported.

    Raises:
        ConfigError: the search is invalid.
    """
    _keys_of(path, overrides)
    loading("torch", "geo_ray.sweep.search_config")
    from geo_ray.base.load import load_tree
    from geo_ray.sweep.search_config import TuningConfig

    advice = "docs/guides/tuning.md describes search files."
    return load_tree(path, overrides, TuningConfig, advice)


def check_search_directory(
    path: Path, search: TuningConfig, out: Path | None, *, resume: bool
) -> None:
    """Check the directory of a search before Ray is imported.

    Args:
        path: file of the search.
        search: the search in that file.
        out: the ``--out`` of `geo-ray tune`.
        resume: whether the search is resumed.

    Raises:
        ConfigError: the base configuration is invalid.
        TuningDirectoryError: the directory exists without ``resume``, or is missing with it.
    """
    loading("torch", "geo_ray.sweep.space")
    from geo_ray.sweep.space import base_of_search, check_directory, directory_of

    with ticking(f"loading {path}", _say):
        start = base_of_search(search, path.parent).experiment()
    check_directory(directory_of(search, start, out), resume=resume)


def check_plan_section(path: Path, overrides: Sequence[str]) -> None:
    """Reject a configuration without a section `plan` before slow imports.

    Raises:
        ConfigError: the section is missing; the message has an example.
    """
    from geo_ray.planner.config import no_plan_section

    keys = _keys_of(path, overrides)
    regions = keys.get("regions")
    if not isinstance(regions, list) or keys.get("plan") is not None:
        return  # the complete check reports other errors
    known = [each for each in regions if isinstance(each, dict)]
    groups = [group for each in known if isinstance(group := each.get("group"), dict)]
    if any(each.get("join") for each in known) or any("loop" in group for group in groups):
        return  # and that runs with loops of users have no plan
    raise no_plan_section([str(each.get("name")) for each in known])


def _keys_of(path: Path, overrides: Sequence[str]) -> dict[str, JSONValue]:
    from geo_ray.base.overrides import apply_overrides
    from geo_ray.base.yaml import parse_yaml, read_text

    tree = parse_yaml(read_text(path), str(path))
    if not isinstance(tree.value, dict):
        return {}  # the reader reports it
    tree = apply_overrides(tree, overrides)
    return tree.value if isinstance(tree.value, dict) else {}


def _near(path: Path, endings: Sequence[str] = ()) -> str:
    from geo_ray.base.text import missing_path

    return missing_path(path, endings)


plan_option = click.option(
    "--plan",
    "plan_file",
    type=click.Path(path_type=Path),
    callback=config_file,
    help="Use a plan of `geo-ray plan --out`: workers, batches, averager, interval and codec.",
)


dry_run_option = click.option(
    "--dry-run",
    is_flag=True,
    help="Check everything that needs no cluster; start nothing.",
)


def _key_instead(_: click.Context, __: click.Parameter, value: str | None) -> None:
    if value is not None:
        raise click.UsageError(f"no option --steps; did you mean --set train.steps={value}?")


steps_hint = click.option(
    "--steps", hidden=True, expose_value=False, callback=_key_instead, is_eager=True
)
