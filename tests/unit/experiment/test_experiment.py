"""The whole configuration: what contradicts itself is refused in one message that says where."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from geo_ray.api.auto import load_experiment
from geo_ray.base.errors import ConfigError, TaskLoadError
from geo_ray.base.load import digest, dump_yaml, load_text
from geo_ray.experiment.experiment import Experiment
from geo_ray.runs.build import check_absent
from geo_ray.strategies.registry import STRATEGIES
from geo_ray.transport.emulation import LinkSpec

FOLDER = Path(__file__).parents[3] / "configs"
OTHERS = {FOLDER / name for name in ("tune.yaml", "queue.yaml", "queue_local.yaml")}
CONFIGS = sorted(set(FOLDER.glob("*.yaml")) - OTHERS)
TEXT = """
name: trial
task: {use: digits}
data: {generate: {}}
regions:
  - {name: eu, workers: 2}
  - {name: us}
strategy: {kind: sma}
optimizer: {kind: sgd}
train: {steps: 10}
emulate:
  link: {rate_mbps: 100, delay_s: 0.03}
  links:
    - {src: eu, dst: us, rate_mbps: 5, outages: [[1, 2]]}
  step_s: 0.5
  step_s_by_region: {us: 0.7}
"""


def load(*overrides: str, text: str = TEXT) -> Experiment:
    return load_text(text, list(overrides), Experiment, "trial.yaml")


def complaint(*overrides: str, text: str = TEXT) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides, text=text)
    return caught.value.message


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_the_files_to_try_are_valid(path):
    experiment, advice = load_experiment(path, [])
    assert (advice is not None) == (path.stem == "auto")
    assert len(experiment.regions) >= 1


def test_auto_goes_by_the_directory_that_is_given(tmp_path):
    """As for a run that is resumed: its configuration lies elsewhere than its task."""
    there, home = tmp_path / "run", tmp_path / "home"
    there.mkdir()
    home.mkdir()
    (home / "own.py").write_text(
        "from geo_ray.data.tasks.digits import Digits\n\n\nclass Own(Digits):\n    pass\n"
    )
    file = there / "config.yaml"
    file.write_text(TEXT.replace("kind: sma", "kind: auto").replace("digits", "own.py:Own"))
    with pytest.raises(TaskLoadError):
        load_experiment(file, [])
    experiment, advice = load_experiment(file, [], base_dir=home)
    assert advice is not None and experiment.task.use == "own.py:Own"


def test_defaults():
    config = load()
    assert (config.seed, config.device) == (0, "cpu")
    assert [r.workers for r in config.regions] == [2, 1]
    assert [r.ps_shards for r in config.regions] == [1, 1]
    assert config.train.mode == "sync" and config.train.target is None
    assert config.checkpoint.keep == 2
    assert config.cluster.kind == "local"
    assert config.data.batch_size == 32
    assert config.averager.region is None and config.averager_region == "eu"
    assert load("averager.region=us").averager_region == "us"
    assert config.region_names == ("eu", "us")


@pytest.mark.parametrize("kind", STRATEGIES)
def test_every_strategy_can_be_named(kind):
    codec = ["codec.up={kind: chunked_topk}"] if kind == "sparseloco" else []
    needed = STRATEGIES[kind]().traits.region.needs_optimizer
    optimizer = [] if needed is None else [f"optimizer={{kind: {needed}}}"]
    config = load(f"strategy={{kind: {kind}}}", *codec, *optimizer)
    assert type(config.strategy) is STRATEGIES[kind]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.stpes=3", "train.stpes.*did you mean steps"),
        ("train.lr=3", r"train.lr.*did you mean optimizer.lr\?"),
        ("train.k1=3", "did you mean strategy.k1, a key of hfa only"),
        ("strategy.intervall=3", "strategy.intervall.*did you mean interval"),
        ("strategy.kind=smaa", "strategy.kind.*did you mean sma"),
        ("strategy.alpha=0.5", r"strategy.alpha.*unknown key"),
        ("optimizer.momentum=0.9", "this kind has no such key; it is a key of momentum, .*muon"),
        ("optimizer.clip_rms=2", "this kind has no such key; it is a key of adafactor only"),
        ("strategy={kind: bsp, interval: 4}", r"interval.*no such key; it is a key of .*diloco.*"),
        ("strategy=smaa", r"got \"smaa\", did you mean {kind: sma}\?$"),
        ("strategy=sma", r"got \"sma\", did you mean {kind: sma}\?$"),
        ("regions.0.wrokers=3", r"regions.0.wrokers.*did you mean workers"),
        ("emulate.link.delay=0.1", "emulate.link.delay.*did you mean delay_s"),
        ("checkpoint.every=5", "checkpoint.every.*did you mean every_s"),
        ("train.steps=0", "train.steps.*a whole number from 1 to 1000000000000"),
        ("train.steps=1.5", "train.steps"),
        ("train.steps=1e23", "train.steps.*a whole number from 1 to 1000000000000"),
        ("optimizer.lr=1e30", "optimizer.lr.*at most 1000000"),
        ("seed=-1", "seed.*a whole number of at least 0"),
        ("name=a/b", "name.*expected 1 to 63 letters"),
        ("regions.1.name=eu west", "regions.1.name.*expected 1 to 63 letters"),
        ("regions=[]", "regions.*at least 1"),
        ("device=gpu", "device.*got .gpu., expected cpu, cuda, or cuda:N"),
        ("emulate.step_s=0", "emulate.step_s.*greater than 0"),
        ("emulate.step_s_by_region.us=-1", "emulate.step_s_by_region.us.*greater than 0"),
        ("emulate.link.loss=1", "emulate.link.loss.*less than 1"),
        ("emulate.link.outages=[[2, 1]]", "emulate.link.*outage"),
        ("checkpoint.keep=1", "checkpoint.keep"),
        ("data.manifest=m.json", "data.*`manifest` and `generate` are mutually exclusive"),
        ("data.generate=null", "data.*give `manifest` or `generate`"),
        ("averager.region=asia", "averager.region .*no region 'asia'; the regions are eu, us"),
        ("emulate.step_s_by_region.asia=1", "step_s_by_region.asia .*no region 'asia'"),
        ("emulate.links.0.dst=asia", "emulate.links.0.dst .*no region 'asia'"),
        ("emulate.links.0.dst=eu", "emulate.links.0.*must be different regions"),
        (
            "emulate.links=[{src: eu, dst: us}, {src: us, dst: eu}, {src: eu, dst: us}]",
            "emulate.links.2 .*: eu to us is given more than once",
        ),
        ("regions.1.name=eu", "regions .*: eu is listed more than once"),
        (
            "device=cuda",
            "eu, us have 0: set for example regions.0.gpus_per_worker=1, or device=cpu",
        ),
        ("train.mode=async", "train.mode.*'sma' works in rounds"),
        ("codec.up.kind=int7", "codec.up.kind.*did you mean int[48]"),
        ("codec.up={kind: topk, ration: 0.1}", "codec.up.ration.*did you mean ratio"),
        ("codec.side={kind: int8}", "codec.side.*unknown key"),
        ("codec.down={kind: bisparse}", "codec.down .*: bisparse is for codec.up only"),
        ("codec.up={kind: bisparse}", "codec.up .*: bisparse.*strategy 'sma'.*topk"),
        ("codec.up={kind: dgt}", "codec.up .*: dgt is for changes"),
    ],
)
def test_what_is_wrong_is_named_with_its_path(override, expected):
    message = complaint(override)
    assert message.startswith("trial.yaml: 1 problem:"), message
    assert re.search(expected, message, re.S), message


@pytest.mark.parametrize("kind", ["decoupled", "diloco_streaming"])
def test_lossy_blocks_are_of_the_whole_model(kind):
    message = complaint(f"strategy={{kind: {kind}}}", "codec.up={kind: dgt}")
    assert re.search(r"codec.up .*: dgt .* whole model; .* in \d+ fragments", message, re.S)


def test_all_problems_come_in_one_message():
    message = complaint("train.steps=0", "strategy.intervall=2", "seed=-1")
    assert "3 problems" in message
    for path in ("train.steps", "strategy.intervall", "seed"):
        assert path in message


def test_a_missing_section_is_named():
    message = complaint(text=TEXT.replace("optimizer: {kind: sgd}\n", ""))
    assert "optimizer" in message and "required" in message
    assert "the key kind is missing" in complaint(text=TEXT.replace("kind: sgd", "lr: 0.1"))


def test_asynchronous_workers_fit_strategies_without_rounds_or_equal_regions():
    assert load("train.mode=async", "regions.1.workers=2").train.mode == "async"
    assert load("train.mode=async", "strategy={kind: asgd_ga}").train.mode == "async"
    assert load("train.mode=async", "regions=[{name: eu, workers: 3}]", "emulate=null")
    assert "'bsp' works in rounds" in complaint("train.mode=async", "strategy={kind: bsp}")


def test_codecs_must_fit_the_strategy():
    assert load().codec.up is None and load().codec.down is None
    assert load("codec.up={kind: topk, ratio: 0.1}").codec.up.ratio == 0.1
    assert load("strategy={kind: bsp}", "codec.up={kind: bisparse}").codec.up.kind == "bisparse"
    unbiased = "{kind: randomk_unbiased}"
    assert load(f"codec={{up: {unbiased}, down: {unbiased}}}").codec.down.kind == "randomk_unbiased"
    for direction in ("up", "down"):
        message = complaint("strategy={kind: asgd_ga}", f"codec.{direction}={unbiased}")
        assert re.search(f"codec.{direction} .*: with randomk_unbiased.*asgd_ga.*randomk", message)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("members.min=3", "members.min.*the run has 2 regions"),
        ("members.min=0", "members.min.*at least 1"),
        ("overlay={kind: binary}", "members.min.*overlay binary.*use overlay star"),
        ("transfers={}", "members.min.*transfers"),
        ("codec.up={kind: dgt}", "members.min.*dgt tracks blocks"),
        ("members.absent=[asia]", "members.absent.*unknown region 'asia'; the regions are eu, us"),
        ("members.absent=[eu]", "members.absent.*'eu' hosts the averager"),
    ],
)
def test_regions_can_be_lost_where_nobody_sums_or_waits_for_them(override, expected):
    strategy = "strategy={kind: " + ("bsp}" if "binary" in override else "asgd_ga}")
    assert load(strategy, "members.min=1").members.min == 1
    message = complaint(strategy, "members.min=1", override)
    assert re.search(expected, message), message


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), "1 of eu, us would be present: leave at least 2, or set members.min"),
        (("members.min=2",), "1 of eu, us would be present: leave at least 2"),
        (("regions.0.ps_shards=2",), "the same ps_shards"),
        (("strategy={kind: bsp}", "overlay={kind: binary}"), "use overlay star"),
        (("transfers={}", "strategy={kind: asgd_ga}"), "remove transfers"),
    ],
)
def test_nobody_joins_later_where_nobody_can(overrides, expected):
    with pytest.raises(ConfigError, match=expected):
        check_absent(load("members.absent=[us]", *overrides))


def test_one_region_trains_alone_where_it_is_said():
    check_absent(load("members.absent=[us]", "members.min=1"))


def test_a_run_that_can_lose_nobody_may_do_everything():
    assert load("strategy={kind: asgd_ga}", "members.min=2", "codec.up={kind: dgt}")


def test_gpus_are_asked_for_where_they_are_used():
    with_gpus = ["device=cuda", "regions.0.gpus_per_worker=1", "regions.1.gpus_per_worker=0.5"]
    assert load(*with_gpus).device == "cuda"


def test_links_are_looked_up_by_direction():
    config = load()
    usual = LinkSpec(rate_mbps=100, delay_s=0.03)
    assert config.links()["us", "eu"] == usual
    assert config.links()["eu", "us"] == LinkSpec(rate_mbps=5, outages=((1, 2),))
    assert type(config.links()["eu", "us"]) is LinkSpec
    assert ("eu", "eu") not in config.links()
    assert set(config.links()) == {("eu", "us"), ("us", "eu")}
    only = load("emulate.link=null")
    assert set(only.links()) == {("eu", "us")}
    assert load("emulate=null").links() == {}


def test_steps_may_be_padded_by_region():
    config = load()
    assert (config.step_s("eu"), config.step_s("us")) == (0.5, 0.7)
    assert load("emulate=null").step_s("us") is None
    assert load("emulate.step_s=null").step_s("eu") is None


def test_steps_may_be_as_long_as_a_machine_takes_for_its_rows():
    speeds = "emulate.rows_per_s_by_region={eu: [10, 40]}"
    config = load(speeds, "emulate.step_s=0.1", "data.batch_size=20")
    assert config.step_s("eu") == pytest.approx(0.1 + 20 / 10)  # the slower one's
    assert config.push_s("eu", worker=1, start=0, rows=20) == pytest.approx(0.1 + 20 / 40)
    assert config.push_s("us", worker=0, start=0, rows=20) == 0.7
    local = load(speeds, "strategy={kind: hfa, k1: 5, k2: 1}", "emulate.step_s=null")
    assert local.push_s("eu", worker=0, start=0, rows=100) == pytest.approx(100 / 10)
    assert "2 workers" in complaint("emulate.rows_per_s_by_region={eu: [1, 2, 3]}")
    assert "no region 'moon'" in complaint("emulate.rows_per_s_by_region={moon: [1]}")


def test_digests_follow_the_values_and_nothing_else():
    config = load()
    assert digest(load_text(dump_yaml(config), [], Experiment, "again")) == digest(config)
    assert digest(load("seed=0")) == digest(config)  # a default that is written out
    turned = TEXT.replace("{name: eu, workers: 2}", "{workers: 2, name: eu}")
    assert digest(load(text=turned)) == digest(config)
    others = [load("seed=1"), load("strategy.interval=9"), load("regions.0.workers=1")]
    assert len({digest(c) for c in [config, *others]}) == 4


def test_what_a_strategy_is_told_survives_the_file():
    text = dump_yaml(load("strategy={kind: asgd_ga, interval: 3, wait: when_busy, combine: sum}"))
    again = load_text(text, [], Experiment, "again").strategy
    assert (again.interval, again.wait, again.combine) == (3, "when_busy", "sum")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("checkpoint.store=/somewhere",), "`store` must begin with s3://"),
        (("checkpoint.store=s3://b?colour=red",), "is invalid"),
        (("checkpoint.region_stores={eu: s3://b/p}",), "wants `store`, too"),
        (
            ("checkpoint.store=s3://b/p", "checkpoint.region_stores={eu: gs://b}"),
            "`region_stores.eu` must begin with s3://",
        ),
        (
            ("checkpoint.store=s3://b/p", "checkpoint.region_stores={asia: s3://b/p}"),
            "checkpoint.region_stores",
        ),
    ],
)
def test_stores_of_checkpoints_are_checked_before_the_start(overrides, said):
    assert said in complaint(*overrides)


def test_credentials_in_the_address_of_a_store_are_refused_and_not_repeated():
    said = complaint("checkpoint.store=s3://key:canary-1f@bucket/p")
    assert "contains credentials" in said and "canary-1f" not in said


def test_only_the_region_without_a_gpu_is_named() -> None:
    told = complaint("device=cuda", "regions.0.gpus_per_worker=1")
    assert "and us has 0: set for example regions.1.gpus_per_worker=1" in told


def test_a_codec_whose_updates_an_overlay_cannot_add_is_named_with_both_ways_out() -> None:
    told = complaint("codec.up={kind: topk}", "overlay={kind: tsengine}")
    assert "updates that codec.up (topk) has encoded cannot be added" in told
    assert "leave codec.up out, or use overlay star" in told
