"""Regions that join a run from a loop of their own, over sockets, in threads of one process."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import parquet
from torch import Tensor, nn

import geo_ray
from geo_ray.api.data import SourceFiles
from geo_ray.base.errors import (
    ConfigError,
    LoopMisuseError,
    ModelMismatchError,
    NonFiniteError,
    ServerLostError,
)
from geo_ray.codecs.registry import CODECS
from geo_ray.data.tasks import classification
from geo_ray.joining.credentials import JoinCredentials
from geo_ray.joining.protocol import SERVER, JoinTerms
from geo_ray.joining.server import JoinServer
from geo_ray.joining.service import Stage
from geo_ray.joining.site import JoinedRegion, JoinedTraining, _Notices, join
from geo_ray.runs.build import initial_parameters
from tests.integration.joining import recorded_task
from tests.support.join_support import (
    WAIT_S,
    Loop,
    adamw,
    loss_of,
    rows_of,
    serving,
    small_model,
    terms,
    train_all,
    vector_of,
    write_credentials,
)
from tests.support.pages import sources

PAGE = "docs/guides/your-own-loop.md"
REGIONS = ("eu", "us")
STEPS, INTERVAL = 12, 4
NOT_HERE = ("dgt",)  # loses blocks in flight, which only bridges track
OUTER = {"kind": "nesterov", "lr": 0.7, "momentum": 0.9}
DILOCO = {"kind": "diloco", "interval": INTERVAL, "weights": "uniform", "outer": OUTER}


def train(run: JoinTerms, folder: Path, **loop: Any) -> tuple[Tensor, list[dict[str, Any]]]:
    """Train all regions to the end; returns the model, which is equal everywhere, and events."""
    with serving(run, folder) as (server, address):
        found = train_all({name: Loop(address, name, folder, **loop).run for name in run.regions})
        for name, result in found.items():
            assert not isinstance(result, Exception), f"{name}: {result!r}"
            assert torch.equal(result[0], found[run.regions[0]][0])
            assert torch.equal(result[0], server.service.model_P) or loop
        assert server.stage is Stage.DONE
        return found[run.regions[0]][0], server.news()


def plain_diloco(
    models: dict[str, nn.Module], step: Callable[[str, int], Tensor], steps: int
) -> Tensor:
    """DiLoCo in plain PyTorch, written from docs/reference/strategies.md; uniform weights."""
    first = models[REGIONS[0]]
    outer = vector_of(first)
    momentum = torch.zeros_like(outer)
    optimizers = {name: adamw(model) for name, model in models.items()}
    for number in range(steps):
        for name in models:
            optimizers[name].zero_grad()
            step(name, number).backward()
            optimizers[name].step()
        if (number + 1) % INTERVAL == 0:
            delta = sum(outer - vector_of(model) for model in models.values()) / len(models)
            momentum = OUTER["momentum"] * momentum + delta
            outer = outer - OUTER["lr"] * (delta + OUTER["momentum"] * momentum)
            for model in models.values():
                nn.utils.vector_to_parameters(outer.clone(), model.parameters())
    return outer


def test_diloco_is_that_of_plain_pytorch(tmp_path: Path) -> None:
    found, events = train(terms(REGIONS, STEPS, strategy=DILOCO), tmp_path)
    models = {name: small_model() for name in REGIONS}
    plain = plain_diloco(
        models, lambda name, step: loss_of(models[name], rows_of(name, step)), STEPS
    )
    assert float((plain - vector_of(small_model())).abs().max()) > 0.05
    torch.testing.assert_close(found, plain, rtol=0, atol=2e-7)
    assert [e["kind"] for e in events].count("exchange") == len(REGIONS) * STEPS // INTERVAL


def test_diloco_has_the_bits_of_a_run_that_geo_ray_drives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same rows and initial parameters, and the fused AdamW that geo_ray uses."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "files").mkdir()
    lines = ["x,label", *(f"{i / 100},{i % 3}" for i in range(400))]
    (tmp_path / "files" / "rows.csv").write_text("\n".join(lines))
    task = "tests.integration.joining.recorded_task:Recorded"
    geo_ray.shard_data(task, REGIONS, "data", files=SourceFiles("files"))
    recorded_task.BATCHES.clear()
    run = geo_ray.simulate(
        {
            "name": "driven",
            "task": {"use": task},
            "data": {"manifest": "data/manifest.json", "batch_size": 8},
            "regions": [{"name": name} for name in REGIONS],
            "strategy": DILOCO,
            "optimizer": {"kind": "adamw", "lr": 0.01, "weight_decay": 0.01},
            "train": {"steps": STEPS, "eval_every": 0},
            "emulate": {"step_s": 0.05},  # otherwise some steps are made to measure them
        }
    )
    held = {
        name: {
            x
            for path in Path("data", name).glob("train-*.parquet")
            for x in parquet.read_table(path)["x"].to_pylist()
        }
        for name in REGIONS
    }
    batches: dict[str, list[Any]] = {name: [] for name in REGIONS}
    for batch in recorded_task.BATCHES:
        rows = batch.inputs[:, 0].tolist()
        for name in REGIONS:
            if set(rows) <= held[name]:
                batches[name].append(batch)  # others are for evaluation
    driven = vector_of(run.model())

    def loop(address: str, name: str) -> Tensor:
        model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 3))
        nn.utils.vector_to_parameters(initial.clone(), model.parameters())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        path = tmp_path / f"{name}.pem"
        with join(address, region=name, credentials=path) as site, site.training(model) as sync:
            while not sync.done:
                batch = batches[name][sync.steps]
                optimizer.zero_grad()
                classification.classification_loss(model, batch).backward()
                optimizer.step()
                sync.step(rows=len(batch.labels))
        return vector_of(model)

    initial = initial_parameters(recorded_task.Recorded(geo_ray.Options()), seed=0)
    with serving(terms(REGIONS, STEPS, strategy=DILOCO), tmp_path) as (_, address):
        found = train_all({name: partial(loop, address, name) for name in REGIONS})
    assert [len(each) for each in batches.values()] == [STEPS, STEPS]
    assert torch.equal(found["eu"], driven)
    assert torch.equal(found["us"], driven)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_diloco_of_several_pieces_is_that_of_plain_pytorch(dtype: str, tmp_path: Path) -> None:
    """A change and its answer pass in pieces; bf16 parameters keep a vector in full precision."""
    width = 20_013
    run = terms(REGIONS, STEPS, strategy=DILOCO)
    found, _ = train(run, tmp_path, width=width, dtype=dtype)
    assert found.numel() > 3 * 2**16
    models = {name: small_model(width=width) for name in REGIONS}
    plain = plain_diloco(
        models, lambda name, step: loss_of(models[name], rows_of(name, step)), STEPS
    )
    assert float((plain - vector_of(small_model(width=width))).abs().max()) > 0.05
    atol = 2e-7 if dtype == "float32" else 0.1
    torch.testing.assert_close(found, plain, rtol=0, atol=atol)


@pytest.mark.parametrize("codec", [kind for kind in sorted(CODECS) if kind not in NOT_HERE])
def test_codecs(codec: str, tmp_path: Path) -> None:
    """A lossy codec ends near the result without one, and all regions are equal to the bit."""
    options = {"rank": 1} if codec == "powersgd" else {}
    both: dict[str, Any] = {"up": {"kind": codec, **options}}
    if not CODECS[codec].model_validate(options).traits.up_only:
        both["down"] = {"kind": codec, **options}
    found, events = train(terms(REGIONS, STEPS, strategy=DILOCO, codec=both), tmp_path)
    (exact := tmp_path / "exact").mkdir()
    plain, exact_events = train(terms(REGIONS, STEPS, strategy=DILOCO), exact)
    if not CODECS[codec].model_validate(options).traits.lossy:
        assert torch.equal(found, plain)
        return
    assert not torch.equal(found, plain)
    torch.testing.assert_close(found, plain, rtol=0, atol=0.3)
    sent, exact_sent = (
        sum(e["bytes_sent"] for e in each if e["kind"] == "exchange")
        for each in (events, exact_events)
    )
    assert sent < exact_sent


def test_the_evaluation_of_the_page(tmp_path: Path) -> None:
    (code,) = (
        body for body in sources(PAGE, "python") if body.startswith("if sync.evaluation_due")
    )
    model = small_model()
    held = {"eu": rows_of("eu", 90), "us": tuple(x[:2] for x in rows_of("us", 90))}

    def evaluate(sync: JoinedTraining, region: str) -> None:
        x, y = held[region]
        exec(
            code,
            {"torch": torch, "nn": nn, "sync": sync, "model": model, "held_x": x, "held_y": y},
        )

    run = terms(REGIONS, STEPS, strategy=DILOCO, eval_every=6)
    with serving(run, tmp_path) as (server, address):
        train_all(
            {
                name: partial(Loop(address, name, tmp_path).run, partial(evaluate, region=name))
                for name in REGIONS
            }
        )
        found = [each for each in server.news() if each["kind"] == "eval" and not each["region"]]
    with torch.no_grad():
        x, y = (torch.cat([held[name][i] for name in REGIONS]) for i in (0, 1))
        expected = nn.functional.cross_entropy(model(x), y).item()
    assert [(each["step"], each["final"], each["samples"]) for each in found] == [
        (6, False, 8),
        (12, True, 8),
    ]
    for each in found:
        assert each["metrics"]["loss"] == pytest.approx(expected, rel=1e-6)


def test_evaluations_are_added_over_regions(tmp_path: Path) -> None:
    def evaluate(sync: JoinedTraining, rows: int) -> None:
        if sync.evaluation_due:
            sync.report({"loss": torch.tensor(rows * 2.0), "right": 1.0}, rows=rows)
            assert not sync.evaluation_due

    run = terms(REGIONS, STEPS, strategy=DILOCO, eval_every=6)
    with serving(run, tmp_path) as (server, address):
        train_all(
            {
                name: partial(Loop(address, name, tmp_path).run, partial(evaluate, rows=rows))
                for name, rows in (("eu", 10), ("us", 30))
            }
        )
        found = [event for event in server.news() if event["kind"] == "eval"]
    whole = [event for event in found if event["region"] is None]
    assert [(event["step"], event["final"]) for event in whole] == [(6, False), (12, True)]
    for event in whole:
        assert event["samples"] == 40
        assert event["metrics"] == {"loss": 2.0, "right": 2 / 40}
    assert sorted(event["region"] for event in found if event["region"]) == ["eu", "eu", "us", "us"]


@pytest.mark.parametrize(
    ("sums", "rows", "message"),
    [
        ({"loss": "3.0"}, 4, "'loss' is a str, not a number"),
        ({"loss": None}, 4, "'loss' is a NoneType, not a number"),
        ({"loss": torch.ones(2)}, 4, "'loss' is a Tensor, not a number"),
        ({"loss": [1.0]}, 4, "'loss' is a list, not a number"),
        ({3: 1.0}, 4, "'3' is a float, not a number"),
        (2.5, 4, "sums is a float, not a dict"),
        ({}, 4, "sums is empty"),
        ({"loss": 1.0}, 4.0, r"rows is 4\.0 \(float\), not a number of rows"),
        ({"loss": 1.0}, -1, r"rows is -1 \(int\)"),
    ],
)
def test_reports_that_are_wrong(sums: Any, rows: Any, message: str, tmp_path: Path) -> None:
    """A refused report does not count: a correct one can follow."""
    run = terms(("eu",), 2, strategy={"kind": "sma", "interval": 1})

    def evaluate(sync: JoinedTraining) -> None:
        if sync.done:
            with pytest.raises(LoopMisuseError, match=f"region 'eu': sync.report .* {message}"):
                sync.report(sums, rows)
            assert sync.evaluation_due
            sync.report({"a": torch.tensor([6.0]), "b": np.float32(3), "c": True}, np.int64(2))

    with serving(run, tmp_path) as (server, address):
        found = train_all({"eu": partial(Loop(address, "eu", tmp_path).run, evaluate)})
        assert not isinstance(found["eu"], Exception), found
        (event,) = (e for e in server.news() if e["kind"] == "eval" and not e["region"])
    assert event["metrics"] == {"a": 3.0, "b": 1.5, "c": 0.5}


def test_reports_at_the_wrong_time(tmp_path: Path) -> None:
    run = terms(("eu",), 4, strategy={"kind": "sma", "interval": 1}, eval_every=2)

    def evaluate(sync: JoinedTraining) -> None:
        if not sync.evaluation_due:
            with pytest.raises(LoopMisuseError, match=f"after {sync.steps} steps: no evaluation"):
                sync.report({"loss": 1.0}, 1)
            return
        sync.report({"loss": 1.0}, 1)
        with pytest.raises(LoopMisuseError, match=f"after {sync.steps} steps: the second report"):
            sync.report({"loss": 1.0}, 1)

    with serving(run, tmp_path) as (server, address):
        found = train_all({"eu": partial(Loop(address, "eu", tmp_path).run, evaluate)})
        assert not isinstance(found["eu"], Exception), found
        whole = [e for e in server.news() if e["kind"] == "eval" and not e["region"]]
    assert [(event["step"], event["final"]) for event in whole] == [(2, False), (4, True)]


def test_waits_are_named_with_their_limit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong address, and regions that do not come."""
    monkeypatch.setattr("geo_ray.joining.site._NOTICE_S", 0.05)
    monkeypatch.setattr("geo_ray.joining.site._AGAIN_S", 0.1)
    write_credentials(tmp_path, ("eu", "us"))
    with socket.socket() as taken:  # it is bound, but does not listen
        taken.bind(("127.0.0.1", 0))
        address = f"geo-ray://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ServerLostError, match=r"no run has answered .* wait_s = 0\.5 s"):
            join(address, region="eu", credentials=tmp_path / "eu.pem", wait_s=0.5)
    assert caplog.text.count(f"'eu' waits for the run at {address}, for ") > 1
    assert "no connection to the server of the run (" in caplog.text
    with serving(terms(("eu", "us"), STEPS, strategy=DILOCO), tmp_path) as (_, address):
        path = tmp_path / "eu.pem"
        with (
            join(address, region="eu", credentials=path, wait_s=1.0) as site,
            pytest.raises(ServerLostError, match=r"other regions did not come .* wait_s = 1 s"),
        ):
            site.begin(small_model())
    assert "waiting for the other regions, for " in caplog.text


@pytest.mark.parametrize("is_training", [False, True])
def test_ranks_are_told_that_a_run_ends_at_once(is_training: bool, tmp_path: Path) -> None:
    names = ("eu",) if is_training else ("eu", "us")
    with serving(terms(names, 10**6, strategy=DILOCO), tmp_path) as (server, address):

        def end() -> None:
            waits = {} if is_training else {"us": "not there"}
            while server.service.missing() != waits:
                time.sleep(0.01)
            server.end("it was stopped")

        found = train_all({"eu": Loop(address, "eu", tmp_path).run, "end": end})
    assert isinstance(found["eu"], ServerLostError)
    assert found["eu"].message == "the run has ended: it was stopped"


def test_a_long_wait_is_reported_again_with_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("geo_ray.joining.site.time", SimpleNamespace(monotonic=lambda: now_s))
    notices, left_s = _Notices(150.0), list[float]()
    while notices.left_s > 0:
        now_s += min(notices.next_s, notices.left_s)
        if notices.is_due():
            left_s.append(notices.left_s)
            assert not notices.is_due()
    assert left_s == [148.0, 88.0, 28.0]


def test_a_server_that_was_replaced_is_noticed(tmp_path: Path) -> None:
    """It does not know the regions: they end at once instead of waiting for an answer."""
    run = terms(REGIONS, STEPS, strategy=DILOCO)
    with serving(run, tmp_path) as (server, address):
        host, port = server.address
        loop = Loop(address, "eu", tmp_path)
        found: dict[str, Any] = {}
        thread = threading.Thread(target=lambda: found.update(train_all({"eu": loop.run})))
        thread.start()
        while server.service.missing() != {"us": "not there"}:
            time.sleep(0.01)
        server.close()
        again = JoinServer(run, JoinCredentials.read(tmp_path / f"{SERVER}.pem"), host, port)
        try:
            thread.join(WAIT_S)
        finally:
            again.close()
    assert isinstance(found["eu"], ServerLostError)
    assert "was replaced" in str(found["eu"])


class KilledError(Exception):
    """Ends a loop as a crash does."""


STRATEGIES_THAT_REJOIN = (
    {"kind": "sma", "interval": 3},
    DILOCO,
    {"kind": "diloco_streaming", "interval": 4, "fragments": 2, "tau": 1},
    {"kind": "one_step_delay", "interval": 3},
    {"kind": "diloco_eager", "interval": 3},
    {"kind": "asgd_ga", "interval": 3},
    {"kind": "ama", "interval": 3},
)


@pytest.mark.parametrize("strategy", STRATEGIES_THAT_REJOIN, ids=lambda each: each["kind"])
@pytest.mark.parametrize("tells", [True, False])
def test_a_region_that_failed_joins_again(
    strategy: dict[str, Any], tells: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It continues with a copy of another region's state; all regions end equal."""
    if not tells:  # as after kill -9
        monkeypatch.setattr(JoinedRegion, "_tell_failed", lambda *_: None)
    steps = 40

    def fail(sync: JoinedTraining) -> None:
        if sync.steps == 5:
            raise KilledError

    def twice(loop: Loop) -> Any:
        with pytest.raises(KilledError):
            loop.run(fail)
        return loop.run(first.append)

    def wait(sync: JoinedTraining) -> None:
        """Leave steps for the region that returns."""
        while sync.steps == steps // 2 and not (first or server.service.waiting):
            time.sleep(0.01)

    first: list[JoinedTraining] = []
    run = terms(REGIONS, steps, strategy=strategy)
    with serving(run, tmp_path) as (server, address):
        loops = {name: Loop(address, name, tmp_path) for name in REGIONS}
        found = train_all(
            {
                "eu": partial(loops["eu"].run, wait),
                "us": partial(twice, loops["us"]),
            }
        )
        for result in found.values():
            assert not isinstance(result, Exception), repr(result)
        kinds = [event["kind"] for event in server.news()]
        assert kinds.count("region_lost") == kinds.count("region_joined") == 1
        assert server.stage is Stage.DONE
    assert found["us"][1] == found["eu"][1] == steps
    torch.testing.assert_close(found["us"][0], found["eu"][0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_parameters_of_lower_precision(dtype: str, tmp_path: Path) -> None:
    """The outer model is fp32: it moves although its steps are too small for the parameters."""
    found, _ = train(terms(REGIONS, STEPS, strategy=DILOCO), tmp_path, dtype=dtype)
    whole = vector_of(small_model())
    assert float((found - whole).abs().max()) > 0.01


def test_another_run_and_wrong_addresses(tmp_path: Path) -> None:
    with serving(terms(REGIONS, STEPS, strategy=DILOCO), tmp_path) as (_, address):
        pem = tmp_path / "eu.pem"
        with pytest.raises(ConfigError, match="is for region 'eu', not 'us'"):
            join(address, region="us", credentials=pem)
        with pytest.raises(ConfigError, match="is no address of a run"):
            join("10.0.0.5:7447", region="eu", credentials=pem)
        other = tmp_path / "other"
        write_credentials(other, REGIONS, "another")
        with pytest.raises(ServerLostError, match=r"no run has answered at .*PEER_REFUSED"):
            join(address, region="eu", credentials=other / "eu.pem", wait_s=1.0)
        (forged := tmp_path / "forged").mkdir()
        write_credentials(forged, REGIONS)  # with the run's id
        with pytest.raises(ServerLostError, match=r"no run has answered at .*PEER_REFUSED"):
            join(address, region="eu", credentials=forged / "eu.pem", wait_s=1.0)
    with pytest.raises(ServerLostError, match=r"no run has answered at geo-ray://127\.0\.0\.1:1"):
        join("geo-ray://127.0.0.1:1", region="eu", credentials=pem, wait_s=1.0)


def test_a_server_that_is_gone_ends_the_loop_after_its_limit(tmp_path: Path) -> None:
    with serving(terms(("eu",), 1000, strategy=DILOCO), tmp_path) as (server, address):

        def close(sync: JoinedTraining) -> None:
            if sync.steps == INTERVAL:
                server.close()

        loop = Loop(address, "eu", tmp_path, wait_s=1.0)
        found = train_all({"eu": partial(loop.run, close)})
    assert isinstance(found["eu"], ServerLostError), found
    assert "wait_s = 1 s" in found["eu"].message


def test_another_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    """Its vocabulary has the same size, so that the model is the same."""
    vocabularies = {"eu": {"a": 0, "b": 1}, "us": {"b": 0, "a": 1}}

    def loop(name: str) -> None:
        path = tmp_path / f"{name}.pem"
        with (
            join(address, region=name, credentials=path, wait_s=5.0) as site,
            site.training(small_model(), same={"vocabulary": vocabularies[name], "id": b"x"}),
        ):
            raise AssertionError("it must be refused")

    with serving(terms(REGIONS, STEPS, strategy=DILOCO), tmp_path) as (_, address):
        found = train_all({name: partial(loop, name) for name in REGIONS})
        (refused,) = (e for e in found.values() if isinstance(e, ModelMismatchError))
        assert re.search(
            r"'vocabulary' of region '(eu|us)' \(rank 0\) is not that of region", (refused.message)
        )
        assert sum(isinstance(e, ServerLostError) for e in found.values()) == 1
        with (
            join(address, region="eu", credentials=tmp_path / "eu.pem") as site,
            pytest.raises(ConfigError, match=r"same\['t'\]: a object has no digest"),
        ):
            site.begin(small_model(), same={"t": object()})


def test_another_model_is_refused_in_words(tmp_path: Path) -> None:
    def other(loop: Loop) -> None:
        model = nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 3))
        path = loop.folder / "us.pem"
        with (
            join(loop.address, region="us", credentials=path, wait_s=10.0) as site,
            site.training(model),
        ):
            pass

    with serving(terms(REGIONS, STEPS, strategy=DILOCO), tmp_path) as (_, address):
        loop = Loop(address, "eu", tmp_path, wait_s=10.0)
        found = train_all({"eu": loop.run, "us": partial(other, loop)})
    errors = [str(each) for each in found.values() if isinstance(each, ModelMismatchError)]
    assert len(errors) == 1  # the second one to arrive
    assert re.search(
        r"'0\.weight' is float32 \[1[23], 7\] in region '(eu|us)' \(rank 0\)", errors[0]
    )


@pytest.mark.parametrize(
    ("after", "error"),
    [
        (3, r"ended after 3 of 12 steps"),
        (0, r"ended after 0 of 12 steps"),
    ],
)
def test_a_loop_that_ends_early(after: int, error: str, tmp_path: Path) -> None:
    def early(loop: Loop) -> None:
        model = small_model()
        path = loop.folder / "eu.pem"
        with (
            join(loop.address, region="eu", credentials=path) as site,
            site.training(model) as sync,
        ):
            for _ in range(after):
                sync.step(rows=1)

    run = terms(REGIONS, STEPS, strategy=DILOCO)
    with serving(run, tmp_path) as (server, address):
        loops = {name: Loop(address, name, tmp_path) for name in REGIONS}
        found = train_all({"eu": partial(early, loops["eu"]), "us": loops["us"].run})
        assert isinstance(found["eu"], LoopMisuseError)
        assert re.search(error, str(found["eu"]))
        assert not isinstance(found["us"], Exception), found["us"]
        assert found["us"][1] == STEPS  # continues alone
        assert server.stage is Stage.DONE


def test_steps_after_the_end_and_loops_without_steps(tmp_path: Path) -> None:
    def late(sync: JoinedTraining) -> None:
        if sync.done:
            with pytest.raises(LoopMisuseError, match="after the run's last step"):
                sync.step(rows=1)

    run = terms(("eu",), 4, strategy=DILOCO)
    with serving(run, tmp_path) as (_, address):
        found = train_all({"eu": partial(Loop(address, "eu", tmp_path).run, late)})
        assert found["eu"][1] == 4
    never = tmp_path / "never"
    with serving(run, never) as (_, address):
        path = never / "eu.pem"
        with (
            pytest.raises(LoopMisuseError, match="used 1002 batches without"),
            join(address, region="eu", credentials=path) as site,
            site.training(small_model()) as sync,
        ):
            for _ in sync.batches([1, 2, 3]):
                pass


def test_a_step_may_accumulate_more_batches_than_the_loader_has(tmp_path: Path) -> None:
    with (
        serving(terms(("eu",), 4, strategy=DILOCO), tmp_path) as (_, address),
        join(address, region="eu", credentials=tmp_path / "eu.pem") as site,
        site.training(small_model()) as sync,
    ):
        seen = []
        for batch in sync.batches("ab"):
            seen.append(batch)
            if len(seen) % 5 == 0:
                sync.step(rows=5)
    assert "".join(seen) == "ab" * 10


def test_a_region_trains_again_after_it_was_refused(tmp_path: Path) -> None:
    """Before the start, and in the run: nothing is left over from the training before."""
    run = terms(REGIONS, 40, strategy=DILOCO)
    first: list[JoinedTraining] = []

    def us(address: str) -> Tensor:
        with join(address, region="us", credentials=tmp_path / "us.pem") as site:
            while server.service.missing().get("eu") is not None:
                time.sleep(0.01)
            with pytest.raises(ModelMismatchError), site.training(nn.Linear(2, 2)):
                pass
            model = small_model()
            with pytest.raises(NonFiniteError), site.training(model) as sync:
                while not sync.done:
                    if sync.steps == 6:
                        next(model.parameters()).data.fill_(float("nan"))
                    sync.step(rows=1)
            model = small_model(1)
            with site.training(model) as sync:
                first.append(sync)
                while not sync.done:
                    sync.step(rows=1)
        return vector_of(model)

    def wait(sync: JoinedTraining) -> None:
        """Leave steps for the region that returns."""
        while sync.steps == 20 and not (first or server.service.waiting):
            time.sleep(0.01)

    with serving(run, tmp_path) as (server, address):
        loops = {"us": partial(us, address)}
        found = train_all({**loops, "eu": partial(Loop(address, "eu", tmp_path).run, wait)})
        assert server.stage is Stage.DONE, found
    assert torch.equal(found["us"], found["eu"][0])


def test_parameters_that_are_not_finite_end_the_region(tmp_path: Path) -> None:
    def broken(loop: Loop) -> None:
        model = small_model()
        path = loop.folder / "eu.pem"
        with (
            join(loop.address, region="eu", credentials=path) as site,
            site.training(model) as sync,
        ):
            for step in range(INTERVAL):
                if step == 2:
                    with torch.no_grad():
                        next(model.parameters()).fill_(float("nan"))
                sync.step(rows=1)

    run = terms(REGIONS, STEPS, strategy=DILOCO)
    with serving(run, tmp_path) as (_, address):
        loops = {name: Loop(address, name, tmp_path) for name in REGIONS}
        found = train_all({"eu": partial(broken, loops["eu"]), "us": loops["us"].run})
        assert isinstance(found["eu"], NonFiniteError)
        assert found["us"][1] == STEPS
