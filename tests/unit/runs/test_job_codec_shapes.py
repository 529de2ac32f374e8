"""PowerSGD is told of the model's matrices."""

from __future__ import annotations

import math

import pytest

from geo_ray.base.errors import ConfigError
from geo_ray.codecs.powersgd import PowerSgd
from geo_ray.runs.build import initial_parameters, wire_plan, with_shapes
from tests.support.job_support import digits, experiment


def test_shapes_are_those_of_the_vector() -> None:
    task = digits()
    config = with_shapes(experiment("codec.up={kind: powersgd}", "codec.down={kind: int8}"), task)
    codec = wire_plan(config).up
    assert isinstance(codec, PowerSgd)
    assert sum(map(math.prod, codec.shapes)) == initial_parameters(task, 0).numel()
    assert any(len(shape) > 1 for shape in codec.shapes)
    assert config.codec.down == experiment("codec.down={kind: int8}").codec.down
    assert with_shapes(config, task) == config


def test_other_codecs_need_none() -> None:
    config = experiment("codec.up={kind: topk}")
    assert with_shapes(config, digits()) is config


@pytest.mark.parametrize("direction", ["up", "down"])
def test_shapes_of_another_model_are_refused(direction: str) -> None:
    config = experiment(f"codec.{direction}={{kind: powersgd, shapes: [[3, 4], [5]]}}")
    with pytest.raises(ConfigError, match=rf"codec\.{direction}\.shapes have 17 elements"):
        with_shapes(config, digits())
