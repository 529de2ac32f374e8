"""The checks of tasks: those of the library pass, and each mistake is found by its promise."""

from __future__ import annotations

from pathlib import Path

import pytest

from geo_ray.api.check import check
from geo_ray.base.errors import TaskLoadError
from geo_ray.data.tasks.load import BUILT_IN

TASKS = Path(__file__).parents[2] / "support" / "buffer_tasks.py"
OWN_STEPS = TASKS.with_name("own_steps_tasks.py")
MISTAKES = '''
import copy

import torch
from torch import nn

from geo_ray.data.tasks.groups import ParameterGroup, undecayed
from geo_ray.data.tasks.digits import Digits


class Plain(Digits):
    def model(self, seed):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Linear(4, 10))


class Undeclared(Plain):
    def model(self, seed):
        model = super().model(seed)
        model.register_buffer("seen", torch.zeros(()))
        return model

    def loss(self, model, batch):
        model.seen.add_(1)
        return super().loss(model, batch)


class Follows(Plain):
    """An average of the weights, which is not declared: it stands still while they do."""

    def model(self, seed):
        model = super().model(seed)
        model.register_buffer("average", model[1].weight.detach().clone())
        return model

    def loss(self, model, batch):
        with torch.no_grad():
            model.average.lerp_(model[1].weight, 0.1)
        return super().loss(model, batch)


class Hidden(Plain):
    """Keeps what changes where nobody can find it."""

    count = 0

    def loss(self, model, batch):
        self.count += 1
        return super().loss(model, batch) * self.count


class Forgets(Plain):
    """Computes with parameters that are not those it is given."""

    kept = None

    def evaluate(self, model, batch):
        self.kept = copy.deepcopy(model)
        return super().evaluate(model, batch)

    def loss(self, model, batch):
        out = 0.0 if self.kept is None else self.kept(batch.inputs).sum().detach()
        return super().loss(model, batch) * (1 + out)


class Replaces(Plain):
    def evaluate(self, model, batch):
        model[1].weight = nn.Parameter(model[1].weight.detach().clone())
        return super().evaluate(model, batch)


class Misspelt(Plain):
    model_buffers = {"sean": "mean"}


class NoSuchRule(Plain):
    model_buffers = {"2.running_mean": "sum"}


class NoSuchGroup(Plain):
    def groups(self, model):
        return [ParameterGroup("head.*")]


class Raises(Plain):
    def train_step(self, model, batch):
        raise ValueError("no such device")


class Unsaved(Plain):
    """A schedule of its own that no checkpoint has."""

    def training_state(self, model):
        self.sgd, self.rate = torch.optim.SGD(model.parameters(), lr=0.1), 0.1
        return {"sgd": self.sgd}

    def train_step(self, model, batch):
        self.sgd.zero_grad()
        loss = self.loss(model, batch)
        loss.backward()
        self.rate *= 0.9
        self.sgd.param_groups[0]["lr"] = self.rate
        self.sgd.step()
        return loss


class Counts(Unsaved):
    """Counts its steps for ever."""

    count = 0

    def train_step(self, model, batch):
        self.count += 1
        self.rate = 0.1 / self.count
        return super().train_step(model, batch)


class Grouped(Plain):
    model_buffers = {"2.*": "region"}

    def groups(self, model):
        return [undecayed(model)]
'''


def broken(name: str, base_dir: Path, options: list[str] | None = None) -> dict[str, str]:
    found = check(name, options or [], base_dir=base_dir)
    assert len(found.findings) >= 7
    return {finding.promise: str(finding.why) for finding in found.broken}


@pytest.mark.parametrize("name", sorted(set(BUILT_IN) - {"images", "ctr"}))
def test_tasks_of_the_library_pass(name: str, tmp_path: Path) -> None:
    options = {"bytelm": ["size=0.1M", "max_bytes=20000", "decay=matrices"]}.get(name)
    assert broken(name, tmp_path, options) == {}


@pytest.mark.parametrize("name", ["Stateful", "Constant", "Normed", "Grouped"])
def test_what_says_all_that_changes_passes(name: str, tmp_path: Path) -> None:
    assert broken(f"{TASKS}:{name}", tmp_path) == {}


@pytest.mark.parametrize(
    ("name", "promise", "why"),
    [
        ("Undeclared", "a step changes only parameters and declared model buffers", "'seen'"),
        ("Follows", "a step changes only parameters and declared model buffers", "'average'"),
        ("Hidden", "a repeated step gives the same bits", "another gradient"),
        ("Forgets", "a step gives the gradient that PyTorch gives", "1.weight"),
        ("Replaces", "evaluations add up", "'1.weight'"),
        ("Misspelt", "its model buffers can be exchanged", "'sean'"),
        ("NoSuchRule", "its model buffers can be exchanged", "'sum'"),
        ("NoSuchGroup", "its groups cover its parameters", "'head.*'"),
        ("Raises", "a step changes only parameters and declared model buffers", "no such device"),
        ("Raises", "its steps continue from a checkpoint", "no such device"),
        ("Unsaved", "its steps continue from a checkpoint", "gives other parameters"),
        ("Counts", "a repeated step gives the same bits", "gives other parameters"),
    ],
)
def test_a_mistake_is_found(name: str, promise: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "mistakes.py").write_text(MISTAKES)
    assert why in broken(f"mistakes.py:{name}", tmp_path)[promise]


def test_a_task_with_both_passes(tmp_path: Path) -> None:
    (tmp_path / "mistakes.py").write_text(MISTAKES)
    assert broken("mistakes.py:Grouped", tmp_path) == {}


@pytest.mark.parametrize("name", ["Hooks", "Steps", "Adversaries"])
def test_own_steps_that_keep_all_promises_pass(name: str, tmp_path: Path) -> None:
    assert broken(f"{OWN_STEPS}:{name}", tmp_path) == {}


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ("train_step(self, model, batch), optimizer(self, params)", "train_step and optimizer"),
        (
            "train_step(self, model, batch), scheduler(self, optimizer)",
            "train_step and scheduler",
        ),
        ("scheduler(self, optimizer)", "scheduler, which nothing calls without optimizer"),
        ("training_state(self, model)", "training_state, which nothing calls without train_step"),
        ("train_step(self, model)", "train_step cannot be called"),
    ],
)
def test_contradictory_methods_are_refused(methods: str, message: str, tmp_path: Path) -> None:
    heads = methods.replace("), ", ")\n").splitlines()
    body = "".join(f"    def {head}:\n        return None\n\n" for head in heads)
    (tmp_path / "mistakes.py").write_text(f"{MISTAKES}\n\nclass Both(Plain):\n{body}")
    with pytest.raises(TaskLoadError, match=message):
        check("mistakes.py:Both", base_dir=tmp_path)
