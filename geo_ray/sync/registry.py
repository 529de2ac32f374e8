"""All strategies by name. A new one is a file in this package and a line in each of two lists."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from geo_ray.sync.ama import Ama
from geo_ray.sync.asgd import Asgd
from geo_ray.sync.asgd_ga import AsgdGa
from geo_ray.sync.async_local_sgd import AsyncLocalSgd
from geo_ray.sync.bsp import Bsp
from geo_ray.sync.dc_asgd import DcAsgd
from geo_ray.sync.decoupled import Decoupled
from geo_ray.sync.demo import DeMo
from geo_ray.sync.diloco import DiLoCo
from geo_ray.sync.diloco_eager import DiLoCoEager
from geo_ray.sync.diloco_streaming import DiLoCoStreaming
from geo_ray.sync.esync import ESync
from geo_ray.sync.fedasync import FedAsync
from geo_ray.sync.fedat import FedAt
from geo_ray.sync.fedavg import FedAvg
from geo_ray.sync.fedgsync import FedGSync
from geo_ray.sync.fedssgd import FedSsgd
from geo_ray.sync.gaia import Gaia
from geo_ray.sync.halos import Halos
from geo_ray.sync.hfa import Hfa
from geo_ray.sync.nbsync import NbSync
from geo_ray.sync.one_step_delay import OneStepDelay
from geo_ray.sync.sma import Sma
from geo_ray.sync.sparseloco import SparseLoCo

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
