"""Which package may import which, and which modules may import a third-party package."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import geo_ray

# From the bottom up: a package imports only those before it.
PACKAGES = (
    *("base", "codecs", "strategies", "storage", "telemetry", "prices", "data", "transport"),
    *(
        "training",
        "joining",
        "planner",
        "experiment",
        "runs",
        "ray_cluster",
        "simulator",
        "runtime",
    ),
    *("runtime", "cloud", "scheduler", "program", "sweep", "lab", "testing", "api", "cli"),
)

# Third-party package -> modules below geo_ray that may import it.
FENCES = {
    "ray": (
        *("ray_cluster", "runtime", "cloud.autoscaler.actor", "cloud.cluster.serve"),
        *("scheduler.queue", "program.on_ray", "sweep"),
    ),
    "boto3": ("prices.aws", "storage.bucket"),
    "botocore": ("prices.aws", "storage.bucket"),
    "tencentcloud": ("prices.tencent",),
    "pyarrow": ("data", "api.display"),  # results are handed to users as Arrow tables
    "aiohttp": ("telemetry.live",),
    "opentelemetry": ("telemetry.export",),
    "tensorboardX": ("telemetry.export",),
    "mlflow": ("telemetry.export",),
    "wandb": ("telemetry.export",),
    "transformers": ("joining",),
    "accelerate": ("joining",),
    "lightning": ("joining",),
    "peft": ("joining", "runs.model_export"),
}
NO_TORCH = ("base.errors", "base.model", "planner", "cloud", "scheduler", "prices", "experiment")
NO_TORCH_EXCEPT = ("cloud.autoscaler.actor",)
IMPORT_NAMES = {
    "pyyaml": "yaml",
    "scikit-learn": "sklearn",
    "mlflow-skinny": "mlflow",
    "tensorboardx": "tensorboardX",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry",
}
COMES_WITH = {"boto3": {"botocore"}, "tencentcloud-sdk-python": {"tencentcloud"}}


def inside(module: str, *places: str) -> bool:
    return any(module == place or module.startswith(place + ".") for place in places)


def package_of(name: str) -> str | None:
    """The package of a module of the library or of a name in it; None if it is not of a package."""
    parts = name.split(".")
    return parts[1] if parts[0] == "geo_ray" and len(parts) > 1 and parts[1] in PACKAGES else None


def upward_imports(file: Any) -> list[str]:
    own = package_of(file.name)
    if own is None:
        return []
    found = []
    for line, name in file.imports():
        other = package_of(name)
        if other is None or other == own:
            continue
        if PACKAGES.index(other) > PACKAGES.index(own):
            found.append(f"{file.name}:{line} imports {name}")
    return found


def crossed_fences(file: Any) -> list[str]:
    below = file.name.removeprefix("geo_ray").removeprefix(".")
    found = []
    for line, name in file.imports():
        top = name.split(".")[0]
        if top in FENCES and not inside(below, *FENCES[top]):
            found.append(f"{file.name}:{line} imports {name}")
        if top == "torch" and inside(below, *NO_TORCH) and not inside(below, *NO_TORCH_EXCEPT):
            found.append(f"{file.name}:{line} imports {name}")
    return found


def test_every_module_is_in_a_package(library: list[Any]) -> None:
    lost = [f.name for f in library if f.name != "geo_ray" and package_of(f.name) is None]
    assert not lost, f"add to PACKAGES: {lost}"


def test_layers_import_only_downward(library: list[Any]) -> None:
    assert not [text for file in library for text in upward_imports(file)]


def test_third_party_packages_stay_behind_their_fences(library: list[Any]) -> None:
    assert not [text for file in library for text in crossed_fences(file)]


def test_the_package_itself_imports_nothing_heavy(library: list[Any]) -> None:
    (top,) = [file for file in library if file.name == "geo_ray"]
    harmless = {"__future__.annotations", "importlib", "typing.Any", "typing.Final"}
    seen = at_run_time(top.tree)
    assert {name for name in seen if not inside(name, "geo_ray.base.version")} == harmless


def test_importing_the_package_loads_nothing_heavy(root: Path) -> None:
    code = "import sys, geo_ray; print(geo_ray.__version__, *sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split()[1:])
    assert "geo_ray.base.version" in loaded
    assert not loaded & {"torch", "ray", "pydantic", "pyarrow", "numpy", "yaml", "click", "rich"}


def test_the_stub_of_the_package_declares_what_its_table_lists(root: Path) -> None:
    stub = ast.parse((root / "geo_ray" / "__init__.pyi").read_text())
    declared = {
        name.asname or name.name: f"{node.module}:{name.name}"
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    listed = {
        name: f"geo_ray.{where}" if ":" in where else f"geo_ray.{where}:{name}"
        for name, where in geo_ray._WHERE.items()
    }
    renamed = {
        target.id: declared.pop(node.value.id)
        for node in stub.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    assert declared | renamed == listed | {"__version__": "geo_ray.base.version:__version__"}
    assert all(getattr(geo_ray, name) is not None for name in geo_ray.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        getattr(geo_ray, "nonsense")  # noqa: B009


def at_run_time(tree: ast.Module) -> set[str]:
    """What a module imports at its top when it is run: not what only type checkers see."""
    found = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_every_import_is_declared(
    library: list[Any], root: Path, standard_modules: frozenset[str]
) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    allowed = {"geo_ray", *standard_modules}
    extras = project["optional-dependencies"]  # imported when they are asked for
    optional = [*extras["export"], *extras["integrations"]]
    for requirement in [*project["dependencies"], *optional]:
        name = re.split(r"[\[<>=!~; ]", requirement)[0].lower()
        allowed |= {IMPORT_NAMES.get(name, name).replace("-", "_"), *COMES_WITH.get(name, ())}
    undeclared = [
        f"{file.name}:{line} imports {name}"
        for file in library
        for line, name in file.imports()
        if name.split(".")[0] not in allowed
    ]
    assert not undeclared


@pytest.mark.parametrize(
    ("module", "statement", "refused"),
    [
        ("transport.endpoint", "import geo_ray.training.server", True),
        ("transport.endpoint", "from geo_ray import training", True),
        ("transport.endpoint", "from ..training import server", True),
        ("transport.endpoint", "from . import stream", False),
        ("transport.endpoint", "def f():\n    from geo_ray.runtime import x", True),
        ("transport.endpoint", "from geo_ray.base.model import StrictModel", False),
        ("transport.endpoint", "from geo_ray.experiment.experiment import Experiment", True),
        ("experiment.experiment", "from geo_ray.transport.config import TransportConfig", False),
        ("base.load", "from geo_ray.experiment import experiment", True),
        ("codecs.registry", "from geo_ray.strategies import base", True),
        ("simulator.world", "from geo_ray.runtime import launcher", True),
        ("runtime.launcher", "from geo_ray.experiment.experiment import Experiment", False),
        ("cli.train", "import geo_ray.runtime.controller", False),
    ],
)
def test_the_layer_rule_bites(source_file: Any, module: str, statement: str, refused: bool) -> None:
    file = source_file.parse(f"geo_ray.{module}", statement)
    assert bool(upward_imports(file)) == refused


@pytest.mark.parametrize(
    ("module", "statement", "refused"),
    [
        ("runtime.launcher", "import ray", False),
        ("transport.endpoint", "import ray.util", True),
        ("storage.bucket", "import boto3", False),
        ("storage.checkpoint", "from boto3 import client", True),
        ("telemetry.report", "import pyarrow.parquet as pq", True),
        ("planner.search", "import torch", True),
        ("training.shard", "import torch", False),
    ],
)
def test_the_fences_bite(source_file: Any, module: str, statement: str, refused: bool) -> None:
    assert bool(crossed_fences(source_file.parse(f"geo_ray.{module}", statement))) == refused
