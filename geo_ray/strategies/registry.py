"""All strategies by name. A new one is a file in this package and a line in this table."""

from __future__ import annotations

from typing import Final

from geo_ray.base.plugins import Plugins
from geo_ray.strategies.base import Strategy

STRATEGIES: Final = Plugins[type[Strategy]](
    {
        "bsp": "geo_ray.strategies.bsp:Bsp",
        "asgd": "geo_ray.strategies.asgd:Asgd",
        "asgd_ga": "geo_ray.strategies.asgd_ga:AsgdGa",
        "ama": "geo_ray.strategies.ama:Ama",
        "sma": "geo_ray.strategies.sma:Sma",
        "fedavg": "geo_ray.strategies.fedavg:FedAvg",
        "fedssgd": "geo_ray.strategies.fedssgd:FedSsgd",
        "esync": "geo_ray.strategies.esync:ESync",
        "hfa": "geo_ray.strategies.hfa:Hfa",
        "nbsync": "geo_ray.strategies.nbsync:NbSync",
        "diloco": "geo_ray.strategies.diloco:DiLoCo",
        "diloco_streaming": "geo_ray.strategies.diloco_streaming:DiLoCoStreaming",
        "diloco_eager": "geo_ray.strategies.diloco_eager:DiLoCoEager",
        "muloco": "geo_ray.strategies.muloco:MuLoCo",
        "cocodc": "geo_ray.strategies.cocodc:CoCoDC",
        "one_step_delay": "geo_ray.strategies.one_step_delay:OneStepDelay",
        "decoupled": "geo_ray.strategies.decoupled:Decoupled",
        "fedasync": "geo_ray.strategies.fedasync:FedAsync",
        "fedat": "geo_ray.strategies.fedat:FedAt",
        "fedgsync": "geo_ray.strategies.fedgsync:FedGSync",
        "async_local_sgd": "geo_ray.strategies.async_local_sgd:AsyncLocalSgd",
        "halos": "geo_ray.strategies.halos:Halos",
        "dc_asgd": "geo_ray.strategies.dc_asgd:DcAsgd",
        "gaia": "geo_ray.strategies.gaia:Gaia",
        "sparseloco": "geo_ray.strategies.sparseloco:SparseLoCo",
        "demo": "geo_ray.strategies.demo:DeMo",
    }
)
"""All strategies of the library."""
