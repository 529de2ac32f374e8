"""State of training loops in checkpoints: what is loaded equals what was saved, or is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from geo_ray.base.errors import CheckpointMismatchError
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
