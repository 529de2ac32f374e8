"""Model buffers in the simulator, which runs the state machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from geo_ray.base.errors import TaskStateError
from geo_ray.data.tasks.load import TaskConfig, load_task
from geo_ray.data.tasks.model_buffers import state_of
from geo_ray.runs.model_file import module_with
from geo_ray.strategies.registry import STRATEGIES
from geo_ray.training.parameters import BufferLayout
from tests.support.best_support import earliest_best, metrics_of
from tests.support.train_support import experiment_of, simulate
from tests.support.world_support import Run, experiment, of_kind

TASKS = Path(__file__).parents[2] / "support" / "buffer_tasks.py"
KINDS = sorted(STRATEGIES)
PLAIN = {"eval_every": 0, "statistics_batches": 0}
THREE = {
    "regions": [{"name": "a"}, {"name": "b", "workers": 2}, {"name": "c"}],
    "emulate": {
        "step_s_by_region": {"a": 0.1, "b": 0.3, "c": 0.4},
        "link": {"rate_mbps": 20, "delay_s": 0.04},
    },
    "checkpoint": {"every_s": None},
}


def task(kind: str = "Stateful", **options: Any) -> dict[str, Any]:
    return {"use": f"{TASKS}:{kind}", "options": options}


def model_of(run: Run, region: str) -> nn.Module:
    """What `model.safetensors` of a run would hold, had the averager been in that region."""
    loaded = load_task(TaskConfig(**run.config.task.model_dump()), Path())
    result = run.result
    return module_with(loaded, run.config.seed, [result.params_P[region]], result.buffers_B[region])


def exchanged(run: Run, region: str) -> torch.Tensor:
    layout = run.world.regions[region].server.model_buffers.layout
    return run.result.buffers_B[region][: layout.exchanged_bytes]


def assert_near(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one.double(), other.double(), atol=1e-5, rtol=1e-4)


# ------------------------------------------------------------------ the rule, by a second program


def mean_by_hand(states: list[dict[str, torch.Tensor]], rows: list[int]) -> dict[str, torch.Tensor]:
    """The documented rule, name by name in float64."""
    shares = [count / sum(rows) for count in rows]
    new = {}
    for name, first in states[0].items():
        values = [state[name].double() for state in states]
        if name == "queue":
            new[name] = first.clone()
        elif not first.is_floating_point():
            new[name] = torch.stack([state[name] for state in states]).amax(0)
        elif name.endswith("running_var"):
            means = [s[name.replace("running_var", "running_mean")].double() for s in states]
            mean = sum(q * m for q, m in zip(shares, means, strict=True))
            parts = zip(shares, values, means, strict=True)
            new[name] = sum(q * (v + (m - mean) ** 2) for q, v, m in parts)
        else:
            new[name] = sum(q * v for q, v in zip(shares, values, strict=True))
    return new


def test_bsp_carries_what_a_second_program_computes(data_dir) -> None:
    steps, lr = 5, 0.1
    config = experiment(
        task=task(),
        strategy={"kind": "bsp"},
        train={"steps": steps} | PLAIN,
        **THREE,
    )
    run = Run(config, data_dir)
    manifest_run = run.go()
    loaded = load_task(TaskConfig(**config.task.model_dump()), Path())
    readers = {
        region._train: range(len(region._workers)) for region in manifest_run.world.regions.values()
    }
    model = loaded.model(config.seed)
    changing = {n for n in state_of(model) if n not in ("mask", "scale")}
    shared = {n: t.clone() for n, t in state_of(model).items() if n in changing}
    queues = [shared["queue"].clone() for _ in readers]
    taken = [0] * len(readers)
    for _ in range(steps):
        sums, region_states, region_rows = None, [], []
        for place, (reader, ranks) in enumerate(readers.items()):
            states = []
            for _ in ranks:
                for name, tensor in state_of(model).items():
                    if name in changing:
                        tensor.copy_(queues[place] if name == "queue" else shared[name])
                columns = reader.read(taken[place], 4)
                taken[place] += 4
                model.zero_grad()
                loaded.loss(model, loaded.collate(columns, torch.device("cpu"))).backward()
                grads = [p.grad.clone() for p in model.parameters() if p.requires_grad]
                sums = grads if sums is None else [a + b for a, b in zip(sums, grads, strict=True)]
                states.append({n: t.clone() for n, t in state_of(model).items() if n in changing})
            region_states.append(mean_by_hand(states, [4] * len(ranks)))
            queues[place] = region_states[-1]["queue"].clone()
            region_rows.append(4 * len(ranks))
        shared = mean_by_hand(region_states, region_rows)
        with torch.no_grad():
            trained = [p for p in model.parameters() if p.requires_grad]
            for parameter, grad in zip(trained, sums, strict=True):
                parameter -= lr * grad / 4  # four workers in all
    for place, region in enumerate(run.world.regions):
        ends = state_of(model_of(run, region))
        for name in changing - {"queue"}:
            torch.testing.assert_close(
                ends[name].double(), shared[name].double(), atol=1e-5, rtol=1e-4
            )
        torch.testing.assert_close(
            ends["queue"].double(), queues[place].double(), atol=1e-5, rtol=1e-4
        )
    trained = dict(model_of(run, "a").named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert_near(trained[name], parameter)
    assert int(shared["place"]) == steps and not torch.equal(queues[0], queues[1])


# ------------------------------------------------------------------ all strategies


def sections_of(kind: str, **more: Any) -> dict[str, Any]:
    found = of_kind(kind) | THREE | {"task": task(), "train": {"steps": 12} | PLAIN}
    return found | more


@pytest.mark.parametrize("kind", KINDS)
def test_every_strategy_ends_with_trained_values_that_all_regions_share(data_dir, kind) -> None:
    run = Run(experiment(**sections_of(kind)), data_dir).go()
    start = load_task(TaskConfig(**run.config.task.model_dump()), Path()).model(run.config.seed)
    ends = {name: state_of(model_of(run, name)) for name in run.world.regions}
    for name in ("teacher.weight", "norm.running_mean", "norm.running_var", "place"):
        values = [end[name] for end in ends.values()]
        assert not torch.equal(values[0], state_of(start)[name])
        assert torch.isfinite(values[0].double()).all()
        for other in values[1:]:
            torch.testing.assert_close(values[0], other, rtol=0.3, atol=0.2)
    assert not torch.equal(ends["a"]["queue"], ends["b"]["queue"])
    waits_at_the_end = STRATEGIES[kind]().traits.exchange.last != "never" or kind == "bsp"
    if waits_at_the_end:
        assert torch.equal(exchanged(run, "a"), exchanged(run, "b"))
        assert torch.equal(exchanged(run, "a"), exchanged(run, "c"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_begins_with_the_values_of_the_cut(data_dir, kind: str) -> None:
    config = experiment(**sections_of(kind))
    whole = Run(config, data_dir).go()
    killed = Run(config, data_dir)
    killed.world.checkpoint_at(0.4 * whole.result.seconds, 1)
    killed.go()
    assert torch.equal(exchanged(killed, "b"), exchanged(whole, "b"))
    cut = killed.world.checkpoints[1]
    resumed = Run(config, data_dir)
    resumed.world.restore(cut)
    for name, (primary, _) in cut.regions.items():
        model_buffers = resumed.world.regions[name].server.model_buffers
        assert torch.equal(model_buffers.present_B, primary.tensors["buffers/present"])
    resumed.go()
    traits = STRATEGIES[kind]().traits
    if traits.in_rounds and traits.exchange.blocking == "always" and not config.counts_total_rows:
        assert resumed.digests() == whole.digests()
        for name, buffers_B in whole.result.buffers_B.items():
            assert torch.equal(resumed.result.buffers_B[name], buffers_B)


def test_a_resume_tells_what_the_run_before_told_and_goes_on(data_dir) -> None:
    """Its workers' first steps are late ones of the run."""
    config = experiment(**sections_of("bsp") | {"task": task("Late")})
    whole = Run(config, data_dir).go()
    assert [e["names"] for e in whole.of("state_changed", "a")] == ["'mean'"]
    killed = Run(config, data_dir)
    killed.world.checkpoint_at(0.8 * whole.result.seconds, 1)
    killed.go()
    resumed = Run(config, data_dir)
    resumed.world.restore(killed.world.checkpoints[1])
    resumed.go()
    assert [e["names"] for e in resumed.of("state_changed", "a")] == ["'mean'"]
    assert resumed.digests() == whole.digests()


# ------------------------------------------------------------------ what it meets

MEETINGS: dict[str, dict[str, Any]] = {
    "codecs": {
        "codec": {"up": {"kind": "topk", "ratio": 0.2}, "down": {"kind": "topk", "ratio": 0.3}}
    },
    "lossy blocks": {"codec": {"up": {"kind": "dgt", "block_bytes": 64, "reliable_fraction": 0.4}}},
}


@pytest.mark.parametrize("meeting", MEETINGS)
def test_codecs_do_not_touch_it(data_dir, meeting: str) -> None:
    """With a tiny rate the weights hardly change, so that the model buffers are the same."""
    still = {
        "strategy": {"kind": "asgd_ga", "interval": 2},
        "optimizer": {"kind": "sgd", "lr": 1e-30},
    }
    sections = sections_of("asgd_ga") | still | {"emulate": {"step_s": 0.5}}
    plain = Run(experiment(**sections), data_dir).go()
    coded = Run(experiment(**sections | MEETINGS[meeting]), data_dir).go()
    torch.testing.assert_close(
        state_of(model_of(plain, "a")), state_of(model_of(coded, "a")), rtol=1e-4, atol=1e-5
    )


def test_three_shards_carry_the_bits_of_one(data_dir) -> None:
    sections = sections_of("diloco")
    one = Run(experiment(**sections), data_dir).go()
    cut = [{**region, "ps_shards": 3} for region in THREE["regions"]]
    three = Run(experiment(**sections | {"regions": cut}), data_dir).go()
    assert one.digests() == three.digests()
    for name, buffers_B in one.result.buffers_B.items():
        assert torch.equal(buffers_B, three.result.buffers_B[name])


def test_pushes_one_by_one_keep_values_between_those_that_were_there(data_dir) -> None:
    """Eight workers whose values count whole would push variances below zero."""
    regions = [{"name": "a", "workers": 8}, {"name": "b", "workers": 8}]
    for kind in ("asgd_ga", "sma"):
        sections = sections_of(kind, regions=regions, emulate={"step_s": 0.5})
        sections["train"] = {"steps": 12, "mode": "async"} | PLAIN
        run = Run(experiment(**sections), data_dir).go()
        norm = model_of(run, "a").norm
        assert (norm.running_var > 0).all() and int(norm.num_batches_tracked) >= 12


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"overlay": {"kind": "ring"}}, "overlay.kind: ring"),
        ({"transfers": {}, "strategy": {"kind": "asgd"}}, "transfers"),
        (
            {
                "regions": [{"name": "a", "workers": 3}],
                "train": {"steps": 4, "stragglers": {"kind": "gradient_coding"}},
            },
            "train.stragglers",
        ),
    ],
)
def test_where_values_would_be_summed_it_is_refused_by_name(data_dir, section, key) -> None:
    config = experiment(**{"task": task(), "strategy": {"kind": "bsp"}} | section)
    with pytest.raises(TaskStateError, match=key) as caught:
        Run(config, data_dir)
    assert caught.value.code == "TASK_STATE"


def test_an_overlay_carries_a_model_whose_values_stay_in_their_region(data_dir) -> None:
    keeps = task(keeps="*")
    run = Run(experiment(task=keeps, strategy={"kind": "bsp"}, overlay={"kind": "ring"}), data_dir)
    run.go()
    assert run.digests()["a"] == run.digests()["b"]
    a, b = (model_of(run, name) for name in ("a", "b"))
    assert not torch.equal(a.norm.running_mean, b.norm.running_mean)
    assert torch.equal(a.teacher.weight, b.teacher.weight)  # it follows weights that are equal


def test_what_nobody_declared_is_named_at_the_first_step(data_dir) -> None:
    config = experiment(task=task(declares=False))
    with pytest.raises(TaskStateError, match=r"'mask', 'place', 'queue', 'teacher.bias'") as caught:
        Run(config, data_dir).go()
    assert "model_buffers" in caught.value.fix


def test_a_region_alone_ends_with_plain_training(data_dir) -> None:
    """One region with one worker: the very values of a loop over its rows."""
    config = experiment(
        task=task("Normed"),
        regions=[{"name": "a"}],
        train={"steps": 6} | PLAIN,
        emulate={"step_s": 0.5},
    )
    run = Run(config, data_dir).go()
    loaded = load_task(TaskConfig(**config.task.model_dump()), Path())
    model = loaded.model(config.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(6):
        columns = run.world.regions["a"]._train.read(4 * i, 4)
        optimizer.zero_grad()
        loaded.loss(model, loaded.collate(columns, torch.device("cpu"))).backward()
        optimizer.step()
    for name, value in model_of(run, "a").state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_constants_pass_and_no_buffers_are_exchanged(data_dir) -> None:
    run = Run(experiment(task=task("Constant")), data_dir).go()
    assert run.world.regions["a"].server.model_buffers is None
    assert run.result.buffers_B == {"a": None, "b": None}


def test_updates_grow_by_the_model_buffers_and_only_then(data_dir) -> None:
    plain = Run(experiment(task=task("Constant")), data_dir).go()
    normed = Run(experiment(task=task("Normed")), data_dir).go()
    model_buffers = normed.world.regions["a"].server.model_buffers
    sizes = [{e["bytes_sent"] for e in run.of("exchange")} for run in (plain, normed)]
    assert sizes[0] == {4 * plain.num_params}
    assert sizes[1] == {4 * normed.num_params + model_buffers.layout.exchanged_bytes}
    assert model_buffers.layout.exchanged_bytes == 4 * 24 + 8


def test_the_layout_is_the_same_wherever_it_is_made() -> None:
    loaded = load_task(TaskConfig(**task()), Path())
    one, other = (BufferLayout.of(loaded, loaded.model(seed)) for seed in (1, 2))
    assert one == other and one.size_bytes % 64 == 0


# ------------------------------------------------------------------ precise statistics


def statistics_by_hand(
    run: Run, model: nn.Module, batches: int
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Mean and variance of what goes into the norm, by region, over its first batches."""
    found = {}
    for name, region in run.world.regions.items():
        means, variances = [], []
        for i in range(batches):
            images = torch.as_tensor(region._train.read(4 * i, 4)["image"])
            with torch.no_grad():
                inside = model.inner(images) * model.scale
            means.append(inside.double().mean(0))
            variances.append(inside.double().var(0))  # unbiased, as torch keeps it
        mean = torch.stack(means).mean(0)
        spread = torch.stack([(m - mean) ** 2 for m in means])
        found[name] = mean, (torch.stack(variances) + spread).mean(0)
    return found


@pytest.mark.parametrize("kind", ["bsp", "diloco", "asgd_ga"])
def test_the_final_model_has_the_statistics_of_its_parameters_over_all_regions(
    data_dir, kind: str
) -> None:
    sections = sections_of(kind, task=task())
    sections["train"] = {"steps": 12, "eval_every": 6, "statistics_batches": 5}
    run = Run(experiment(**sections), data_dir).go()
    evaluated = [e for e in run.of("eval") if e["final"] and e["region"] is None]
    model = model_of(run, "a")
    rows = run.world.averager.state.data_rows
    shares = {name: rows[name] / sum(rows.values()) for name in rows}
    by_region = statistics_by_hand(run, model, 5)
    mean = sum(shares[n] * m for n, (m, _) in by_region.items())
    variance = sum(shares[n] * (v + (m - mean) ** 2) for n, (m, v) in by_region.items())
    if kind != "asgd_ga":  # whose regions are equal but for rounding
        for name in ("b", "c"):
            assert torch.equal(model_of(run, name).norm.running_var, model.norm.running_var)
        assert_near(model.norm.running_mean, mean)
        assert_near(model.norm.running_var, variance)
    total: dict[str, Any] = {}
    loaded = load_task(TaskConfig(**run.config.task.model_dump()), Path())
    with torch.no_grad():
        for region in run.world.regions.values():
            for columns in region._heldout.scan(256):
                batch = loaded.collate(columns, torch.device("cpu"))
                for key, value in loaded.evaluate(model.eval(), batch).items():
                    total[key] = total.get(key, 0.0) + value
    (last,) = evaluated
    assert last["metrics"] == pytest.approx(loaded.metrics(total), rel=1e-4)
    without = Run(experiment(**sections | {"train": {"steps": 12} | PLAIN}), data_dir).go()
    assert without.digests() == run.digests()
    before, after = (model_of(each, "a").norm.running_var for each in (without, run))
    assert not torch.allclose(before, after, rtol=0.02)


# ------------------------------------------------------------------ more that it meets


def test_spare_workers_do_not_count(data_dir) -> None:
    stragglers = {"kind": "backup_workers", "spares": 1}
    regions = [{"name": "a", "workers": 3}]
    train = {"steps": 6, "stragglers": stragglers} | PLAIN
    config = experiment(task=task(), regions=regions, train=train, emulate={"step_s": 0.5})
    run = Run(config, data_dir).go()
    assert int(model_of(run, "a").place) == 6
    assert (model_of(run, "a").norm.running_var > 0).all()


def test_many_sites_find_what_nobody_declared_too(data_dir) -> None:
    regions = [{"name": "hub"}, {"name": "s", "copies": 15}]
    config = experiment(task=task(declares=False), regions=regions)
    with pytest.raises(TaskStateError, match=r"'teacher\.bias'"):
        Run(config, data_dir).go()


def test_what_is_evaluated_before_the_end_is_what_regions_agree_on(data_dir) -> None:
    """The outer model of DiLoCo comes with the values of the last exchange, not with live ones."""
    sections = sections_of("diloco")
    sections["train"] = {"steps": 12, "eval_every": 2, "statistics_batches": 0}
    run = Run(experiment(**sections), data_dir).go()
    model_buffers = run.world.regions["a"].server.model_buffers
    assert torch.equal(
        model_buffers.agreed_B[: model_buffers.layout.exchanged_bytes], exchanged(run, "b")
    )
    assert len(run.of("eval", "a")) > 4


def test_what_a_region_keeps_is_evaluated_as_it_is_at_the_exchange(data_dir) -> None:
    sections = sections_of("diloco", task=task(keeps="*"))
    run = Run(experiment(**sections), data_dir).go()
    model_buffers = run.world.regions["a"].server.model_buffers
    assert model_buffers.layout.exchanged_bytes == 0
    assert torch.equal(
        model_buffers.agreed_B, model_buffers.present_B
    )  # the last exchange was the last of all
    assert not torch.equal(
        model_buffers.present_B, run.world.regions["b"].server.model_buffers.present_B
    )


@pytest.mark.parametrize("batches", [0, 4])
def test_the_best_model_is_kept_with_what_it_was_evaluated_with(tmp_path, batches: int) -> None:
    keep = {"metric": "accuracy", "mode": "max"}
    train = {"steps": 14, "eval_every": 2, "statistics_batches": batches, "keep_best": keep}
    config = experiment_of(
        tmp_path,
        task=task(),
        strategy={"kind": "bsp"},
        train=train,
        emulate={"step_s": 0.1},
    )
    done = simulate(config, tmp_path)
    best = done.summary.best
    assert metrics_of(done.run.path, None)["accuracy"] == pytest.approx(best.value)
    assert (best.value, best.step) == earliest_best(done.events, None)


# ------------------------------------------------------------------ alone, and from before


def test_a_region_that_is_alone_evaluates_its_buffers_now(data_dir) -> None:
    """There is nobody to agree with: its outer model is the live one."""
    found = []
    for evaluate in ("outer", "live"):
        sections = of_kind("diloco", task=task("Normed")) | {
            "regions": [{"name": "a"}],
            "train": {"steps": 12, "eval_every": 4, "evaluate": evaluate, "statistics_batches": 0},
        }
        run = Run(experiment(**sections), data_dir).go()
        found.append([event["metrics"] for event in run.of("eval")])
    assert len(found[0]) >= 3 and found[0] == found[1]


@pytest.mark.parametrize("kind", ["asgd_ga", "async_local_sgd"])
def test_a_checkpoint_from_before_the_task_declared_anything_is_resumed(data_dir, kind) -> None:
    sections = of_kind(kind, task=task()) | THREE | {"train": {"steps": 8, **PLAIN}}
    resumed = 0
    for when_s in (1.02, 2.03, 3.04, 4.02):
        killed = Run(experiment(**sections), data_dir)
        killed.world.checkpoint_at(when_s, 1)
        killed.go()
        if not killed.of("checkpoint"):
            continue
        cut = killed.world.checkpoints[1]
        for tensors in (cut.averager.tensors, *(part[0].tensors for part in cut.regions.values())):
            for name in [name for name in tensors if "carr" in name]:
                del tensors[name]  # as a release wrote it that knew nothing of them
        opened = [part[0].control["open"] for part in cut.regions.values()]
        held = cut.averager.control["exchanges"]
        for row in [
            *(r for o in opened if o for r in o["update"]),
            *(r for rows in held.values() for r in rows),
        ]:
            row.pop("buffers", None)
            row.pop("buffers_weight", None)
        again = Run(experiment(**sections), data_dir)
        again.world.restore(cut)
        again.go()
        resumed += 1
        assert_near(exchanged(again, "a"), exchanged(again, "b"))
    assert resumed
