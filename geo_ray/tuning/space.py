"""The space of a search: what a draw means for the configuration, and that all of it can be."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from geo_ray.config.canonical import JSONValue
from geo_ray.config.experiment import Experiment
from geo_ray.errors import ConfigError
from geo_ray.tuning.candidate import Base, value_at
from geo_ray.tuning.config import TuningConfig
from geo_ray.tuning.domain import Domain, is_met

Values = dict[str, JSONValue]
"""By key of the configuration."""


@dataclass(frozen=True, slots=True)
class SpaceEntry:
    """One thing to draw.

    Attributes:
        name: of its parameter in Ray Tune: its key, numbered if the key has several domains.
        key: of the configuration, as the file has it.
        domain: what is drawn from.
    """

    name: str
    key: str
    domain: Domain


@dataclass(frozen=True, slots=True)
class Space:
    """What is searched, on top of what.

    Attributes:
        base: what trials start from.
        entries: what is drawn, in the order of the file.
    """

    base: Base
    entries: tuple[SpaceEntry, ...]

    @classmethod
    def of(cls, config: TuningConfig, base: Base) -> Space:
        """The space of a file."""
        entries = []
        for key, domains in config.space.items():
            for number, domain in enumerate(domains, 1):
                name = key if len(domains) == 1 else f"{key} ({number})"
                entries.append(SpaceEntry(name, key, domain))
        return cls(base, tuple(entries))

    def values(self, drawn: Mapping[str, JSONValue]) -> Values:
        """What a draw sets: values by key of those whose condition holds.

        Args:
            drawn: by name of the entry, as `written` writes them.

        Raises:
            ConfigError: conditions go round in a circle, or two domains of one key hold.
        """
        found: Values = {}
        left = list(self.entries)
        keys = {entry.key for entry in self.entries}
        tree = json.loads(self.base.experiment().model_dump_json()) if self._needs_base else {}
        while left:
            open_keys = {entry.key for entry in left}
            ready = [e for e in left if not open_keys.intersection(e.domain.when)]
            if not ready:
                raise self._circle(left)
            for entry in ready:
                known = found | {
                    key: value_at(tree, self.base.key(key))
                    for key in entry.domain.when
                    if key not in keys
                }
                if not is_met(entry.domain.when, known):
                    continue
                if entry.key in found:
                    raise ConfigError(
                        f"space.{entry.key}: two of its domains hold for one trial",
                        fix="Give them conditions (`when`) that do not hold together.",
                    )
                found[entry.key] = self._read(entry, drawn)
            left = [entry for entry in left if entry not in ready]
        return {entry.key: found[entry.key] for entry in self.entries if entry.key in found}

    def experiment(self, drawn: Mapping[str, JSONValue], more: Sequence[str] = ()) -> Experiment:
        """The configuration of a draw.

        Raises:
            ConfigError: it cannot be.
        """
        return self.base.experiment(self.values(drawn), more)

    def check(self) -> list[Experiment]:
        """Try every key at the edges of its domain, where its condition holds, and each choice.

        Returns:
            The configurations tried, for what else is to be known of them.

        Raises:
            ConfigError: a key is unknown, or a value is refused by itself; names them all.
        """
        self.base.experiment()
        for entry in self.entries:
            self._check_condition(entry)
        complaints: dict[str, str] = {}
        tried = []
        for entry, drawn in self._edges():
            try:
                tried.append(self.experiment(drawn))
            except ConfigError as error:
                told, values = self._complaint(error), self._read(entry, drawn)
                complaints.setdefault(told, f"{entry.key} = {json.dumps(values)}")
        if complaints:
            lines = "\n    ".join(f"{at}: {told}" for told, at in complaints.items())
            raise ConfigError(
                f"the space has values that no run can have:\n    {lines}",
                fix="Correct them: `geo-ray config schema KEY` shows what a key takes; `when` "
                "keeps keys to the strategies that have them.",
            )
        return tried

    def written(self, entry: SpaceEntry, value: JSONValue) -> JSONValue:
        """A value as it is drawn: what is no plain value is text, for searches that compare."""
        return json.dumps(value) if isinstance(value, (dict, list)) else value

    def base_draw(self) -> Values | None:
        """The draw that is the base itself; None if the space does not have it."""
        tree = json.loads(self.base.experiment().model_dump_json())
        drawn: Values = {}
        for entry in self.entries:
            key = self.base.key(entry.key.replace("regions.*.", "regions.0."))
            value = value_at(tree, key)
            if isinstance(value, dict) and set(value) == {"kind"}:
                value = value["kind"]
            inside = entry.domain.holds(value)
            drawn[entry.name] = self.written(entry, value if inside else entry.domain.edges[0])
        try:
            same = self.experiment(drawn) == self.base.experiment()
        except ConfigError:
            return None
        return drawn if same else None

    # ------------------------------------------------------------------ checking

    @property
    def _needs_base(self) -> bool:
        keys = {entry.key for entry in self.entries}
        return any(key not in keys for entry in self.entries for key in entry.domain.when)

    def _read(self, entry: SpaceEntry, drawn: Mapping[str, JSONValue]) -> JSONValue:
        if entry.domain.kind == "value":
            return entry.domain.edges[0]
        value = drawn[entry.name]
        for each in entry.domain.edges:  # of a list of choices: the very value that was written
            if entry.domain.kind in ("choice", "grid") and self.written(entry, each) == value:
                return each
        return value

    def _edges(self) -> Iterator[tuple[SpaceEntry, Values]]:
        """A draw for every edge of every entry, whose condition then holds."""
        first = {e.name: self.written(e, e.domain.edges[0]) for e in self.entries}
        for entry in self.entries:
            for value in entry.domain.edges:
                drawn = dict(first)
                self._meet(entry, drawn, 0)
                yield entry, drawn | {entry.name: self.written(entry, value)}
        yield self.entries[0], {e.name: self.written(e, e.domain.most) for e in self.entries}

    def _meet(self, entry: SpaceEntry, drawn: Values, depth: int) -> None:
        """Draw what makes a condition hold, conditions of those keys included."""
        if depth > len(self.entries):
            raise self._circle([entry])
        for key, wanted in entry.domain.when.items():
            options = wanted if isinstance(wanted, (list, tuple)) else [wanted]
            for other in self.entries:
                fitting = [each for each in options if other.domain.holds(each)]
                if other.key == key and fitting:
                    drawn[other.name] = self.written(other, fitting[0])
                    self._meet(other, drawn, depth + 1)
                    break

    def _check_condition(self, entry: SpaceEntry) -> None:
        for key, wanted in entry.domain.when.items():
            options = wanted if isinstance(wanted, (list, tuple)) else [wanted]
            mine = [other.domain for other in self.entries if other.key == key]
            lost = [e for e in options if mine and not any(d.holds(e) for d in mine)]
            if lost:
                raise ConfigError(
                    f"space.{entry.key}.when.{key}: {lost[0]!r} is not in the space of {key}",
                    fix=f"Add it to space.{key}, or take it out of the condition.",
                )
            if not mine:
                tree = json.loads(self.base.experiment().model_dump_json())
                if value_at(tree, self.base.key(key)) is None:
                    raise ConfigError(
                        f"space.{entry.key}.when.{key}: neither the space nor the base has {key}",
                        fix="Name a key that does, such as strategy.kind.",
                    )

    def _complaint(self, error: ConfigError) -> str:
        lines = [line.strip() for line in error.message.splitlines()]
        return "; ".join(lines[1:] or lines).replace(" (overrides)", "")

    def _circle(self, left: Sequence[SpaceEntry]) -> ConfigError:
        keys = ", ".join(dict.fromkeys(entry.key for entry in left))
        return ConfigError(
            f"space: the conditions of {keys} wait for each other",
            fix="Let `when` name keys whose own conditions do not lead back.",
        )
