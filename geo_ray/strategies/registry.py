"""All strategies by name. A new one is a file in this package and a line in each of two lists."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from geo_ray.strategies.ama import Ama
from geo_ray.strategies.asgd import Asgd
from geo_ray.strategies.asgd_ga import AsgdGa
from geo_ray.strategies.async_local_sgd import AsyncLocalSgd
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

OneStrategy = (
    Bsp
    | Asgd
    | AsgdGa
    | Ama
    | Sma
    | FedAvg
    | FedSsgd
    | ESync
    | Hfa
    | NbSync
    | DiLoCo
    | DiLoCoStreaming
    | DiLoCoEager
    | OneStepDelay
    | Decoupled
    | FedAsync
    | FedAt
    | FedGSync
    | AsyncLocalSgd
    | Halos
    | DcAsgd
    | Gaia
    | SparseLoCo
    | DeMo
)
"""The class of any strategy."""

AnyStrategy = Annotated[OneStrategy, Field(discriminator="kind")]
"""The ``strategy`` section of a configuration: ``kind`` chooses the class."""

STRATEGIES: dict[str, type[OneStrategy]] = {
    "bsp": Bsp,
    "asgd": Asgd,
    "asgd_ga": AsgdGa,
    "ama": Ama,
    "sma": Sma,
    "fedavg": FedAvg,
    "fedssgd": FedSsgd,
    "esync": ESync,
    "hfa": Hfa,
    "nbsync": NbSync,
    "diloco": DiLoCo,
    "diloco_streaming": DiLoCoStreaming,
    "diloco_eager": DiLoCoEager,
    "one_step_delay": OneStepDelay,
    "decoupled": Decoupled,
    "fedasync": FedAsync,
    "fedat": FedAt,
    "fedgsync": FedGSync,
    "async_local_sgd": AsyncLocalSgd,
    "halos": Halos,
    "dc_asgd": DcAsgd,
    "gaia": Gaia,
    "sparseloco": SparseLoCo,
    "demo": DeMo,
}
