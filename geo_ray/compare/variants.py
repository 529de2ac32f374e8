"""What is compared: a workload with one strategy, and whatever else differs, in place of its own.

A variant is written ``KIND:KEY=VALUE:KEY=VALUE``, for example ``diloco:interval=16:codec=int4``. A
key belongs to the strategy, unless it begins with another section of the configuration
(``train.``, ``overlay.``, ``optimizer.`` and so on); ``codec`` alone names the codec of both ways,
where it can be both, and ``up`` and ``down`` that of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from geo_ray.config.experiment import Experiment
from geo_ray.config.load import load_tree
from geo_ray.config.nearest import nearest
from geo_ray.errors import ConfigError
from geo_ray.strategies.registry import STRATEGIES
from geo_ray.strategies.traits import rate_key

_UP_ONLY: Final = ("bisparse", "dgt", "chunked_topk")


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to do it.

    Attributes:
        label: as the user wrote it; its name in tables.
        overrides: what it changes in the workload's configuration, as for ``--set``.
    """

    label: str
    overrides: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """One run to be made.

    Attributes:
        variant: of what.
        rate: factor on the learning rate.
        seed: of the run.
    """

    variant: Variant
    rate: float
    seed: int

    @property
    def name(self) -> str:
        """Name of its directory."""
        safe = "".join(c if c.isalnum() else "-" for c in self.variant.label).strip("-")
        return f"{safe}_x{self.rate:g}_s{self.seed}"


def parse_variant(text: str) -> Variant:
    """Read ``KIND:KEY=VALUE:...``.

    Raises:
        ConfigError: there is no such strategy, or a part is no ``KEY=VALUE``.
    """
    kind, *parts = text.strip().split(":")
    if kind not in STRATEGIES:
        near = nearest(kind, STRATEGIES)
        hint = f"; did you mean {near}?" if near else ""
        raise ConfigError(
            f"--strategies {text}: there is no strategy '{kind}'{hint}",
            fix=f"Choose among {', '.join(STRATEGIES)}.",
        )
    overrides = [f"strategy={{kind: {kind}}}", *_default_kinds(kind, parts)]
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise ConfigError(
                f"--strategies {text}: '{part}' is not of the form key=value",
                fix="Write for example diloco:interval=16:codec=int4.",
            )
        overrides += _overrides(key.strip(), value.strip())
    return Variant(text.strip(), tuple(overrides))


def _default_kinds(strategy: str, parts: Sequence[str]) -> list[str]:
    """Sections of the strategy of which single keys are given are still of their default kind."""
    found = {}
    for name in [part.split(".")[0] for part in parts if "." in part.partition("=")[0]]:
        field = STRATEGIES[strategy].model_fields.get(name)
        kind = getattr(field.default, "kind", None) if field is not None else None
        if kind is not None:
            found[name] = f"strategy.{name}={{kind: {kind}}}"
    return list(found.values())


def _overrides(key: str, value: str) -> list[str]:
    if key in ("codec", "up", "down"):
        ways = ("up", "down") if key == "codec" else (key,)
        if key == "codec" and value in _UP_ONLY:
            ways = ("up",)
        return [f"codec.{way}={{kind: {value}}}" for way in ways]
    own = key.split(".")[0] not in Experiment.model_fields
    return [f"strategy.{key}={value}" if own else f"{key}={value}"]


def experiment_of(case: Case, config: Path, common: Sequence[str], out: Path) -> Experiment:
    """The configuration of one run.

    Args:
        case: which.
        config: the workload.
        common: what the user changes in all of them, as for ``--set``.
        out: directory that holds the runs.

    Raises:
        ConfigError: it cannot be.
    """
    overrides = [
        *common,
        *case.variant.overrides,
        f"seed={case.seed}",
        "name=run",
        f'run.dir="{out}"',
        "checkpoint.every_s=null",
    ]
    experiment = load_tree(config, overrides, Experiment)
    if case.rate == 1.0:
        return experiment
    section, _, last = rate_key(experiment.strategy).rpartition(".")
    holder: Any = experiment
    for name in section.split("."):
        holder = getattr(holder, name)
    # The whole section, since what is a default is not in the file.
    changed = holder.model_copy(update={last: getattr(holder, last) * case.rate})
    return load_tree(config, [*overrides, f"{section}={changed.model_dump_json()}"], Experiment)
