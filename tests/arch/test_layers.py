"""Who may import whom: a layer imports only from layers below it."""

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

# From the bottom up. Packages on one line are siblings and do not import each other.
LAYERS = [
    {"types", "errors", "clock", "version"},
    {"util"},
    {"stores"},
    {"config", "observe"},
    {"codecs", "strategies"},
    {"clouds", "training", "checkpoint", "transport", "data", "tasks", "coding", "lease"},
    {"overlay", "transfers"},
    {"providers"},
    {"planning"},
    {"autoscale", "scheduling"},
    {"queue"},
    {"config.experiment", "config.emulate", "config.recorded"},
    {"job"},
    {"runtime", "sim"},
    {"providers.local", "providers.agent"},  # raylets on this machine; drains its own node
    {"lab", "comparison", "contract", "clusters", "program"},
    {"tuning"},
    {"api"},
    {"cli"},
]
SIBLINGS_ALLOWED = {
    ("strategies", "codecs"),
    ("codecs.config", "strategies"),  # which codec goes with which strategy
    ("types", "errors"),
    ("observe", "config"),  # its Config derives from config.base
    ("training", "coding"),
    ("training", "tasks.base"),
    ("training", "tasks.carry"),  # what a task declares of its model
    ("training", "tasks.groups"),
    ("training", "tasks.guard"),  # the checked loss, beside the protocol it checks
}

# Third-party package -> modules below geo_ray that may import it.
FENCES = {
    "ray": ("runtime", "tuning", "program.on_ray"),
    "boto3": ("clouds.aws", "stores"),
    "botocore": ("clouds.aws", "stores"),
    "tencentcloud": ("clouds.tencent",),
    "pyarrow": ("data", "api.tables"),  # results are handed to users as Arrow tables
    "aiohttp": ("observe.live",),
    "opentelemetry": ("observe.export",),
    "tensorboardX": ("observe.export",),
    "mlflow": ("observe.export",),
    "wandb": ("observe.export",),
}
NO_TORCH = (
    *("types", "errors", "clock", "config", "planning", "autoscale", "scheduling", "clouds"),
    *("providers", "queue"),
)
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


def layer_of(module: str) -> int | None:
    """The number of the layer of a module below geo_ray; the most exact entry counts."""
    for depth in (2, 1):
        prefix = ".".join(module.split(".")[:depth])
        for number, names in enumerate(LAYERS):
            if prefix in names:
                return number
    return None


def upward_imports(file: Any) -> list[str]:
    below = file.name.removeprefix("geo_ray").removeprefix(".")
    found = []
    for line, name in file.imports():
        target = name.removeprefix("geo_ray.")
        if target == name or layer_of(target) is None or not below:
            continue
        own, other = layer_of(below) or 0, layer_of(target) or 0
        same_package = below.split(".")[0] == target.split(".")[0]
        sibling = any(inside(below, a) and inside(target, b) for a, b in SIBLINGS_ALLOWED)
        if not (other < own or (other == own and (same_package or sibling))):
            found.append(f"{file.name}:{line} imports {name}")
    return found


def crossed_fences(file: Any) -> list[str]:
    below = file.name.removeprefix("geo_ray").removeprefix(".")
    found = []
    for line, name in file.imports():
        top = name.split(".")[0]
        if top in FENCES and not inside(below, *FENCES[top]):
            found.append(f"{file.name}:{line} imports {name}")
        if top == "torch" and inside(below, *NO_TORCH):
            found.append(f"{file.name}:{line} imports {name}")
    return found


def test_every_module_is_in_a_layer(library: list[Any]) -> None:
    lost = [f.name for f in library if f.name != "geo_ray" and layer_of(f.name[8:]) is None]
    assert not lost, f"add to LAYERS: {lost}"


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
    assert declared == listed | {"__version__": "geo_ray.base.version:__version__"}
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
    optional = project["optional-dependencies"]["export"]  # imported when it is asked for
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
        ("transport.endpoint", "import geo_ray.data.manifest", True),
        ("transport.link", "from geo_ray import data", True),
        ("transport.link", "from ..data import manifest", True),
        ("transport.link", "from . import frames", False),
        ("transport.link", "def f():\n    from geo_ray.runtime import x", True),
        ("transport.link", "from geo_ray.base.model import Model", False),
        ("transport.link", "from geo_ray.experiment.experiment import Experiment", True),
        ("config.load", "from geo_ray.experiment import experiment", True),
        ("config.experiment", "from geo_ray.transport.config import TransportConfig", False),
        ("config.load", "from geo_ray.transport.config import TransportConfig", True),
        ("errors", "from geo_ray.experiment import base", True),
        ("training.worker", "from geo_ray.data.tasks.base import Task", False),
        ("training.worker", "from geo_ray.data.tasks import base", False),
        ("training.worker", "from geo_ray.data.tasks.load import load_task", True),
        ("training.worker", "from geo_ray.strategies.base import Update", False),
        ("strategies.base", "from geo_ray.training import flat", True),
        ("runtime.actors", "from geo_ray.simulator import world", True),
        ("runtime.actors", "from geo_ray.experiment.experiment import Experiment", False),
        ("cli.train", "import geo_ray.runtime.controller", False),
    ],
)
def test_the_layer_rule_bites(source_file: Any, module: str, statement: str, refused: bool) -> None:
    file = source_file.parse(f"geo_ray.{module}", statement)
    assert bool(upward_imports(file)) == refused


@pytest.mark.parametrize(
    ("module", "statement", "refused"),
    [
        ("runtime.actors", "import ray", False),
        ("transport.link", "import ray.util", True),
        ("stores.s3", "import boto3", False),
        ("checkpoint.store", "from boto3 import client", True),
        ("tasks.ctr", "import pyarrow.parquet as pq", True),
        ("config.load", "import torch", True),
        ("training.flat", "import torch", False),
    ],
)
def test_the_fences_bite(source_file: Any, module: str, statement: str, refused: bool) -> None:
    assert bool(crossed_fences(source_file.parse(f"geo_ray.{module}", statement))) == refused
