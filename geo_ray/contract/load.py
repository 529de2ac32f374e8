"""Find what is to be checked, and put it to the checks of its kind."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from geo_ray.codecs.base import Codec
from geo_ray.codecs.registry import CODECS, AnyCodec
from geo_ray.config.base import StrictModel
from geo_ray.config.load import load_text
from geo_ray.config.own import context
from geo_ray.contract import codecs, strategies
from geo_ray.contract.findings import Finding, run_checks
from geo_ray.errors import ConfigError
from geo_ray.strategies.base import Strategy
from geo_ray.strategies.registry import STRATEGIES, AnyStrategy
from geo_ray.util.user_class import UserClass, find_class

_ANY = UserClass("strategy or codec", ConfigError, "examples/own_strategy.py")


class StrategySection(StrictModel):
    """A configuration of nothing but a strategy."""

    option: AnyStrategy


class CodecSection(StrictModel):
    """A configuration of nothing but a codec."""

    option: AnyCodec


@dataclass(frozen=True, slots=True)
class Subject:
    """What is to be checked: one of the two.

    Attributes:
        strategy: if it is one.
        codec: if it is one.
    """

    strategy: Strategy | None = None
    codec: Codec | None = None


def load(name: str, options: Sequence[str], base_dir: Path) -> Subject:
    """Find the class and build it.

    Args:
        name: `path/to/file.py:Class`, `package.module:Class`, or a name of the library.
        options: ``key=value`` each.
        base_dir: where a relative path starts.

    Raises:
        ConfigError: there is no such thing, or it cannot be used.
    """
    overrides = [f"option.{option}" for option in options]
    if name in STRATEGIES or name in CODECS:
        section, is_codec = {"kind": name}, name in CODECS
    else:
        members = dict(inspect.getmembers_static(find_class(name, base_dir, _ANY)))
        section, is_codec = {"use": name}, "encode" in members
    text, where = json.dumps({"option": section}), context(base_dir)
    if is_codec:
        return Subject(codec=load_text(text, overrides, CodecSection, name, where=where).option)
    return Subject(strategy=load_text(text, overrides, StrategySection, name, where=where).option)


def checked(subject: Subject) -> list[Finding]:
    """Put it to the checks of its kind."""
    found: list[Finding] = []
    if subject.strategy is not None:
        found += run_checks(strategies.CHECKS, subject.strategy)
    if subject.codec is not None:
        found += run_checks(codecs.CHECKS, subject.codec)
    return found
