"""Which task a configuration is, as far as its loss goes."""

from __future__ import annotations

from pathlib import Path

from geo_ray.config.canonical import canonical_json, sha256_hex
from geo_ray.config.experiment import Experiment
from geo_ray.data.manifest import load_manifest
from geo_ray.planning.loss_profile import LossSubject
from geo_ray.planning.model_id import ModelId

_OF_TRAINING = ("mode", "clip_norm", "clip_mean_norm", "stragglers")


def subject_of(experiment: Experiment, base_dir: Path, model: ModelId) -> LossSubject:
    """What tells the task from others, and what else its loss depends on.

    Args:
        experiment: the configuration.
        base_dir: where a relative path to its manifest starts.
        model: that it trains.

    Raises:
        ManifestError: the data have none, or it is wrong.
    """
    tree = experiment.model_dump(mode="json")
    traits = experiment.strategy.traits
    strategy = {key: value for key, value in tree["strategy"].items() if key != "interval"}
    sections = {
        "strategy": strategy,
        "codec": tree["codec"],
        "optimizer": tree["optimizer"],
        "data.batch_size": tree["data"]["batch_size"],
        "regions": [[r["workers"], r["batch_sizes"]] for r in tree["regions"]],
        "train": {key: tree["train"][key] for key in _OF_TRAINING},
        "overlay": tree["overlay"],
        "transfers": tree["transfers"],
        # In rounds the order of updates does not depend on links.
        "emulate": None if traits.in_rounds else tree["emulate"],
    }
    return LossSubject(
        model=model,
        data=_data(experiment, base_dir),
        regions=experiment.region_names,
        strategy=experiment.strategy.kind,
        settings={name: sha256_hex(canonical_json(value)) for name, value in sections.items()},
    )


def _data(experiment: Experiment, base_dir: Path) -> str:
    generate = experiment.data.generate
    if generate is not None:
        return sha256_hex(canonical_json({"generate": generate.model_dump(mode="json")}))
    address = str(experiment.data.manifest)
    if "://" not in address:
        address = str(base_dir / address)
    found = load_manifest(address).model_dump(mode="json")
    return sha256_hex(canonical_json({**found, "stores": None}))  # copies are the same data
