"""A small experiment and the real digits, for the tests of `geo_ray.runs`."""

from __future__ import annotations

from geo_ray.base.load import load_text
from geo_ray.data.tasks.digits import Digits
from geo_ray.experiment.experiment import Experiment

TEXT = """
name: trial
task: {use: digits, options: {width: 2}}
data: {generate: {}, batch_size: 8}
regions: [{name: eu, workers: 2}, {name: us, ps_shards: 2}]
strategy: {kind: sma}
optimizer: {kind: sgd}
train: {steps: 10}
"""


def experiment(*overrides: str) -> Experiment:
    return load_text(TEXT, list(overrides), Experiment, "trial.yaml")


def digits() -> Digits:
    return Digits(Digits.Options(width=2))
