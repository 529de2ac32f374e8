"""What is compared: a workload with one strategy, and whatever else differs, in place of its own.

A variant is written ``KIND:KEY=VALUE:KEY=VALUE``, for example ``diloco:interval=16:codec=int4``. A
key belongs to the strategy, unless it begins with another section of the configuration
(``train.``, ``overlay.``, ``optimizer.`` and so on); ``codec`` alone names the codec of both ways,
where it can be both, and ``up`` and ``down`` that of one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geo_ray.codecs.registry import CODECS, sections_of
from geo_ray.config.experiment import Experiment
from geo_ray.config.load import load_tree
from geo_ray.config.overrides import OptionText, typed
from geo_ray.config.source import ConfigSource
from geo_ray.errors import ConfigError
from geo_ray.strategies.registry import STRATEGIES, default_section
from geo_ray.util.nearest import nearest


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


@dataclass(frozen=True, slots=True)
class CaseDirectory:
    """Names of the directories of a comparison's runs, no two of them the same.

    Attributes:
        variants: all of the comparison.
        rates: all factors on learning rates that it may take.
    """

    variants: tuple[Variant, ...]
    rates: tuple[float, ...]

    def of(self, case: Case) -> str:
        """The name of one case; with a digest or all digits only where another has the same."""
        name, rate = _safe(case.variant.label), f"{case.rate:g}"
        if sum(_safe(other.label).lower() == name.lower() for other in self.variants) > 1:
            whole = "\n".join((case.variant.label, *case.variant.overrides))
            name = f"{name}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"
        if sum(f"{other:g}" == rate for other in self.rates) > 1:
            rate = repr(case.rate)
        return f"{name}_x{rate}_s{case.seed}"


def _safe(label: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in label).strip("-")


def parse_variant(text: str, base_dir: Path = Path()) -> Variant:
    """Read ``KIND:KEY=VALUE:...``, or ``FILE.py:CLASS:KEY=VALUE:...`` for a strategy of the user's.

    Args:
        text: as the user wrote it.
        base_dir: where a relative path starts.

    Raises:
        ConfigError: there is no such strategy, or a part is no ``KEY=VALUE``.
    """
    kind, *parts = text.strip().split(":")
    section = {"kind": kind}
    if kind not in STRATEGIES:
        if "=" in kind:
            raise ConfigError(
                f"{typed('strategies', text)}: '{kind}' is no strategy; its options follow a "
                "strategy after a colon, and a comma begins the next strategy",
                fix=f"Write for example sma:{text.strip()}.",
            )
        if not parts or "=" in parts[0]:
            near = nearest(kind, STRATEGIES)
            hint = f"; did you mean {near}?" if near else ""
            raise ConfigError(
                f"{typed('strategies', text)}: there is no strategy '{kind}'{hint}",
                fix=f"Choose among {', '.join(STRATEGIES)}; or name your own, FILE.py:CLASS.",
            )
        section = {"use": f"{kind}:{parts.pop(0)}"}
    overrides = [f"strategy={json.dumps(section)}", *_default_kinds(section, parts, base_dir)]
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise ConfigError(
                f"{typed('strategies', text)}: '{part}' is not of the form key=value",
                fix="Write for example diloco:interval=16:codec=int4.",
            )
        overrides += _overrides(key.strip(), value.strip())
    option = "strategies", text.strip()
    return Variant(text.strip(), tuple(OptionText(each, option) for each in overrides))


def _default_kinds(section: Mapping[str, str], parts: Sequence[str], base_dir: Path) -> list[str]:
    """Sections of the strategy of which single keys are given are still of their default kind."""
    defaults = default_section(section, base_dir)
    names = [part.split(".")[0] for part in parts if "." in part.partition("=")[0]]
    kinds = {name: inner["kind"] for name in names if "kind" in (inner := defaults.get(name, {}))}
    return [f"strategy.{name}={{kind: {kind}}}" for name, kind in kinds.items()]


def _overrides(key: str, value: str) -> list[str]:
    if key in ("codec", "up", "down"):
        ways: tuple[str, ...] = ("up", "down") if key == "codec" else (key,)
        if key == "codec" and value in CODECS:
            ways = tuple(sections_of(value))
        return [f"codec.{way}={{kind: {value}}}" for way in ways]
    own = key.split(".")[0] not in Experiment.model_fields
    return [f"strategy.{key}={value}" if own else f"{key}={value}"]


def experiment_of(case: Case, config: ConfigSource, common: Sequence[str], out: Path) -> Experiment:
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
    section, holder, last = _rate_of(experiment)
    # The whole section, since what is a default is not in the file.
    changed = holder.model_copy(update={last: getattr(holder, last) * case.rate})
    scaled = f"{section}={changed.model_dump_json()}"
    rate = OptionText(scaled, ("rates", f"{case.rate:g}"))
    return load_tree(config, [*overrides, rate], Experiment)


def learning_rate(experiment: Experiment) -> float:
    """The learning rate that factors scale: the one that the strategy trains with."""
    _, holder, last = _rate_of(experiment)
    return float(getattr(holder, last))


def _rate_of(experiment: Experiment) -> tuple[str, Any, str]:
    """The key of the learning rate's section, that section, and the name of the rate in it."""
    section, _, last = experiment.strategy.traits.region.rate_key.rpartition(".")
    holder: Any = experiment
    for name in section.split("."):
        holder = getattr(holder, name)
    return section, holder, last
