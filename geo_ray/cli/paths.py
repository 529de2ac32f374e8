"""Paths and options that commands share.

They are checked before slow imports.
"""

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
    """Import modules that take seconds; say so, and every few seconds how long it takes.

    Modules of geo_ray itself are reported only if they take long.

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
    """Say what is done on standard error, and every few seconds how long it has taken.

    Args:
        what: such as "checking sma".
    """
    _say(what)
    with ticking(what, _say):
        yield


def _say(text: str) -> None:
    click.echo(text, err=True)


def config_file(_: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Take a file that exists; for click's ``callback``.

    Raises:
        ConfigError: there is none; names what is like it.
    """
    if path is None or path.is_file():
        return path
    if path.is_dir():
        raise ConfigError(
            f"{path} is a directory, not a file", fix="Name a YAML file, such as run.yaml."
        )
    what = "plan" if parameter.name == "plan_file" else "configuration"
    endings = (".json",) if what == "plan" else (".yaml", ".yml")
    raise ConfigError(
        f"there is no {what} {path}{_near(path, endings)}",
        fix="Name a file that `geo-ray plan --out` has written."
        if what == "plan"
        else "Name a YAML file; `geo-ray init` writes some to begin with.",
    )


_MADE_BY = {
    "links": ("link table", "Name a file that `geo-ray probe --out` has written."),
    "profile_file": ("profile", "Name a file that `geo-ray profile` has written."),
    "loss_file": ("measured loss", "Name a file that `geo-ray profile --loss` has written."),
    "prices": ("file of prices", "Name a file as `geo-ray prices show --json` writes it."),
}


def existing_file(_: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Take a file of the kind that the option's name says; for click's ``callback``.

    Raises:
        ConfigError: there is none; names what is like it.
    """
    what, fix = _MADE_BY[str(parameter.name)]
    if path is None or path.is_file():
        return path
    if path.is_dir():
        raise ConfigError(f"{path} is a directory, no {what}", fix=fix)
    raise ConfigError(f"there is no {what} {path}{_near(path)}", fix=fix)


def existing_files(
    context: click.Context, parameter: click.Parameter, paths: tuple[Path, ...]
) -> tuple[Path, ...]:
    """The same for an option that may be given several times."""
    return tuple(path for path in paths if existing_file(context, parameter, path))


RunRef: TypeAlias = Path | str
"""The directory of a run, or its address in a bucket."""


class RunReference(click.ParamType):  # type: ignore[type-arg]  # click 8.1 has no arguments there
    """What names a run: a directory, or an ``s3://`` address, which is no path."""

    name = "run"

    def convert(self, value: RunRef, _: object, __: object) -> RunRef:
        """See click."""
        return value if isinstance(value, Path) or value.startswith("s3://") else Path(value)


def run_directory(_: click.Context, __: click.Parameter, path: RunRef | None) -> RunRef | None:
    """Take the directory of a run, or its address; for click's ``callback``.

    Raises:
        RunDirectoryError: there is none; names what is like it.
    """
    if path is None or isinstance(path, str) or path.is_dir():
        return path
    raise RunDirectoryError(
        f"{path} is a file, no run" if path.exists() else f"there is no run {path}{_near(path)}",
        fix="Name a directory that `geo-ray train` or `geo-ray simulate` has made; of a cluster "
        "the folder that `geo-ray up` has printed.",
    )


def check_config(path: Path, overrides: Sequence[str]) -> None:
    """Tell what is wrong with a configuration before Ray is imported, broken YAML before PyTorch.

    Raises:
        ConfigError: it is wrong.
    """
    strategy = _keys_of(path, overrides).get("strategy")
    if isinstance(strategy, dict) and strategy.get("kind") == "auto":
        return  # it is completed first, which takes measurements
    loading("torch", "geo_ray.experiment.experiment")
    from geo_ray.base.load import load_tree
    from geo_ray.experiment.experiment import Experiment

    with ticking(f"loading {path}", _say):
        load_tree(path, overrides, Experiment)


def check_search(path: Path, overrides: Sequence[str]) -> TuningConfig:
    """Read a search, and tell what is wrong with its own keys before Ray is imported.

    Raises:
        ConfigError: it is wrong.
    """
    _keys_of(path, overrides)
    loading("torch", "geo_ray.sweep.search_config")
    from geo_ray.base.load import load_tree
    from geo_ray.sweep.search_config import TuningConfig

    advice = "docs/guides/tuning.md describes the file of a search."
    return load_tree(path, overrides, TuningConfig, advice)


def check_search_directory(
    path: Path, search: TuningConfig, out: Path | None, *, resume: bool
) -> None:
    """Check the directory of a search before Ray is imported.

    Args:
        path: its file.
        search: what `check_search` has read there.
        out: as `geo-ray tune` takes it.
        resume: whether the search goes on.

    Raises:
        ConfigError: the base is wrong.
        TuningDirectoryError: it is there and must not be, or the other way round.
    """
    loading("torch", "geo_ray.sweep.space")
    from geo_ray.sweep.space import base_of_search, check_directory, directory_of

    with ticking(f"loading {path}", _say):
        start = base_of_search(search, path.parent).experiment()
    check_directory(directory_of(search, start, out), resume=resume)


def check_plan_section(path: Path, overrides: Sequence[str]) -> None:
    """Tell that there is nothing to plan with before anything is imported that takes time.

    Raises:
        ConfigError: the configuration has no section `plan`; shows one.
    """
    from geo_ray.planner.config import no_plan_section

    keys = _keys_of(path, overrides)
    regions = keys.get("regions")
    if not isinstance(regions, list) or keys.get("plan") is not None:
        return  # whoever reads all of it says what else is wrong
    raise no_plan_section([str(each.get("name")) for each in regions if isinstance(each, dict)])


def _keys_of(path: Path, overrides: Sequence[str]) -> dict[str, JSONValue]:
    from geo_ray.base.overrides import apply_overrides
    from geo_ray.base.yaml import parse_yaml, read_text

    tree = parse_yaml(read_text(path), str(path))
    if not isinstance(tree.value, dict):
        return {}  # whoever reads it says so
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
    help="Follow a plan of `geo-ray plan --out`: workers, batches, averager, interval, codec.",
)


def _key_instead(_: click.Context, __: click.Parameter, value: str | None) -> None:
    if value is not None:
        raise click.UsageError(
            f"there is no option --steps; did you mean --set train.steps={value}?"
        )


steps_hint = click.option(
    "--steps", hidden=True, expose_value=False, callback=_key_instead, is_eager=True
)
