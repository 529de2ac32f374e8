"""Tasks whose models change in the forward pass, for tests; loaded by their path.

`Stateful` has one of each: BatchNorm, a teacher that follows the weights (frozen parameters), a
queue of features with its place, and a buffer that is made anew in every step.
"""

from __future__ import annotations

import dataclasses

import torch
from pydantic import Field
from torch import nn

from geo_ray.base.model import StrictModel
from geo_ray.base.random_state import seeded
from geo_ray.data.tasks.classification import classification_metrics, classification_stats
from geo_ray.data.tasks.digits import Digits
from geo_ray.data.tasks.groups import ParameterGroup, undecayed

DECAY = 0.9
QUEUE = 6


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 12)
        self.norm = nn.BatchNorm1d(12)
        self.outer = nn.Linear(12, 10)
        self.teacher = nn.Linear(12, 10).requires_grad_(False)
        self.register_buffer("queue", torch.zeros(QUEUE, 12))
        self.register_buffer("place", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.zeros(1), persistent=False)
        self.register_buffer("scale", torch.full((12,), 1.5))

    def features(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.inner(images.flatten(1)) * self.scale))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.outer(self.features(images)) + 0.1 * self.teacher(self.features(images))


class Stateful:
    class Options(StrictModel):
        declares: bool = Field(True, description="whether the task says what changes")
        keeps: str = Field("", description="pattern of what each region keeps")
        frozen: float = Field(1.5, description="a constant")

    columns = Digits.columns
    label_column = "label"

    def __init__(self, options: Options) -> None:
        self._options = options
        self._digits = Digits(Digits.Options(width=2))
        if options.declares:
            self.model_buffers = {
                "teacher.*": "mean", "place": "mean", "queue": "region", "mask": "scratch",
            }  # fmt: skip
            if options.keeps:
                self.model_buffers[options.keeps] = "region"

    def model(self, seed: int) -> nn.Module:
        with seeded(seed):
            network = Network()
        network.scale.fill_(self._options.frozen)
        return network

    def collate(self, columns, device):
        return self._digits.collate(columns, device)

    def dataset(self, seed: int):
        return self._digits.dataset(seed)

    def loss(self, model: Network, batch) -> torch.Tensor:
        with torch.no_grad():
            for name, mine in model.outer.named_parameters():
                model.teacher.get_parameter(name).mul_(DECAY).add_(mine, alpha=1 - DECAY)
        features = model.features(batch.inputs)
        logits = model.outer(features) + 0.1 * model.teacher(features)
        with torch.no_grad():
            model.queue[int(model.place) % QUEUE] = features[0]
            model.place.add_(1)
            model.mask = torch.rand(1)
        return nn.functional.cross_entropy(logits, batch.labels)

    def evaluate(self, model, batch):
        return classification_stats(model, batch)

    def metrics(self, stats):
        return classification_metrics(stats)


class FrozenNorm(nn.Module):
    """As torchvision has it: the statistics are constants."""

    def __init__(self, count: int) -> None:
        super().__init__()
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.3)):
            self.register_buffer(name, torch.full((count,), value))
        self.register_buffer("running_var", torch.full((count,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.running_mean) / self.running_var.sqrt() * self.weight + self.bias


class Constant(Stateful):
    """Nothing of it changes but its parameters."""

    def __init__(self, options: Stateful.Options) -> None:
        super().__init__(options)
        self.model_buffers = {}

    def model(self, seed: int) -> nn.Module:
        with seeded(seed):
            return nn.Sequential(
                nn.Flatten(), nn.Linear(64, 12), FrozenNorm(12), nn.ReLU(), nn.Linear(12, 10)
            )

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch.inputs), batch.labels)


class Normed(Constant):
    """Plain BatchNorm, without a word about it."""

    def model(self, seed: int) -> nn.Module:
        with seeded(seed):
            return nn.Sequential(
                nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 10)
            )


class Late(Normed):
    """An undeclared buffer follows the steps, once a declared counter is high enough."""

    def model(self, seed: int) -> nn.Module:
        network = super().model(seed)
        network.register_buffer("mean", torch.zeros(2))
        return network

    def loss(self, model, batch):
        if int(model.get_buffer("2.num_batches_tracked")) >= 5:
            model.get_buffer("mean").add_(1.0)
        return super().loss(model, batch)


class Ungrouped(Constant):
    """A plain network."""

    def model(self, seed: int) -> nn.Module:
        with seeded(seed):
            return nn.Sequential(
                nn.Flatten(), nn.Linear(64, 12), nn.LayerNorm(12), nn.ReLU(), nn.Linear(12, 10)
            )


class Grouped(Ungrouped):
    """The same with norms and biases apart."""

    def groups(self, model: nn.Module) -> list[ParameterGroup]:
        return [dataclasses.replace(undecayed(model), rate=2.0)]


class Routed(nn.Module):
    """Rows of one batch go to one of four experts; the spare one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(64, 12)
        self.experts = nn.ModuleList(nn.Linear(12, 10) for _ in range(4))
        self.spare = nn.Linear(12, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts[int(x.sum().item() * 16) % 4](self.stem(x.flatten(1)).relu())


class Experts(Constant):
    """A mixture of experts: a step has no gradients for those that it does not use."""

    def model(self, seed: int) -> nn.Module:
        with seeded(seed):
            return Routed()


class Spare(Constant):
    """A network with a layer that no step uses."""

    def model(self, seed: int) -> nn.Module:
        with seeded(seed):
            return nn.ModuleDict({"used": nn.Linear(64, 10), "spare": nn.Linear(12, 10)})

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model["used"](batch.inputs.flatten(1)), batch.labels)

    def evaluate(self, model, batch):
        return super().evaluate(nn.Sequential(nn.Flatten(), model["used"]), batch)


class Rounded(nn.Module):
    """Layers of half precision and a norm of single precision."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(64, 12, dtype=dtype)
        self.norm = nn.LayerNorm(12)
        self.last = nn.Linear(12, 10, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = self.first.weight.dtype
        hidden = self.norm(self.first(x.flatten(1).to(dtype)).float()).relu()
        return self.last(hidden.to(dtype)).float()


class Bfloat16(Constant):
    """A model of mixed precision."""

    dtype = torch.bfloat16

    def model(self, seed: int) -> nn.Module:
        with seeded(seed):
            return Rounded(self.dtype)


class Float16(Bfloat16):
    dtype = torch.float16
