"""All strategies by name. A new one is a file in this package and a line in one list."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import TypeAdapter

from geo_ray.base.errors import ConfigError
from geo_ray.base.user_code import UserClass
from geo_ray.base.user_section import OwnLoader, context, section_type
from geo_ray.strategies.ama import Ama
from geo_ray.strategies.asgd import Asgd
from geo_ray.strategies.asgd_ga import AsgdGa
from geo_ray.strategies.async_local_sgd import AsyncLocalSgd
from geo_ray.strategies.base import Strategy
from geo_ray.strategies.bsp import Bsp
from geo_ray.strategies.dc_asgd import DcAsgd
from geo_ray.strategies.decoupled import Decoupled
from geo_ray.strategies.demo import DeMo
from geo_ray.strategies.diloco import DiLoCo
from geo_ray.strategies.diloco_eager import DiLoCoEager
from geo_ray.strategies.diloco_streaming import DiLoCoStreaming
from geo_ray.strategies.esync import ESync
from geo_ray.strategies.fedasync import FedAsync
from geo_ray.strategies.fedat import FedAt
from geo_ray.strategies.fedavg import FedAvg
from geo_ray.strategies.fedgsync import FedGSync
from geo_ray.strategies.fedssgd import FedSsgd
from geo_ray.strategies.gaia import Gaia
from geo_ray.strategies.halos import Halos
from geo_ray.strategies.hfa import Hfa
from geo_ray.strategies.nbsync import NbSync
from geo_ray.strategies.one_step_delay import OneStepDelay
from geo_ray.strategies.sma import Sma
from geo_ray.strategies.sparseloco import SparseLoCo
from geo_ray.strategies.traits import Traits

CLASSES: Final[tuple[type[Strategy], ...]] = (
    Bsp,
    Asgd,
    AsgdGa,
    Ama,
    Sma,
    FedAvg,
    FedSsgd,
    ESync,
    Hfa,
    NbSync,
    DiLoCo,
    DiLoCoStreaming,
    DiLoCoEager,
    OneStepDelay,
    Decoupled,
    FedAsync,
    FedAt,
    FedGSync,
    AsyncLocalSgd,
    Halos,
    DcAsgd,
    Gaia,
    SparseLoCo,
    DeMo,
)
"""All strategies of the library."""

STRATEGIES: Final[dict[str, type[Strategy]]] = {each().kind: each for each in CLASSES}
"""The same by name."""

LOAD: Final = OwnLoader(
    UserClass("strategy", ConfigError, "examples/own_strategy.py"),
    Strategy,
    Traits,
    STRATEGIES,
    may_drift=True,
)
"""Makes a strategy of the user's from its section."""

if TYPE_CHECKING:
    AnyStrategy = Strategy  # all that anybody may know of it
else:
    AnyStrategy = section_type(CLASSES, LOAD)
    """The ``strategy`` section of a configuration: ``kind`` or ``use`` chooses the class."""


def default_section(section: Mapping[str, object], base_dir: Path) -> dict[str, Any]:
    """A ``strategy`` section with all defaults written out, as plain values.

    Args:
        section: with ``kind`` or ``use``.
        base_dir: where relative paths start.

    Raises:
        ConfigError: the user's class cannot be used.
    """
    adapter: TypeAdapter[Any] = TypeAdapter(AnyStrategy)
    found = adapter.validate_python(section, context=context(base_dir))
    plain: dict[str, Any] = adapter.dump_python(found, mode="json")
    return plain
