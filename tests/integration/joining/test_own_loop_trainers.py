"""The examples of own training loops with other libraries, each against plain PyTorch."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

import geo_ray
from geo_ray.base.errors import LoopMisuseError
from geo_ray.joining.checkpoint_manifest import read_manifest
from tests.support.join_support import (
    WAIT_S,
    diloco_of_batches,
    serving,
    terms,
    train_all,
    vector_of,
)
from tests.support.pages import ROOT
from tests.support.train_support import eventually

pytestmark = pytest.mark.slow  # each library takes 5 to 20 s to import
T = TypeVar("T")
REGIONS = ("eu", "us")
STEPS, INTERVAL, LR, MOMENTUM = 12, 4, 0.7, 0.9
LONGEST_S = 480.0  # never reached: processes that import a library on a busy machine
OUTER = {"kind": "nesterov", "lr": LR, "momentum": MOMENTUM}
DILOCO = {"kind": "diloco", "interval": INTERVAL, "weights": "uniform", "outer": OUTER}
oracle = partial(diloco_of_batches, interval=INTERVAL, lr=LR, momentum=MOMENTUM)


def rows_loss(x: Tensor, model: nn.Module) -> Tensor:
    return nn.functional.cross_entropy(_layers(model)(x), (x.sum(1) > 0).long())


def _layers(model: nn.Module) -> Callable[[Tensor], Tensor]:
    layers = getattr(model, "layers", None) or nn.Sequential(*model.children())
    return layers  # type: ignore[no-any-return]


def in_groups(values: Sequence[T], size: int) -> list[list[T]]:
    return [list(values[at : at + size]) for at in range(0, len(values), size)]


def plain_loop(
    model: nn.Module, batches: Sequence[Tensor], weight_decay: float, address: str, pem: Path
) -> Tensor:
    """Region us: a plain loop with some batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=weight_decay)
    with (
        geo_ray.join(address, region="us", credentials=pem) as site,
        site.training(model) as sync,
    ):
        while not sync.done:
            optimizer.zero_grad()
            loss = rows_loss(batches[sync.steps], model)
            loss.backward()
            optimizer.step()
            sync.step(rows=len(batches[sync.steps]), loss=loss)
    return vector_of(model)


def check_example(
    module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, weight_decay: float = 0.01
) -> list[dict[str, Any]]:
    """Run an example as region eu, with two accumulated batches, next to a plain loop.

    Both must end with the model of DiLoCo in plain PyTorch on the same batches.
    """
    model, other = module.new_model(), module.new_model()
    copies = {name: module.new_model() for name in REGIONS}
    seen: list[Tensor] = []
    hooked = getattr(model, "layers", model)
    hooked.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((args[0] if args else kwargs["x"]).clone()),
        with_kwargs=True,
    )
    monkeypatch.setattr(module, "new_model", lambda: model)
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(8, 8, generator=generator) for _ in range(STEPS)]
    with serving(terms(REGIONS, STEPS, strategy=DILOCO), folder) as (server, address):
        found = train_all(
            {
                "eu": partial(module.train, address, "eu", str(folder / "eu.pem")),
                "us": partial(plain_loop, other, batches, weight_decay, address, folder / "us.pem"),
            }
        )
        for each in found.values():
            assert isinstance(each, Tensor), each
            assert torch.equal(each, server.service.model_P)
        events = server.news()
    assert {len(x) for x in seen} == {4}
    losses = {
        "eu": [[partial(rows_loss, x) for x in pair] for pair in in_groups(seen, 2)],
        "us": [[partial(rows_loss, x)] for x in batches],
    }
    expected = oracle(copies, losses, weight_decay=weight_decay)
    torch.testing.assert_close(found["eu"], expected, rtol=0, atol=1e-6)
    return events


def rows_counted(events: list[dict[str, Any]]) -> list[int]:
    return [e["samples"] for e in events if e["kind"] == "step" and e["region"] == "eu"]


def losses_of(events: list[dict[str, Any]]) -> list[float]:
    return [e["loss"] for e in events if e["kind"] == "step" and e["region"] == "eu"]


def test_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from examples.own_loop import with_accelerate

    events = check_example(with_accelerate, tmp_path, monkeypatch)
    assert rows_counted(events) == [8 * INTERVAL] * (STEPS // INTERVAL)


@pytest.mark.parametrize("script", ["with_accelerate.py", "with_trainer.py", "with_lightning.py"])
def test_trainers_with_two_processes(script: str, tmp_path: Path) -> None:
    """The trainer wraps the model in DistributedDataParallel.

    An example is region eu, next to a plain loop of region us. Each of its processes uses two
    batches of 4 rows in a step, or one of 8. `accelerate launch --cpu` starts only one process.
    """
    model = importlib.import_module(f"examples.own_loop.{script.removesuffix('.py')}").new_model()
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(8, 8, generator=generator) for _ in range(STEPS)]
    with serving(terms(REGIONS, STEPS, strategy=DILOCO), tmp_path) as (server, address):
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [sys.executable, "-m", *launcher, f"{ROOT}/examples/own_loop/{script}"]
        eu = subprocess.Popen(
            [*command, address, "eu", str(tmp_path / "eu.pem")],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        found: list[Any] = []
        arguments = model, batches, 0.01, address, tmp_path / "us.pem"
        thread = threading.Thread(target=lambda: found.append(plain_loop(*arguments)), daemon=True)
        thread.start()
        try:
            said, _ = eu.communicate(timeout=LONGEST_S)
        finally:
            eu.terminate()  # ends its processes, too
            eu.wait(WAIT_S)
        thread.join(WAIT_S)
        assert eu.returncode == 0
        assert torch.equal(found[0], server.service.model_P)
        assert said.count(f"{found[0].norm():.4f}") == 2
        assert rows_counted(server.news()) == [16 * INTERVAL] * (STEPS // INTERVAL)


def test_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from examples.own_loop import with_trainer

    events = check_example(with_trainer, tmp_path, monkeypatch, weight_decay=0.0)
    assert rows_counted(events) == [8 * INTERVAL] * (STEPS // INTERVAL)
    assert all(0.2 < loss < 1.0 for loss in losses_of(events))


def test_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from examples.own_loop import with_lightning

    events = check_example(with_lightning, tmp_path, monkeypatch)
    assert rows_counted(events) == [8 * INTERVAL] * (STEPS // INTERVAL)
    assert all(0.2 < loss < 1.0 for loss in losses_of(events))


@pytest.mark.parametrize("name", ["with_trainer", "with_lightning"])
def test_a_trainer_that_would_end_early(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before the first step, and the server knows."""
    module = importlib.import_module(f"examples.own_loop.{name}")
    if name == "with_trainer":
        short = partial(module.TrainingArguments, lr_scheduler_type="constant")
        monkeypatch.setattr(
            module, "TrainingArguments", lambda **kwargs: short(**{**kwargs, "max_steps": 5})
        )
    else:
        monkeypatch.setattr(
            module.lightning, "Trainer", partial(module.lightning.Trainer, max_steps=5)
        )
    with serving(terms(("eu",), STEPS, strategy=DILOCO), tmp_path) as (server, address):
        with pytest.raises(LoopMisuseError, match="would end after 5 of the 12 steps") as caught:
            module.train(address, "eu", str(tmp_path / "eu.pem"))
        assert "max_steps=12" in str(caught.value.fix)
        eventually(lambda: server.service.failure is not None, "the server knows")


@pytest.mark.parametrize("name", ["with_trainer", "with_lightning"])
def test_checkpoints_have_the_state_of_a_trainer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(f"examples.own_loop.{name}")
    callback = "trainer_callback" if name == "with_trainer" else "lightning_callback"
    saving = partial(getattr(module, callback), checkpoints=tmp_path / "saved")
    monkeypatch.setattr(module, callback, saving)
    longer: dict[str, Any] = {"max_steps": 400} if name == "with_trainer" else {}
    if name == "with_lightning":
        trainer = module.lightning.Trainer
        monkeypatch.setattr(
            module.lightning, "Trainer", lambda **kwargs: trainer(**{**kwargs, "max_steps": 400})
        )
    run = terms(("eu",), 400, strategy=DILOCO)
    with serving(run, tmp_path) as (server, address):

        def save() -> None:
            eventually(lambda: server.begin_save(3, [], WAIT_S), "the save has begun")

        saver = threading.Thread(target=save)
        saver.start()
        module.train(address, "eu", str(tmp_path / "eu.pem"), **longer)
        saver.join(WAIT_S)
        assert server.service.save is not None and server.service.save.saved == ("eu",)
    manifest = read_manifest(tmp_path / "saved" / "run" / "eu" / "ckpt-00000003")
    keys = {each.path[:2] for each in (manifest.tensors | manifest.values).values()}
    assert ("state", "optimizer") in keys
    assert ("state", "schedule") in keys or name == "with_lightning"


def test_lightning_ends_early_by_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from examples.own_loop import with_lightning

    original = with_lightning.lightning.Trainer
    monkeypatch.setattr(
        with_lightning.lightning,
        "Trainer",
        lambda **kwargs: original(**{**kwargs, "max_epochs": 1, "limit_train_batches": 6}),
    )
    with (
        serving(terms(("eu",), STEPS, strategy=DILOCO), tmp_path) as (_, address),
        pytest.raises(LoopMisuseError, match="ended after 3 of 12 steps"),
    ):
        with_lightning.train(address, "eu", str(tmp_path / "eu.pem"))


def test_ray_train(tmp_path: Path) -> None:
    import ray

    from examples.own_loop import with_ray_train

    environment = {"env_vars": {"PYTHONPATH": str(ROOT)}}
    ray.init("local", num_cpus=4, include_dashboard=False, runtime_env=environment)
    try:
        with serving(terms(("eu",), STEPS, strategy=DILOCO), tmp_path) as (server, address):
            arguments = address, "eu", str(tmp_path / "eu.pem")
            found = with_ray_train.train(*arguments, storage_path=str(tmp_path / "results"))
            assert torch.equal(found, server.service.model_P)
    finally:
        ray.shutdown()
