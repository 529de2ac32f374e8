"""Optimizers and steps of the task itself, against plain PyTorch; their state in checkpoints."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from geo_ray.base.errors import CheckpointCorruptError, ConfigError, NonFiniteError, TaskStateError
from geo_ray.base.random_state import generators_restored, seed_generators, seed_of_rows
from geo_ray.data.tasks.load import TaskConfig, load_task
from geo_ray.experiment.experiment import Experiment
from geo_ray.runs.build import placed
from geo_ray.runs.start_checks import check_steps
from geo_ray.training.task_steps import HeldStates, pack, unpack
from tests.support.world_support import Run, experiment

TASKS = Path(__file__).parents[2] / "support" / "own_steps_tasks.py"
STEPS = 12
KINDS = ["Hooks", "Steps", "Adversaries", "HalfHooks"]


def config_of(kind: str, **sections: Any) -> Experiment:
    train = {"steps": STEPS, "eval_every": 0} | sections.pop("train", {})
    task = {"use": f"{TASKS}:{kind}"}
    return experiment(**{"task": task, "optimizer": {"kind": "task"}, "train": train} | sections)


class Plain:
    """The loop that a user would write for one region."""

    def __init__(self, run: Run, config: Experiment, region: str) -> None:
        task = load_task(TaskConfig(**config.task.model_dump()), Path())
        self.task: Any = placed(task, region, 0)
        self.model: nn.Module = task.model(config.seed)
        self.masters = [nn.Parameter(p.detach().float()) for p in self.model.parameters()]
        self._is_half = next(self.model.parameters()).dtype != torch.float32
        self._reader = run.world.regions[region]._train
        self._stream = f"{config.seed}/{region}"
        if not hasattr(self.task, "train_step"):
            owned = self.masters if self._is_half else list(self.model.parameters())
            self.optimizer = self.task.optimizer(owned)
            self.schedule = self.task.scheduler(self.optimizer)
        else:
            self.task.training_state(self.model)

    def step(self, number: int) -> None:
        self.model.train()
        with generators_restored([]):
            seed_generators(seed_of_rows(self._stream, 4 * number), [])
            columns = self._reader.read(4 * number, 4)
            batch = self.task.collate(columns, torch.device("cpu"))
            if hasattr(self.task, "train_step"):
                self.task.train_step(self.model, batch)
                return
            self.model.zero_grad()
            self.task.loss(self.model, batch).backward()
        if self._is_half:
            for master, p in zip(self.masters, self.model.parameters(), strict=True):
                master.grad = p.grad.float()
        self.optimizer.step()
        self.schedule.step()
        self._round()

    @torch.no_grad()
    def _round(self) -> None:
        if self._is_half:
            for master, p in zip(self.masters, self.model.parameters(), strict=True):
                p.copy_(master)

    def vector(self) -> Tensor:
        parts = self.masters if self._is_half else self.model.parameters()
        return torch.cat([p.detach().reshape(-1) for p in parts])

    @torch.no_grad()
    def take(self, params_P: Tensor) -> None:
        parts = self.masters if self._is_half else list(self.model.parameters())
        pieces = torch.split(params_P, [p.numel() for p in parts])
        for p, piece in zip(parts, pieces, strict=True):
            p.copy_(piece.view(p.shape))
        self._round()


@pytest.mark.parametrize("kind", KINDS)
def test_one_region_is_the_loop_of_the_user_to_the_bit(data_dir, kind: str) -> None:
    config = config_of(kind, regions=[{"name": "a"}], train={"eval_every": 3, "state_every": 5})
    run = Run(config, data_dir).go()
    plain = Plain(run, config, "a")
    start_P = plain.vector()
    for number in range(STEPS):
        plain.step(number)
    assert torch.equal(run.result.params_P["a"], plain.vector())
    assert float((plain.vector() - start_P).abs().max()) > 1e-2


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_diloco_around_the_loop_of_the_user(data_dir, kind: str, shards: int) -> None:
    outer = {"kind": "nesterov", "lr": 0.7, "momentum": 0.6}
    strategy = {"kind": "diloco", "interval": 4, "outer": outer}
    regions = [{"name": name, "ps_shards": shards} for name in "ab"]
    config = config_of(kind, strategy=strategy, regions=regions)
    run = Run(config, data_dir).go()
    plain = [Plain(run, config, name) for name in "ab"]
    outer_P = plain[0].vector()
    momentum_P = torch.zeros_like(outer_P)
    for number in range(STEPS):
        for each in plain:
            each.step(number)
        if (number + 1) % 4 == 0:
            delta_P = outer_P - (plain[0].vector() + plain[1].vector()) / 2
            momentum_P = 0.6 * momentum_P + delta_P
            outer_P = outer_P - 0.7 * (delta_P + 0.6 * momentum_P)
            for each in plain:
                each.take(outer_P)
    for found_P in run.result.params_P.values():
        torch.testing.assert_close(found_P, outer_P, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", ["sma", "diloco", "asgd_ga"])
def test_a_resumed_run_has_the_same_bits(data_dir, kind: str, strategy: str) -> None:
    regions = [{"name": name, "ps_shards": 2} for name in "ab"]
    sections = {"regions": regions, "strategy": {"kind": strategy, "interval": 4}}
    config = config_of(kind, **sections, checkpoint={"every_s": None})
    whole = Run(config, data_dir).go()
    killed = Run(config, data_dir)
    killed.world.checkpoint_at(0.55 * whole.result.seconds, 1)
    killed.go()
    resumed = Run(config, data_dir)
    resumed.world.restore(killed.world.checkpoints[1])
    assert resumed.go().digests() == whole.digests()


def test_a_codec_takes_changes_of_such_steps(data_dir) -> None:
    strategy = {"kind": "diloco", "interval": 3}
    config = config_of("Steps", strategy=strategy, codec={"up": {"kind": "int8"}})
    assert len(set(Run(config, data_dir).go().digests().values())) == 1


def documented() -> list[str]:
    page = (Path(__file__).parents[3] / "docs" / "guides" / "tasks.md").read_text()
    section = page.split("## Own optimizers and steps\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


@pytest.mark.parametrize("number", [0, 1])
def test_the_examples_of_the_guide_train(data_dir, tmp_path, number: int) -> None:
    file = tmp_path / "own.py"
    body = textwrap.indent(documented()[number], "    ")
    file.write_text(
        "import torch\nfrom tests.support.own_steps_tasks import Network\n\n\n"
        f"class Own(Network):\n{body}"
    )
    config = config_of("Hooks", task={"use": f"{file}:Own"})
    run = Run(config, data_dir).go()
    losses = [e["loss"] for e in run.of("step", "a")]
    assert len(losses) == STEPS and len(set(run.digests().values())) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_lost_workers_change_nothing(data_dir, kind: str) -> None:
    config = config_of(kind, train={"state_every": 4})
    whole = Run(config, data_dir).go()
    run = Run(config, data_dir)
    for part in (0.2, 0.45, 0.7):
        for name in "ab":
            now_s = part * whole.result.seconds
            run.world.workers.at(now_s, name, 0, "lost")
            run.world.workers.at(now_s + 0.01, name, 0, "replaced")
    assert run.go().digests() == whole.digests()


def test_a_worker_knows_its_region_and_rank(data_dir) -> None:
    run = Run(experiment(regions=[{"name": "a", "workers": 2}, {"name": "b"}]), data_dir)
    found = [
        (worker._task.region, worker._task.rank)
        for region in run.world.regions.values()
        for worker in region._workers
    ]
    assert found == [("a", 0), ("a", 1), ("b", 0)]


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"strategy": {"kind": "bsp"}}, "'bsp'"),
        ({"strategy": {"kind": "dc_asgd"}}, "'dc_asgd'"),
        ({"strategy": {"kind": "hfa"}}, "'hfa'"),
        ({"strategy": {"kind": "muloco"}}, "muon"),
        ({"regions": [{"name": "a", "workers": 2}, {"name": "b"}]}, "a has 2"),
        ({"train": {"mode": "async"}}, "async"),
        ({"train": {"elastic": {}}}, "elastic"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(sections: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of("Steps", **sections)
    assert named in caught.value.message


@pytest.mark.parametrize(
    ("kind", "sections", "named"),
    [
        ("Steps", {"optimizer": {"kind": "sgd", "lr": 0.1}}, "has the method train_step"),
        ("Network", {}, "neither optimizer"),
        ("Steps", {"train": {"clip_norm": 1.0}}, "train.clip_norm"),
        ("Steps", {"train": {"accumulate": 2}}, "train.accumulate"),
    ],
)
def test_hooks_and_configuration_must_fit(kind: str, sections: Any, named: str) -> None:
    config = config_of(kind, **sections)
    with pytest.raises(TaskStateError) as caught:
        check_steps(config, load_task(TaskConfig(**config.task.model_dump()), Path()))
    assert named in caught.value.message


def test_a_step_that_breaks_the_parameters_is_named(data_dir) -> None:
    run = Run(config_of("Steps", regions=[{"name": "a"}]), data_dir)
    (worker,) = run.world.regions["a"]._workers

    def breaks(model: nn.Module, batch: Any) -> float:
        nn.init.constant_(model[1].bias, float("nan"))
        return 1.0

    worker._task.train_step = breaks
    with pytest.raises(NonFiniteError, match="train_step left parameters"):
        run.go()


# ------------------------------------------------------------------ state


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64]
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)).map(
        lambda pair: torch.randint(0, 2, pair[1]).to(pair[0])
    ),
)
KEYS = st.one_of(st.integers(), st.text(max_size=4))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
    ),
    max_leaves=8,
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        pairs = zip(one, other, strict=True)
        return type(one) is type(other) and all(same(a, b) for a, b in pairs)
    return type(one) is type(other) and one == other


@given(tree=TREES, padding=st.integers(0, 20))
def test_a_state_is_read_as_it_was_written(tree: Any, padding: int) -> None:
    packed_B = torch.cat([pack(tree, "T"), torch.zeros(padding, dtype=torch.uint8)])
    assert same(unpack(packed_B), tree)


@example(tree=-10, cut=6)  # whose header, cut off, is another number
@given(tree=TREES, cut=st.integers(1, 60))
def test_a_state_that_is_cut_off_is_refused_or_whole(tree: Any, cut: int) -> None:
    packed_B = pack(tree, "T")
    try:
        found = unpack(packed_B[: max(0, packed_B.numel() - cut)])
    except CheckpointCorruptError:
        return
    assert same(found, tree)


def test_what_cannot_be_saved_is_named() -> None:
    with pytest.raises(TaskStateError, match="a set at /adam/state"):
        pack({"adam": {"state": {1}}}, "T")


def test_a_state_of_another_size_is_refused() -> None:
    with pytest.raises(CheckpointCorruptError, match="the shard has"):
        HeldStates(3, 1).restore({"task/000000": torch.zeros(4)})
