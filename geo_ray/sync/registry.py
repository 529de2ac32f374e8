"""All strategies by name. A new one is a file in this package and a line here."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from geo_ray.sync.ama import Ama
from geo_ray.sync.asgd import Asgd
from geo_ray.sync.asgd_ga import AsgdGa
from geo_ray.sync.bsp import Bsp
from geo_ray.sync.sma import Sma

AnyStrategy = Annotated[Bsp | Asgd | AsgdGa | Ama | Sma, Field(discriminator="kind")]
"""The ``strategy`` section of a configuration: ``kind`` chooses the class."""

STRATEGIES: dict[str, type[Bsp | Asgd | AsgdGa | Ama | Sma]] = {
    "bsp": Bsp,
    "asgd": Asgd,
    "asgd_ga": AsgdGa,
    "ama": Ama,
    "sma": Sma,
}
