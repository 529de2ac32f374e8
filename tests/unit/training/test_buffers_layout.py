"""The vector of model buffers: layout, averaging, validation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from geo_ray.base.errors import FrameError, InvariantError, NonFiniteError, TaskStateError
from geo_ray.data.tasks.model_buffers import buffer_entries, rules_of
from geo_ray.training.checkpoint_parts import load_messages, save_messages
from geo_ray.training.messages import ReplyMessage, UpdateMessage
from geo_ray.training.model_buffers import AveragerBuffers
from geo_ray.training.parameters import BufferLayout
from geo_ray.training.state_guard import (
    StateChange,
    StateGuard,
    check_constants,
    check_same_size,
    constants_of,
)
from geo_ray.training.wire_format import (
    payload_bytes,
    read_reply,
    read_update,
    reply_meta,
    update_meta,
)
from geo_ray.training.worker import StatisticsCollector, precise_statistics


class Task:
    def __init__(self, **model_buffers: str) -> None:
        self.model_buffers = {name.replace("__", "."): rule for name, rule in model_buffers.items()}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("short", torch.tensor([1.5, -2.25], dtype=torch.bfloat16))
        self.register_buffer("seen", torch.tensor([2**40, 7]))
        self.register_buffer("on", torch.tensor([True, False]))
        self.register_buffer("names", torch.tensor([3.0, 4.0], dtype=torch.float64))
        self.register_buffer("fixed", torch.ones(2))


ALL = {"short": "mean", "seen": "mean", "on": "mean", "names": "region"}


def layout_of(net: Net) -> BufferLayout:
    return BufferLayout.of(Task(**ALL), net)


def test_every_type_comes_back_to_the_bit() -> None:
    net, other = Net(), Net()
    with torch.no_grad():
        net.norm.running_mean.copy_(torch.randn(3))
        net.names.copy_(torch.tensor([0.1, float("nan")], dtype=torch.float64))
    layout = layout_of(net)
    layout.write(layout.read(net), other)
    for (name, value), back in zip(net.named_buffers(), other.buffers(), strict=True):
        assert torch.equal(value.nan_to_num(), back.nan_to_num()), name
    assert bool(other.names[1].isnan())
    assert layout.size_bytes % 64 == 0 and layout.exchanged_bytes == 4 * 8 + 8 * 5


def test_the_means_of_types() -> None:
    nets = [Net(), Net()]
    with torch.no_grad():
        nets[1].short.copy_(torch.tensor([2.5, 2.25]))
        nets[1].seen.copy_(torch.tensor([3, 9]))
        nets[1].on.copy_(torch.tensor([False, True]))
        nets[1].names.fill_(9.0)
        nets[0].norm.running_mean.fill_(1.0)
        nets[1].norm.running_mean.fill_(5.0)
    layout = layout_of(nets[0])
    both = Net()
    layout.write(layout.combine([layout.read(net) for net in nets], [3.0, 1.0]), both)
    assert both.short.tolist() == [1.75, -1.125]
    assert both.seen.tolist() == [2**40, 9] and both.on.tolist() == [True, True]
    assert both.names.tolist() == [3.0, 4.0]
    assert both.norm.running_mean.tolist() == [2.0] * 3
    assert both.norm.running_var.tolist() == [1.0 + 0.75 * 1.0 + 0.25 * 9.0] * 3


def test_an_own_share_is_renewed_and_never_leaves_what_was_there() -> None:
    nets = [Net(), Net()]
    with torch.no_grad():
        nets[1].norm.running_var.fill_(1e-30)
        nets[0].norm.running_var.fill_(10.0)
    layout = layout_of(nets[0])
    sent_B, other_B = (layout.read(net) for net in nets)
    mean_B = layout.combine([sent_B, other_B], [1.0, 1.0])
    end = layout.exchanged_bytes
    assert torch.equal(layout.renewed(mean_B[:end], 0.5, sent_B[:end], sent_B)[:end], mean_B[:end])
    with torch.no_grad():
        nets[0].norm.running_var.fill_(1e-30)  # it went on meanwhile
        nets[0].seen.fill_(2**41)
    new = Net()
    layout.write(layout.renewed(mean_B[:end], 0.5, sent_B[:end], layout.read(nets[0])), new)
    assert (new.norm.running_var >= 0).all() and (new.norm.running_var < 1e-6).all()
    assert new.seen.tolist() == [2**41, 2**41]


@pytest.mark.parametrize(
    ("model_buffers", "part"),
    [
        ({"queu*": "mean"}, "'queu*' matches no buffer"),
        ({"norm.weight": "mean"}, "only a trained parameter (norm.weight)"),
        ({"names": "mean"}, "torch.float64, which has no mean"),
        ({"short": "average"}, "the rule 'average'"),
    ],
)
def test_a_buffer_that_cannot_be_exchanged_is_named(
    model_buffers: dict[str, str], part: str
) -> None:
    task: Any = Task()
    task.model_buffers = model_buffers
    with pytest.raises(TaskStateError) as caught:
        buffer_entries(task, Net())
    assert part in caught.value.message


def test_a_tasks_own_rule_comes_before_that_of_batch_norm() -> None:
    task: Any = Task()
    task.model_buffers = {"norm.*": "region"}
    assert set(rules_of(task, Net()).values()) == {"region"}
    assert BufferLayout.of(task, Net()).exchanged_bytes == 0


def test_a_value_that_changes_its_shape_is_named() -> None:
    net = Net()
    layout = layout_of(net)
    net.short = torch.zeros(3, dtype=torch.bfloat16)
    with pytest.raises(TaskStateError, match=r"'short' was bfloat16\[2\]"):
        layout.read(net)


# ------------------------------------------------------------------ on its way

BUFFERS = torch.arange(72, dtype=torch.uint8)
UPDATE = UpdateMessage("a", 1, 2, 0, 8, torch.randn(5), buffers_E=BUFFERS)
REPLY = ReplyMessage("a", 2, 1, 8, torch.randn(5), buffers_E=BUFFERS, buffers_weight=0.25)


def test_messages_bring_it_behind_their_payload() -> None:
    bytes_received = payload_bytes(UPDATE)
    assert bytes_received.nbytes == UPDATE.size_bytes == 20 + 72
    update = read_update(update_meta(UPDATE), bytes_received)
    assert torch.equal(update.payload_P, UPDATE.payload_P)
    assert torch.equal(update.buffers_E, BUFFERS)
    reply = read_reply(reply_meta(REPLY), payload_bytes(REPLY))
    assert torch.equal(reply.buffers_E, BUFFERS) and reply.buffers_weight == 0.25


def test_without_it_a_header_says_nothing_of_it() -> None:
    plain = UpdateMessage("a", 1, 2, 0, 8, torch.randn(5))
    assert "buffer_bytes" not in update_meta(plain)
    assert read_update(update_meta(plain), payload_bytes(plain)).buffers_E.numel() == 0


@pytest.mark.parametrize("size", [0, 93, -1, "72"])
def test_a_size_that_does_not_fit_is_refused(size: Any) -> None:
    meta = update_meta(UPDATE) | {"buffer_bytes": size}
    with pytest.raises(FrameError, match="buffer_bytes"):
        read_update(meta, payload_bytes(UPDATE))


def test_saved_messages_have_it_once_where_they_share_it() -> None:
    replies = [
        REPLY,
        ReplyMessage("b", 3, 1, 8, REPLY.payload_P, buffers_E=BUFFERS, buffers_weight=0.75),
    ]
    tensors, rows = save_messages("answers", replies)
    assert sum(name.endswith("/buffers") for name in tensors) == 1
    back = load_messages(ReplyMessage, tensors, rows)
    assert [reply.buffers_weight for reply in back] == [0.25, 0.75]
    assert all(torch.equal(reply.buffers_E, BUFFERS) for reply in back)


def test_the_averager_refuses_what_is_not_finite_or_has_another_size() -> None:
    layout = layout_of(Net())
    model_buffers = AveragerBuffers(layout)
    good_E = layout.read(Net())[: layout.exchanged_bytes]
    model_buffers.check(UpdateMessage("a", 1, 1, 0, 4, torch.zeros(1), buffers_E=good_E))
    with pytest.raises(InvariantError, match="bytes of model buffers"):
        model_buffers.check(UpdateMessage("a", 1, 1, 0, 4, torch.zeros(1), buffers_E=good_E[:-1]))
    bad_E = good_E.clone()
    bad_E[:4].view(torch.float32).fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="model buffers"):
        model_buffers.check(UpdateMessage("a", 1, 1, 0, 4, torch.zeros(1), buffers_E=bad_E))


def test_a_region_without_rows_keeps_its_weight_and_one_that_left_has_none() -> None:
    layout = layout_of(Net())
    model_buffers, net = AveragerBuffers(layout), Net()
    for region, rows, value in (("a", 4, 1.0), ("b", 12, 5.0), ("a", 0, 3.0)):
        with torch.no_grad():
            net.norm.running_mean.fill_(value)
        vector_E = layout.read(net)[: layout.exchanged_bytes]
        model_buffers.take(UpdateMessage(region, 1, 1, 0, rows, torch.zeros(1), buffers_E=vector_E))
    (reply,) = model_buffers.attach([ReplyMessage("a", 1, 1, 0, torch.zeros(1))])
    assert reply.buffers_weight == 0.25
    assert reply.buffers_E[:12].view(torch.float32).tolist() == [0.25 * 3.0 + 0.75 * 5.0] * 3
    restored = AveragerBuffers(layout)
    restored.restore(*model_buffers.export())
    (again,) = restored.attach([ReplyMessage("a", 1, 1, 0, torch.zeros(1))])
    assert torch.equal(again.buffers_E, reply.buffers_E)
    restored.leave("b")
    (alone,) = restored.attach([ReplyMessage("a", 1, 1, 0, torch.zeros(1))])
    assert alone.buffers_weight == 1.0 and alone.buffers_E[:4].view(torch.float32).item() == 3.0


def test_statistics_wait_for_all_who_are_left() -> None:
    layout = layout_of(Net())
    collector = StatisticsCollector(layout, {"a": 1.0, "b": 3.0, "c": 5.0})
    vectors = []
    for value in (1.0, 5.0):
        net = Net()
        with torch.no_grad():
            net.norm.running_mean.fill_(value)
            net.names.fill_(value)
        vectors.append(layout.read(net))
    collector.add("a", vectors[0])
    assert collector.take(["a", "b", "c"]) == {}
    collector.add("b", vectors[1])
    assert collector.take(["a", "b", "c"]) == {}
    found = collector.take(["a", "b"])  # c is lost
    for name, own in (("a", 1.0), ("b", 5.0)):
        net = Net()
        layout.write(found[name], net)
        assert net.norm.running_mean.tolist() == [4.0] * 3 and net.names.tolist() == [own] * 2
        assert net.norm.running_var.tolist() == [1.0 + 0.25 * 9 + 0.75 * 1] * 3
    assert collector.take(["a", "b"]) == {}
    collector.add("a", vectors[0])
    assert torch.equal(collector.give_up()["a"], vectors[0]) and collector.give_up() == {}


# ------------------------------------------------------------------ what nobody declared


class Lazy(nn.Module):
    """Makes a buffer in its first step, as caches are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.register_buffer("cache", torch.rand(2), persistent=False)
        return self.layer(x)


def test_what_is_made_in_the_first_step_is_found_and_may_be_scratch() -> None:
    task: Any = Task()
    for model_buffers, found in (({}, True), ({"cache": "scratch"}, False)):
        task.model_buffers, net = model_buffers, Lazy()
        guard = StateGuard(task, net)
        net(torch.zeros(1, 2))
        if found:
            with pytest.raises(TaskStateError, match="'cache'"):
                guard.after_step()
        else:
            guard.after_step()


MEAN_CHANGED = StateChange("changed", "'mean'")


class Late(nn.Module):
    """Begins to average its weights late, as averages do that leave the first steps out."""

    def __init__(self, begins: int) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2, 2))
        self._begins, self._steps = begins, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._steps += 1
        if self._steps >= self._begins:
            self.mean.data.lerp_(self.layer.weight.data + 1.0, 0.1)
        return self.layer(x)


@pytest.mark.parametrize(("begins", "found"), [(4, 4), (5, 8), (100, 128)])
def test_what_begins_to_change_late_is_told_once_and_ends_nothing(begins: int, found: int) -> None:
    net = Late(begins)
    guard, told = StateGuard(Task(), net), {}
    for step in range(1, 300):
        net(torch.zeros(1, 2))
        guard.after_step()
        if changes := guard.take_changed():
            told[step] = changes
    assert told == {found: [MEAN_CHANGED]}


def test_an_evaluation_looks_at_what_no_power_of_two_would_find() -> None:
    net = Late(70)
    guard = StateGuard(Task(), net)
    for _ in range(80):
        net(torch.zeros(1, 2))
        guard.after_step()
    assert not guard.take_changed()
    guard.look()
    assert guard.take_changed() == [MEAN_CHANGED]


class Restored(nn.Module):
    """Averages its weights once a counter among its buffers is high enough."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if int(self.norm.num_batches_tracked) >= 100:
            self.mean.data.add_(1.0)
        y: torch.Tensor = self.norm(x)
        return y


@pytest.mark.parametrize(("version", "raises"), [(None, True), (3, True), (4, False)])
def test_a_worker_that_joins_late_tells_and_ends_nothing(version: int | None, raises: bool) -> None:
    """After a resume, or as a replacement, its first step may be the run's thousandth."""
    net = Restored()
    guard = StateGuard(Task(), net)
    net.norm.num_batches_tracked.fill_(100)  # restored
    for later in (version, 0) if version is not None else ():
        guard.on_work(later)  # the first one counts
    net(torch.rand(4, 2))
    if raises:
        with pytest.raises(TaskStateError, match="'mean'"):
            guard.after_step()
        return
    guard.after_step()
    assert guard.take_changed() == [MEAN_CHANGED]
    for _ in range(8):
        net(torch.rand(4, 2))
        guard.after_step()
    assert not guard.take_changed()


def test_an_evaluation_tells_and_ends_nothing_where_no_step_was_counted() -> None:
    """Gradients that a simulation computes in batches are none of the worker's steps."""
    net = Late(1)
    guard = StateGuard(Task(), net)
    net(torch.zeros(1, 2))
    guard.look()
    assert guard.take_changed() == [MEAN_CHANGED]


def test_constants_of_two_processes_are_compared_by_name() -> None:
    one, other = Net(), Net()
    check_constants(constants_of(one), constants_of(other), "worker 1")
    with torch.no_grad():
        other.fixed[0] = 2.0
    with pytest.raises(TaskStateError, match=r"worker 1 other values of 'fixed'"):
        check_constants(constants_of(one), constants_of(other), "worker 1")


def test_a_model_of_another_size_is_refused_by_name() -> None:
    check_same_size(7, 7, "shard 0 of region 'eu'")
    with pytest.raises(TaskStateError, match=r"shard 0 of region 'eu' 8 parameters, and gave 7"):
        check_same_size(8, 7, "shard 0 of region 'eu'")


def test_statistics_are_made_anew_by_a_loss_that_takes_gradients_itself() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))

    class Penalty:
        def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            inputs = batch.clone().requires_grad_()
            out = model(inputs).square().sum()
            (slope,) = torch.autograd.grad(out, inputs, create_graph=True)
            return out + slope.square().sum()

    batch = torch.randn(16, 3, generator=torch.Generator().manual_seed(1))
    layout = BufferLayout.of(Penalty(), module)  # type: ignore[arg-type]
    buffers_B = layout.read(module)
    with torch.no_grad():
        precise_statistics(Penalty(), module, layout, [batch], buffers_B)  # type: ignore[arg-type]
        layout.write(buffers_B, module)
        outputs = module[0](batch)
    torch.testing.assert_close(module[1].running_mean, outputs.mean(0))
