"""Registries import what is asked for, and nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

from geo_ray.base.plugins import Plugins
from geo_ray.cloud.cluster.providers import CLOUDS
from geo_ray.codecs.registry import CODECS
from geo_ray.data.files.rows import READERS
from geo_ray.scheduler.policies.registry import POLICIES
from geo_ray.strategies.registry import STRATEGIES


@pytest.mark.parametrize("registry", [STRATEGIES, CODECS], ids=["strategies", "codecs"])
def test_every_name_loads_the_class_of_that_kind(registry: Plugins[type]) -> None:
    assert {name: kind().kind for name, kind in registry.items()} == {
        name: name for name in registry
    }


def test_every_policy_loads() -> None:
    assert all(callable(POLICIES[name]) for name in POLICIES)


def test_an_unknown_name_is_none_of_a_mapping() -> None:
    assert "nonsense" not in STRATEGIES
    assert STRATEGIES.get("nonsense") is None
    with pytest.raises(KeyError, match="nonsense"):
        STRATEGIES["nonsense"]


@pytest.mark.parametrize(
    ("package", "registry", "name", "others"),
    [
        ("geo_ray.strategies", "STRATEGIES", "sma", ["fedat", "diloco", "halos"]),
        ("geo_ray.codecs", "CODECS", "fp16", ["powersgd", "dgt", "bisparse"]),
        ("geo_ray.scheduler.policies", "POLICIES", "fifo", ["pd_ors", "ones", "pollux"]),
    ],
)
def test_one_name_imports_one_module(
    package: str, registry: str, name: str, others: list[str]
) -> None:
    code = f"""
import sys
from {package}.registry import {registry}
assert set({others}) <= set({registry})
before = set(sys.modules)
assert {registry}[{name!r}] is {registry}[{name!r}]
assert "{package}.{name}" in set(sys.modules) - before
print([each for each in {others} if "{package}." + each in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize("registry", [CLOUDS, READERS], ids=["clouds", "readers"])
def test_every_cloud_and_format_loads(registry: Plugins[object]) -> None:
    assert all(callable(registry[name]) for name in registry)
