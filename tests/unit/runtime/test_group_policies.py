"""Decisions about regions that are process groups, and their configuration."""

from __future__ import annotations

import os
import re
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

import geo_ray
from geo_ray.base.errors import (
    ConfigError,
    GeoRayError,
    LoopFailedError,
    ModelMismatchError,
    RankLostError,
    RankOutOfMemoryError,
    RegionLostError,
)
from geo_ray.base.load import dump_yaml
from geo_ray.base.restarts import Restarts
from geo_ray.joining.protocol import SERVER
from geo_ray.joining.service import Stage
from geo_ray.ray_cluster.calls import FailureKind, RayFailure
from geo_ray.runs.recorder import Recorder
from geo_ray.runs.requests import Interruption
from geo_ray.runtime.group_actor import GroupRankActor, RankHost, memory_named, places_of
from geo_ray.runtime.groups import (
    GiveUp,
    GroupPolicy,
    Groups,
    Restart,
    _Group,
    rank_error,
    root_cause,
)
from geo_ray.runtime.run_start import check_loops, check_sharding
from geo_ray.runtime.serving import _Serving, terms_of
from geo_ray.runtime.spec import RunSpec, demand_of, demands_of
from geo_ray.telemetry.event_log import EventLog
from geo_ray.telemetry.events import Event
from geo_ray.telemetry.summary import Summing
from geo_ray.telemetry.totals import RunTotals
from tests.support.observe_support import events, started

KILLED = RayFailure(FailureKind.PROCESS_DIED, "killed by signal 9")
MEMORY = RayFailure(FailureKind.OUT_OF_MEMORY, "its node ran out of memory")


def raised(error: GeoRayError) -> RayFailure:
    return RayFailure(FailureKind.RAISED, error.message, error)


GLOO = raised(LoopFailedError("loop.py:train raised RuntimeError: [gloo] Connection closed"))
VALUE = raised(LoopFailedError("loop.py:train raised ValueError: no rows"))
TOLD = raised(RegionLostError("rank 'eu/1' has failed"))


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ({0: GLOO, 1: KILLED}, 1),
        ({0: KILLED, 1: MEMORY}, 1),
        ({0: GLOO, 1: VALUE}, 1),
        ({0: TOLD, 1: GLOO, 2: VALUE}, 2),
        ({2: KILLED, 1: KILLED}, 1),
        ({1: GLOO}, 1),
    ],
)
def test_the_failure_that_explains_the_others(failures: dict[int, RayFailure], rank: int) -> None:
    assert root_cause(failures) == (rank, failures[rank])


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (KILLED, RankLostError),
        (MEMORY, RankOutOfMemoryError),
        (VALUE, LoopFailedError),
        (TOLD, RankLostError),
        (raised(ModelMismatchError("another model")), ModelMismatchError),
        (RayFailure(FailureKind.BUG, "KeyError: 1"), LoopFailedError),
        (RayFailure(FailureKind.NODE_GONE, "the node has died"), RankLostError),
    ],
)
def test_errors_name_region_rank_and_cause(failure: RayFailure, kind: type[GeoRayError]) -> None:
    error = rank_error("eu", 3, failure)
    assert type(error) is kind
    assert "rank 3 of region 'eu'" in error.message
    assert failure.cause in error.message
    assert error.fix


def test_restarts_are_limited() -> None:
    policy = GroupPolicy(Restarts(2, 100.0))
    for now_s in (0.0, 1.0):
        assert isinstance(policy.lost("eu", {0: KILLED}, Stage.TRAINING, now_s), Restart)
    given_up = policy.lost("eu", {0: KILLED}, Stage.TRAINING, 2.0)
    assert isinstance(given_up, GiveUp)
    assert not given_up.ends_run
    assert "train.max_worker_restarts = 2 in 100 s is used up" in given_up.error.message
    assert isinstance(policy.lost("eu", {0: KILLED}, Stage.TRAINING, 101.0), Restart)


def test_a_loop_that_fails_before_the_run_trains_ends_it() -> None:
    policy = GroupPolicy(Restarts(5, None))
    found = policy.lost("eu", {0: VALUE}, Stage.GATHERING, 0.0)
    assert isinstance(found, GiveUp)
    assert found.ends_run
    assert isinstance(policy.lost("eu", {0: VALUE}, Stage.TRAINING, 0.0), Restart)
    assert isinstance(policy.lost("eu", {0: KILLED}, Stage.GATHERING, 0.0), Restart)


@pytest.mark.parametrize("stage", [Stage.ENDING, Stage.DONE])
def test_nothing_is_started_at_the_end(stage: Stage) -> None:
    found = GroupPolicy(Restarts(5, None)).lost("eu", {0: KILLED}, stage, 0.0)
    assert isinstance(found, GiveUp)
    assert not found.ends_run


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12))
def test_places_number_the_ranks_of_each_node(nodes: list[str]) -> None:
    hosts = [RankHost(node, node, (str(i),), b"") for i, node in enumerate(nodes)]
    places = places_of(hosts)
    for node in set(nodes):
        here = [rank for rank, each in enumerate(nodes) if each == node]
        assert [places[rank].local_rank for rank in here] == list(range(len(here)))
        assert {places[rank].local_world_size for rank in here} == {len(here)}
        for rank in here:
            assert places[rank].gpus[places[rank].local_rank] == str(rank)


@pytest.mark.parametrize(
    "error",
    [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("x")],
)
def test_exhausted_memory_is_named(error: Exception) -> None:
    """Also where the task's own error is reported; other errors stay."""
    is_memory = not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError)
    with pytest.raises(RankOutOfMemoryError if is_memory else LoopFailedError), memory_named():
        raise LoopFailedError("loop.py:train raised") from error


def test_the_end_does_not_wait_for_a_group_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[list[str]] = []
    ended: list[str] = []

    def wait(calls: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        waits.append(calls)
        return [], calls[:0]

    monkeypatch.setattr("geo_ray.runtime.groups.ray.wait", wait)
    monkeypatch.setattr("geo_ray.runtime.groups.kill", ended.append)
    names = ("eu", "us", "asia")
    regions = [{"name": name, "group": {"loop": "a.py:train"}} for name in names]
    groups = Groups.__new__(Groups)
    groups._groups = [
        _Group(region, actors=[f"actor of {region.name}"], calls={0: f"call of {region.name}"})
        for region in geo_ray.load_config(CONFIG | {"regions": regions}).groups
    ]
    for group in groups._groups[1:]:
        group.away = True
    groups.note([{"kind": "step", "region": "us"}, {"kind": "region_joined", "region": "asia"}])
    groups.finish()
    assert waits == [["call of eu"], ["call of asia"]]
    assert sorted(ended) == ["actor of asia", "actor of eu", "actor of us"]


# ------------------------------------------------------------------ configuration

CONFIG: dict[str, Any] = {
    "name": "groups",
    "regions": [
        {"name": "eu", "group": {"loop": "a.py:train", "ranks_per_node": 2}},
        {"name": "us", "join": True},
    ],
    "strategy": {"kind": "diloco"},
    "train": {"steps": 4},
}
TASK: dict[str, Any] = {
    "task": {"use": "digits"},
    "data": {"generate": {}},
    "optimizer": {"kind": "adamw"},
}


def test_a_resumed_run_names_all_loops_that_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text("def train(): ...\n")
    loops = ("a.py:train", "good.py:train", "good.py:trial", "a.py:train")
    sites = [{"name": f"r{i}", "group": {"loop": loop}} for i, loop in enumerate(loops)]
    experiment = geo_ray.load_config(CONFIG | {"regions": sites})
    with pytest.raises(LoopFailedError) as caught:
        check_loops(experiment, tmp_path)
    assert "a.py" in caught.value.message
    assert "'trial' of good.py does not exist" in caught.value.message
    (tmp_path / "a.py").write_text("def train(): ...\n")
    with pytest.raises(LoopFailedError, match=r"\[LOOP_FAILED\] 'trial' of good\.py does"):
        check_loops(experiment, tmp_path)
    (tmp_path / "good.py").write_text("def train(): ...\ndef trial(): ...\n")
    check_loops(experiment, tmp_path)


def regions(**group: Any) -> dict[str, Any]:
    return {"regions": [{"name": "eu", "group": group}, {"name": "us", "join": True}]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"regions": [{"name": "eu", "group": {}}, {"name": "us"}]}, "or none has; us has neither"),
        ({"regions": [{"name": "eu"}], "serve": {}}, "no region joins"),
        (
            {"regions": [{"name": "geo-ray-server", "join": True}]},
            "names that begin with",
        ),
        (
            {"regions": [{"name": "eu", "group": {}, "join": True}]},
            r"group .*no process of a region",
        ),
        (regions(), "task: missing"),
        (TASK, "task .*: .*groups with a `loop`"),
        (regions(backend="nccl", loop="a.py:b"), "nccl needs GPUs"),
        (regions(gpus_per_node=4, ranks_per_node=2, loop="a.py:b"), "4 GPUs have one process each"),
        ({"train": {"steps": 4, "clip_mean_norm": 1.0}}, r"train\.clip_mean_norm .*not supported"),
        (TASK | regions() | {"train": {"steps": 4, "clip_norm": 1.0}}, r"train\.clip_norm"),
        ({"emulate": {"step_s": 0.1}}, r"emulate .*not supported"),
    ],
)
def test_configurations_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        geo_ray.load_config(CONFIG | changes)


def refusal(changes: dict[str, Any]) -> list[str]:
    """Return the problems of a configuration, a line each, without the advice."""
    with pytest.raises(ConfigError) as refused:
        geo_ray.load_config(CONFIG | changes)
    return [line.strip() for line in refused.value.message.splitlines()[1:]]


@pytest.mark.parametrize(
    ("kinds", "where"),
    [
        (({"join": True}, {"join": True}), "where regions join"),
        (({"group": {"loop": "a.py:b"}}, {"join": True}), "where regions join or are groups"),
        (
            ({"group": {"loop": "a.py:b"}}, {"group": {"loop": "a.py:b"}}),
            "where regions are groups",
        ),
    ],
)
def test_all_problems_of_a_served_run_are_reported(
    kinds: tuple[dict[str, Any], ...], where: str
) -> None:
    changes = {
        "regions": [{"name": "eu", "workers": 2, **kinds[0]}, {"name": "us", **kinds[1]}],
        "overlay": {"kind": "netstorm"},
        "device": "cuda",
        "train": {
            "steps": 4,
            "eval_every": 2,
            "clip_norm": 1.0,
            "patience": 1,
            "keep_best": {"metric": "loss", "mode": "min"},
        },
        "checkpoint": {"retry_s": 5.0},
        "averager": {"standby": "eu", "failover_s": 1.0},
        "members": {"min": 3},
        "codec": {"up": {"kind": "dgt"}},
    }
    lines = refusal(changes)
    for key in (
        "workers of 'eu'",
        "overlay",
        "device",
        "train.clip_norm",
        "train.keep_best",
        "checkpoint.retry_s",
        "averager.failover_s",
        "codec.up",
    ):
        (line,) = (line for line in lines if key in line)
        assert f"not supported {where}; omit it" in line
    (standby,) = (line for line in lines if line.startswith("averager.standby"))
    assert f"{where}, the standby is a process of the run's own cluster" in standby
    assert any(line.startswith("members.min") and "has 2 regions" in line for line in lines)
    assert any("watches the metric of `train.target`" in line for line in lines)
    assert len(lines) == 10


def test_a_section_that_is_not_supported_causes_no_further_problems() -> None:
    lines = refusal({"overlay": {"kind": "binary"}, "members": {"min": 1}, "transfers": {}})
    assert [line.partition(" ")[0] for line in lines] == ["overlay", "transfers"]


def test_problems_of_names_are_reported_with_unsupported_keys() -> None:
    twice = [{"name": "eu", "join": True}, {"name": "eu", "join": True}]
    lines = refusal({"regions": twice, "emulate": {"step_s": 0.1}, **TASK})
    assert [line.partition(" ")[0] for line in lines] == [
        "emulate",
        "regions",
        "task",
        "optimizer",
    ]


def test_a_standby_that_is_no_text_is_refused_with_the_words_that_exist() -> None:
    (line,) = refusal({"averager": {"standby": True}})
    assert line.endswith("got true, expected auto, the name of a region, or null")


def test_a_region_with_workers_next_to_joining_ones_can_be_a_group() -> None:
    def started(**eu: Any) -> dict[str, Any]:
        return CONFIG | TASK | {"regions": [{"name": "eu"} | eu, {"name": "us", "join": True}]}

    with pytest.raises(ConfigError) as refused:
        geo_ray.load_config(started(workers=3))
    fix = re.search(r"`group: (.*?)` replaces `workers` of 'eu'", str(refused.value))
    assert fix is not None
    group = yaml.safe_load(fix[1])
    experiment = geo_ray.load_config(started(group=group))
    assert experiment.regions[0].group is not None
    assert experiment.regions[0].group.world_size == 3


@pytest.mark.parametrize(
    ("checkpoint", "saves"),
    [
        ({}, True),
        ({"every_s": None}, False),
        ({"every_rounds": 2}, True),
        ({"every_s": None, "every_rounds": 2}, True),
    ],
)
def test_a_run_with_checkpoints_saves_at_its_end(checkpoint: dict[str, Any], saves: bool) -> None:
    experiment = geo_ray.load_config(CONFIG | {"checkpoint": checkpoint})
    assert terms_of(experiment).saves_at_end is saves


def test_rounds_replace_seconds_between_checkpoints(tmp_path: Path) -> None:
    experiment = geo_ray.load_config(CONFIG | {"checkpoint": {"every_rounds": 2}})
    assert experiment.checkpoint.every_s is None
    (tmp_path / "dumped.yaml").write_text(dump_yaml(experiment))
    assert geo_ray.load_config(tmp_path / "dumped.yaml") == experiment
    (line,) = refusal({"checkpoint": {"every_rounds": 2, "every_s": 60.0}})
    assert line.startswith("checkpoint.every_s ") and "set every_s to null" in line


@pytest.mark.parametrize(
    ("kind", "group", "is_refused"),
    [
        ("muon", {"ranks_per_node": 2}, True),
        ("adafactor", {"nodes": 2}, True),
        ("muon", {}, True),
        ("muon", {"ranks_per_node": 2, "sharding": "ddp"}, False),
        ("muon", {"ranks_per_node": 2, "loop": "a.py:b"}, False),
        ("adamw", {"ranks_per_node": 2}, False),
    ],
)
@pytest.mark.parametrize("parallelizes", [False, True])
def test_whole_parameters_are_not_divided(
    kind: str, group: dict[str, Any], is_refused: bool, parallelizes: bool
) -> None:
    groups = [{"name": "eu", "group": group}, {"name": "us", "group": {"sharding": "ddp"}}]
    tree = CONFIG | TASK | {"optimizer": {"kind": kind}, "regions": groups}
    task = SimpleNamespace(parallelize=None) if parallelizes else SimpleNamespace()
    context = pytest.raises(ConfigError, match="in region 'eu'")
    with context if is_refused and not parallelizes else nullcontext():
        check_sharding(geo_ray.load_config(tree), task)  # type: ignore[arg-type]


def test_a_strategy_that_ends_by_rows_needs_their_number() -> None:
    regions = [{"name": "eu", "join": True}, {"name": "us", "join": True}]
    tree = CONFIG | {"strategy": {"kind": "nbsync"}, "regions": regions}
    with pytest.raises(ConfigError, match=r"serve\.rows: missing"):
        geo_ray.load_config(tree)
    geo_ray.load_config(tree | {"serve": {"rows": 10}})
    with pytest.raises(ConfigError, match="strategy diloco ends by steps; omit it"):
        geo_ray.load_config(tree | {"strategy": {"kind": "diloco"}, "serve": {"rows": 10}})


@pytest.mark.parametrize(
    ("serve", "standby", "most"),
    [
        ({"port": 65535}, None, None),
        ({"port": 0, "holders": 4}, "auto", None),
        ({"port": 65533, "holders": 2}, "auto", None),
        ({"port": 65534, "holders": 2}, "auto", 65533),
        ({"port": 65535, "holders": 4}, None, 65532),
        ({"port": 65535}, "auto", 65534),
    ],
)
def test_all_ports_of_a_served_run_exist(
    serve: dict[str, int], standby: str | None, most: int | None
) -> None:
    regions = [{"name": "eu", "join": True}, {"name": "us", "join": True}]
    tree = {"name": "a", "regions": regions, "strategy": {"kind": "diloco"}, "train": {"steps": 4}}
    tree |= {"serve": serve, "averager": {"standby": standby}}
    with nullcontext() if most is None else pytest.raises(ConfigError, match=f"at most {most}\n"):
        geo_ray.load_config(tree)


def test_demands_of_groups() -> None:
    group = {"nodes": 2, "gpus_per_node": 8, "cpus_per_rank": 2.0}
    tree = (
        CONFIG | TASK | {"regions": [{"name": "us", "join": True}, {"name": "eu", "group": group}]}
    )
    experiment = geo_ray.load_config(tree | {"train": {"steps": 4, "max_worker_restarts": 1}})
    (config,) = experiment.groups
    assert config.group is not None
    assert config.group.world_size == 16
    assert config.group.collectives == "nccl"
    averager, ranks = demands_of(experiment)
    assert averager.node_label == "us"
    assert ranks.node_label == "eu"
    assert [each.resources() for each in ranks.bundles] == [{"CPU": 16.0, "GPU": 8.0}] * 2
    assert ranks.indices()["worker"] == (0,) * 8 + (1,) * 8
    assert demand_of(experiment, config).total() == {"CPU": 32.0, "GPU": 16.0}
    assert experiment.labels == ("us", "eu")
    assert experiment.rows == 4 * (16 + 1) * 32


@pytest.mark.parametrize("kind", ["local", "existing"])
def test_each_machine_of_a_group_is_another_node(kind: str) -> None:
    """A local cluster has one node for a region."""
    group = {"nodes": 2, "ranks_per_node": 2, "loop": "a.py:train"}
    names = ("eu", "us")
    tree = CONFIG | {"regions": [{"name": name, "group": group} for name in names]}
    experiment = geo_ray.load_config(tree | {"cluster": {"kind": kind}})
    averager, *groups = demands_of(experiment)
    assert not averager.spreads
    for demand in groups:
        assert demand.spreads == (kind == "existing")
        assert demand.groups() == [demand.bundles]
        assert demand.indices()["worker"] == (0, 0, 1, 1)
    first = demand_of(experiment, experiment.regions[0])
    assert [len(each) for each in first.groups()] == ([1, 2] if kind == "existing" else [3])


@pytest.mark.parametrize(
    ("gpus", "backend", "device", "collectives"),
    [
        (4, None, "cuda:2", "cpu:gloo,cuda:nccl"),
        (4, "gloo", "cuda:2", "gloo"),
        (0, None, "cpu", "gloo"),
    ],
)
def test_backend_and_device_of_a_rank(
    gpus: int, backend: str | None, device: str, collectives: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 6 of two machines with four ranks each; no GPU is used."""
    group = {"nodes": 2, "loop": "a.py:train", "backend": backend}
    group |= {"gpus_per_node": gpus} if gpus else {"ranks_per_node": 4}
    regions = [{"name": "eu", "group": group}, {"name": "us", "join": True}]
    experiment = geo_ray.load_config(CONFIG | {"regions": regions})
    spec = RunSpec(experiment.model_dump_json(), "", "", "", "run", "")
    hosts = [
        RankHost(f"node{i // 4}", f"10.0.0.{i // 4}", (str(3 - i % 4),), b"") for i in range(8)
    ]
    place = places_of(hosts)[6]
    found: dict[str, Any] = {}
    module = "geo_ray.runtime.group_actor."
    monkeypatch.setattr(module + "TCPStore", lambda *where, **_: where)
    monkeypatch.setattr(module + "dist.init_process_group", lambda *a, **k: found.update(k, on=a))
    for name in ("barrier", "destroy_process_group"):
        monkeypatch.setattr(f"{module}dist.{name}", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda to: found.update(device=to))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    actor = GroupRankActor(spec, "eu", 6, "geo-ray://10.0.0.9:1", "saved")
    with actor._process_group(place, hosts[0].host, 7000) as used:
        assert str(used) == device
        about = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR")}
        assert about == {"RANK": "6", "LOCAL_RANK": "2", "MASTER_ADDR": "10.0.0.0"}
        assert os.environ["WORLD_SIZE"] == "8" and os.environ["LOCAL_WORLD_SIZE"] == "4"
        if gpus:
            assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,2,1,0"
            assert found["device"] == used
    assert found["on"] == (collectives,)
    assert (found["rank"], found["world_size"]) == (6, 8)
    assert found["store"] == ("10.0.0.0", 7000, 8)


def test_a_run_of_groups_takes_any_port() -> None:
    assert geo_ray.load_config(CONFIG).served_at.port == 7447
    groups = [{"name": name, "group": {"loop": "a.py:train"}} for name in ("eu", "us")]
    experiment = geo_ray.load_config(CONFIG | {"regions": groups})
    assert experiment.served_at.port == 0
    served = experiment.model_copy(update={"serve": experiment.served_at})
    assert served.served_at == experiment.served_at


def test_serve_refuses_groups() -> None:
    with pytest.raises(ConfigError, match="geo_ray starts the groups eu"):
        geo_ray.serve(CONFIG)


def test_times_of_a_resumed_run_continue(tmp_path: Path) -> None:
    """Those of its events and those that they contain: steps and exchanges keep their length."""
    serving, seen = _Serving.__new__(_Serving), list[Event]()
    nothing = SimpleNamespace(
        note=lambda _: None, news=list, poll=lambda *_, **__: [], tick=lambda *_: None
    )
    serving._averagers = serving._groups = nothing  # type: ignore[assignment]
    serving._checkpoints = serving._plans = nothing  # type: ignore[assignment]
    serving._stopping = SimpleNamespace(after=lambda _: None)  # type: ignore[assignment]
    serving._setup = SimpleNamespace(  # type: ignore[assignment]
        experiment=geo_ray.load_config(CONFIG),
        reporting=SimpleNamespace(interruption=Interruption(), status=lambda _: None),
    )
    serving._stops = serving._is_interrupted = False
    serving._shown, serving._before_s = "", 3600.0
    step = {"region": "eu", "step": 2, "steps": 2, "samples": 4, "loss": 1.0, "compute_s": 2.0}
    exchange = {"region": "eu", "seq": 1, "bytes_sent": 5, "bytes_received": 5, "blocking": True}
    polled = [
        {"kind": "step", "t_s": 3.0, "start_s": 1.0, "wait_s": 0.0, **step},
        {"kind": "exchange", "t_s": 3.0, "start_s": 2.5, "staleness": 0, "round": 1, **exchange},
    ]
    found = {"stage": "training", "now_s": 3.0, "awaited": {}, "save": None, "rounds": 1}
    with EventLog(tmp_path / "events.jsonl") as log:
        recorder = Recorder(log, [seen.append], lambda: None)
        serving._record(recorder, Summing(None), found | {"saves": False, "events": polled})
    assert [(each.t_s, each["start_s"]) for each in seen] == [(3603.0, 3601.0), (3603.0, 3602.5)]


def test_traffic_is_recorded_during_the_run(tmp_path: Path) -> None:
    """The counters are totals, so that records replace each other; a stopped run keeps them."""
    serving, counts = _Serving.__new__(_Serving), {"eu": {"sent": 30, "received": 10}}
    serving._origin_unix_s = time.time()
    serving._averagers = SimpleNamespace(links=lambda: counts)  # type: ignore[assignment]
    summing = Summing(None)
    summing.feed(events([started()])[0])
    seen: list[Event] = []
    with EventLog(tmp_path / "events.jsonl") as log:
        recorder = Recorder(log, [seen.append], lambda: None)
        serving._note_traffic(recorder, summing)
        counts["eu"] = {"sent": 45, "received": 20}
        serving._note_traffic(recorder, summing)
    totals = RunTotals()
    for event in [events([started()])[0], *seen]:
        totals.feed(event)
    assert totals.wan.by_link() == {("eu", SERVER): 20, (SERVER, "eu"): 45}
    assert serving._traffic_s > time.monotonic()
