"""Runs with a strategy and a codec of the user's, of which the files change afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import geo_ray
from geo_ray.base.errors import ConfigChangedError, ConfigError, GeoRayError, OwnCodeError
from geo_ray.base.load import load_tree
from geo_ray.cli.main import root
from geo_ray.experiment.experiment import Experiment
from geo_ray.runs import directory as rundir
from geo_ray.runs.lease import LEASE_KEY
from geo_ray.runs.resume import codecs_of
from geo_ray.storage.checkpoint import CheckpointStore
from geo_ray.storage.conditional_store import LOCK_SUFFIX
from geo_ray.storage.manifest import CheckpointManifest

EXAMPLES = Path(__file__).parents[3] / "examples"
FILES = ("own_strategy.py", "own_codec.py")
CONFIG = """
name: own
task: {use: digits}
data: {generate: {}}
regions: [{name: eu}, {name: us}]
strategy: {use: "own_strategy.py:Halfway", interval: 2}
codec: {up: {use: "own_codec.py:Rounded", levels: 127}}
optimizer: {kind: sgd, lr: 0.1}
train: {steps: 4, eval_every: 2}
emulate: {link: {rate_mbps: 100, delay_s: 0.01}, step_s: 0.05}
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with both examples and a configuration that names them."""
    for name in FILES:
        (tmp_path / name).write_text((EXAMPLES / name).read_text())
    (tmp_path / "own.yaml").write_text(CONFIG + f"run: {{dir: {tmp_path / 'runs'}}}\n")
    return tmp_path


def edited(path: Path) -> None:
    path.write_text(path.read_text() + "# another\n")


def everything_in(directory: Path) -> dict[str, bytes]:
    """All but who drives the run, which every try notes."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != LEASE_KEY and path.suffix != LOCK_SUFFIX
    }


@pytest.mark.parametrize("change", [edited, Path.unlink])
def test_a_run_can_be_looked_at_whatever_became_of_the_files(change, place, monkeypatch):
    monkeypatch.chdir(place)
    run = geo_ray.simulate(place / "own.yaml")
    for name in FILES:
        change(place / name)
    found = geo_ray.open_run(run.path)
    assert found.summary == run.summary and found.experiment.strategy.kind == "halfway"
    assert found.experiment.strategy.model_dump() == run.experiment.strategy.model_dump()
    assert found.experiment.codec.up.model_dump() == run.experiment.codec.up.model_dump()
    assert found.metrics("loss").num_rows == 8 and len(found.table()) == 2
    there = found.model().state_dict()
    assert all(torch.equal(there[name], value) for name, value in run.model().state_dict().items())
    for words in (
        ["export", str(run.path), "--out", str(place / "m.pt")],
        ["report", str(run.path)],
    ):
        done = CliRunner().invoke(root, words)
        assert done.exit_code == 0, (done.output, done.exception)
    with pytest.raises(GeoRayError, match=r"own_strategy\.py"):  # but nothing runs with it
        geo_ray.simulate(found.experiment, base_dir=place)
    with pytest.raises(ConfigError, match="was not imported"):
        _ = found.experiment.strategy.traits


def interrupted(place: Path) -> Path:
    """The directory of a run with a checkpoint; as it is when somebody wants to resume it."""
    experiment = load_tree(place / "own.yaml", [], Experiment)
    run = rundir.create(experiment, place)
    store = CheckpointStore(run.checkpoints)
    store.begin(0)
    store.commit(
        0,
        CheckpointManifest(
            id=0,
            step=2,
            created="now",
            config_digest="0" * 64,
            parts=(),
            extra={"attempt": 1, "codecs": codecs_of(experiment)},
        ),
    )
    return run.path


@pytest.mark.parametrize("allow", [(), ("own_codec.py",)])
def test_no_run_outlives_its_codec_and_a_refusal_changes_nothing(allow, place):
    path = interrupted(place)
    edited(place / "own_codec.py")
    before = everything_in(path)
    with pytest.raises(ConfigChangedError, match="the file differs from") as caught:
        geo_ray.train(resume=path, allow_changes=allow)
    assert "start a new run" in caught.value.fix and "--allow-change" not in caught.value.fix
    assert everything_in(path) == before


def test_other_options_of_a_codec_are_named(place):
    path = interrupted(place)
    before = everything_in(path)
    with pytest.raises(ConfigChangedError, match=r"levels: 7\).*levels: 127\)"):
        geo_ray.train(resume=path, overrides={"codec.up.levels": 7})
    with pytest.raises(ConfigChangedError, match=r"codec\.down is int8 \(block: 256\), .*is none"):
        geo_ray.train(resume=path, overrides={"codec.down": {"kind": "int8"}})
    assert everything_in(path) == before


def test_what_refuses_a_resume_later_changes_nothing_either(place):
    path = interrupted(place)
    edited(place / "own_strategy.py")
    before = everything_in(path)
    with pytest.raises(ConfigChangedError, match="differs from") as caught:
        geo_ray.train(resume=path)
    assert "--allow-change own_strategy.py" in caught.value.fix
    changes = {"task.options": {"width": "broad"}}  # told when the task is made
    with pytest.raises(GeoRayError, match="width"):
        geo_ray.train(resume=path, overrides=changes, allow_changes=["own_strategy.py"])
    assert everything_in(path) == before


@pytest.mark.parametrize(
    ("file", "line", "method"),
    [
        ("own_strategy.py", "region.params_P.lerp_(reply.payload_P, self.fraction)", "on_reply"),
        (
            "own_strategy.py",
            'return answer_all(averager, updates, weighted_mean(updates, "uniform"))',
            "on_update",
        ),
        ("own_codec.py", "codes_P = torch.zeros_like(x_P)", "encode"),
        ("own_codec.py", "num = check_num(self.kind, coded.num)", "decode"),
    ],
)
def test_what_own_code_raises_names_the_line(file, line, method, place):
    text = (place / file).read_text()
    number = next(n for n, each in enumerate(text.splitlines(), 1) if each.strip() == line)
    (place / file).write_text(text.replace(line, 'raise KeyError("oh")', 1))
    what = rf"{method} raised KeyError: 'oh' \(.*{file}:{number}\)"
    with pytest.raises(OwnCodeError, match=what):
        geo_ray.simulate(place / "own.yaml")
