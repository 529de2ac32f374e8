"""State of training loops in checkpoints: what is loaded equals what was saved, or is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from geo_ray.base.errors import CheckpointError, CheckpointMismatchError
from geo_ray.joining.checkpoint import commit, write_part
from geo_ray.joining.rank_saver import LoopState
from geo_ray.storage.folders import LocalRoot
from geo_ray.storage.manifest import MANIFEST_FILE
from tests.support.join_support import ROWS, adamw, small_model


class Object:
    """An object with a state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def saved(loop: LoopState, path: Path) -> LocalRoot:
    """Save as checkpoint 1, as a region of one rank does."""
    root = LocalRoot(path)
    folder = root.folder(1)
    commit(folder, [write_part(loop.tree(0), folder, 0, 1, only_here=["rank_state.rank-00000"])])
    assert folder.has(MANIFEST_FILE)
    return root


@pytest.mark.parametrize("which", ["shared", "own"])
def test_a_state_whose_structure_has_changed(which: str, tmp_path: Path) -> None:
    """A data loader at its first step has other keys than later; keys need not be text."""
    model = small_model()
    state = {
        "position": {"epoch": 2, "seen": torch.arange(5)},
        "seeds": {0: 4, 1: 5},
        "empty": {},
        "none": [],
        "pair": (1, torch.tensor(2.0)),
        "a.b": [{"deep": torch.ones(2)}, float("inf")],
    }

    def loop(state: Any) -> LoopState:
        objects = {"thing": Object(state)}
        return LoopState(model, **{"shared": {}, "own": {}, which: objects})

    root = saved(loop(state), tmp_path)
    fresh = loop({"position": None, "gone": 1, "pair": None})
    fresh.load(root, 1, 0)
    found = getattr(fresh, which)["thing"].state
    torch.testing.assert_close(found, state, rtol=0, atol=0)
    assert list(found["seeds"]) == [0, 1]


def test_types_of_containers_of_the_object_stay(tmp_path: Path) -> None:
    model = small_model()
    loop = LoopState(model, {"schedule": Object({"milestones": Counter({3: 2})})}, {})
    root = saved(loop, tmp_path)
    fresh = LoopState(model, {"schedule": Object({"milestones": Counter({9: 1})})}, {})
    fresh.load(root, 1, 0)
    assert fresh.shared["schedule"].state == {"milestones": Counter({3: 2})}
    assert isinstance(fresh.shared["schedule"].state["milestones"], Counter)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A step that uses only some of the parameters."""
    x = torch.randn(ROWS, 7, generator=torch.Generator().manual_seed(1))
    optimizer.zero_grad()
    model[0](x).sum().backward()  # type: ignore[index]
    optimizer.step()


def test_parameters_without_a_gradient_have_no_state(tmp_path: Path) -> None:
    model = small_model()
    optimizer = adamw(model)
    trained(model, optimizer)
    root = saved(LoopState(model, {"optimizer": optimizer}, {}), tmp_path)
    other = adamw(model)
    LoopState(model, {"optimizer": other}, {}).load(root, 1, 0)
    torch.testing.assert_close(other.state_dict(), optimizer.state_dict(), rtol=0, atol=0)


def test_gradients_that_exist_before_the_training(tmp_path: Path) -> None:
    """An optimizer is loaded although its parameters have gradients of a trial step."""
    model = small_model()
    optimizer = adamw(model)
    trained(model, optimizer)
    root = saved(LoopState(model, {"optimizer": optimizer}, {}), tmp_path)
    model[0](torch.randn(ROWS, 7)).sum().backward()  # type: ignore[index]
    other = adamw(model)
    LoopState(model, {"optimizer": other}, {}).load(root, 1, 0)
    torch.testing.assert_close(other.state_dict(), optimizer.state_dict(), rtol=0, atol=0)


def test_other_groups_of_parameters_are_refused(tmp_path: Path) -> None:
    model = small_model()
    first, *rest = model.parameters()
    optimizer = torch.optim.AdamW([{"params": [first]}, {"params": rest, "lr": 0.5}])
    trained(model, optimizer)
    root = saved(LoopState(model, {"optimizer": optimizer}, {}), tmp_path)
    with pytest.raises(CheckpointMismatchError, match=r"'optimizer' has no 'param_groups\.1'"):
        LoopState(model, {"optimizer": adamw(model)}, {}).load(root, 1, 0)


def test_objects_that_were_not_saved_are_refused(tmp_path: Path) -> None:
    model = small_model()
    root = saved(LoopState(model, {"optimizer": adamw(model)}, {}), tmp_path)
    loop = LoopState(model, {"optimizer": adamw(model), "schedule": Object({"n": 1})}, {})
    with pytest.raises(CheckpointMismatchError, match="no state 'schedule'"):
        loop.load(root, 1, 0)


@pytest.mark.parametrize("which", ["shared", "own"])
def test_values_of_numpy_and_bytes(which: str, tmp_path: Path) -> None:
    """A sampler with generators of NumPy and Python's `random` continues exactly."""
    generator, legacy = np.random.default_rng(3), np.random.RandomState(4)
    random = Random(5)
    state = {
        "generator": generator.bit_generator.state,
        "legacy": legacy.get_state(),
        "random": random.getstate(),
        "order": np.arange(12).reshape(3, 4)[::-1, ::2],
        "other order": np.arange(3, dtype=">i4"),
        "words": np.array(["a", "Wörter"]),
        "empty": np.empty((0, 2), np.float16),
        "best": np.float64(1.5),
        "is_new": np.bool_(True),
        "token": b"\x00\xff",
        "nothing": b"",
        "buffer": bytearray(b"abc"),
    }

    def loop(state: Any) -> LoopState:
        objects = {"sampler": Object(state)}
        return LoopState(small_model(), **{"shared": {}, "own": {}, which: objects})

    root = saved(loop(state), tmp_path)
    fresh = loop(None)
    fresh.load(root, 1, 0)
    found = getattr(fresh, which)["sampler"].state
    for key, value in state.items():
        if isinstance(value, np.ndarray | np.generic):
            assert type(found[key]) is type(value), key
            assert found[key].dtype == value.dtype, key
            np.testing.assert_array_equal(found[key], value)
        elif key != "legacy":
            assert type(found[key]) is type(value), key
            assert found[key] == value, key
    again = np.random.default_rng()
    again.bit_generator.state = found["generator"]
    assert again.random() == generator.random()
    other, third = np.random.RandomState(), Random()
    other.set_state(found["legacy"])
    assert other.rand() == legacy.rand()
    third.setstate(found["random"])
    assert third.random() == random.random()
    found["order"][0, 0] = 7  # it can be written


def test_a_rate_that_is_a_number_of_numpy(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=np.linspace(0.1, 0.3, 3)[1], momentum=0.5)
    trained(model, optimizer)
    root = saved(LoopState(model, {"optimizer": optimizer}, {}), tmp_path)
    other = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    LoopState(model, {"optimizer": other}, {}).load(root, 1, 0)
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 0.2


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({1, 2}, r"state 'thing\.deep\.1': a value of type set cannot be saved"),
        (np.array([None]), r"state 'thing\.deep\.1': a value of type numpy\.ndarray cannot"),
        (torch.float16, r"state 'thing\.deep\.1': a value of type torch\.dtype cannot"),
        (torch.zeros(1, dtype=torch.complex64), r"'thing\.deep\.1': a tensor of torch\.complex64"),
    ],
)
@pytest.mark.parametrize("which", ["shared", "own"])
def test_values_that_cannot_be_saved_are_named(which: str, value: Any, message: str) -> None:
    objects = {"thing": Object({"deep": [0, value]})}
    loop = LoopState(small_model(), **{"shared": {}, "own": {}, which: objects})
    for call in (loop.check, lambda: loop.tree(0)):
        with pytest.raises(CheckpointError, match=message):
            call()


def test_a_group_of_an_optimizer_that_cannot_be_saved() -> None:
    model = small_model()
    optimizer = torch.optim.SGD([{"params": model.parameters(), "tags": {"a"}}], lr=0.1)
    with pytest.raises(CheckpointError, match=r"state 'sgd\.param_groups\.0\.tags': .* type set"):
        LoopState(model, {"sgd": optimizer}, {}).check()
    assert not optimizer.state  # nothing was initialized
