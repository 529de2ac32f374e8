"""Tasks that make their steps with their own optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from geo_ray.base.random_state import seeded
from tests.support.buffer_tasks import Constant


class Network(Constant):
    """A plain network with dropout, which draws random numbers."""

    dropout = 0.2

    def model(self, seed: int) -> nn.Module:
        with seeded(seed):
            return nn.Sequential(
                nn.Flatten(),
                nn.Linear(64, 12),
                nn.ReLU(),
                nn.Dropout(self.dropout),
                nn.Linear(12, 10),
            )


def rate(step: int) -> float:
    """Warm-up, a plateau and a decay."""
    return min(1.0, (step + 1) / 3) * (1.0 if step < 6 else max(0.1, (12 - step) / 6))


class Hooks(Network):
    """Optimizer and schedule of the task, gradients of geo_ray."""

    def optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        flat = [p for p in params if p.ndim < 2]
        rest = [p for p in params if p.ndim >= 2]
        groups: list[dict[str, Any]] = [{"params": rest, "weight_decay": 0.1}, {"params": flat}]
        return torch.optim.NAdam(groups, lr=0.01)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


class Steps(Network):
    """A whole step: mixed precision with a scaler, own clipping, optimizer and schedule."""

    def training_state(self, model: nn.Module) -> dict[str, Any]:
        self.adam = torch.optim.NAdam(model.parameters(), lr=0.01)
        self.rates = torch.optim.lr_scheduler.LambdaLR(self.adam, rate)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=3)
        return {"adam": self.adam, "rates": self.rates, "scaler": self.scaler}

    def train_step(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.adam.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = self.loss(model, batch)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.adam)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        self.scaler.step(self.adam)
        self.scaler.update()
        self.rates.step()
        return loss


class CalmHooks(Hooks):
    """Without random numbers, for workers that are threads of one process."""

    dropout = 0.0


class CalmSteps(Steps):
    """Without random numbers, too."""

    dropout = 0.0


class Adversaries(Network):
    """Two networks with alternating optimizers: one encodes, the other tells images from codes."""

    def model(self, seed: int) -> nn.Module:
        with seeded(seed):
            return nn.ModuleDict({"maker": nn.Linear(8, 64), "judge": nn.Linear(64, 1)})

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        real, made = self._both(model, batch)
        return nn.functional.softplus(made - real).mean()

    def evaluate(self, model: nn.Module, batch: Any) -> Any:
        image = nn.Sequential(nn.Flatten(), model["judge"], nn.ZeroPad1d((0, 9)))
        return super().evaluate(image, batch)

    def _both(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.randn(len(batch.labels), 8)
        judge = model["judge"]
        return judge(batch.inputs.flatten(1)), judge(model["maker"](noise).tanh())

    def training_state(self, model: nn.Module) -> dict[str, Any]:
        self.of = {
            name: torch.optim.Adam(part.parameters(), lr=0.01, betas=(0.5, 0.9))
            for name, part in model.items()
        }
        return self.of

    def train_step(self, model: nn.Module, batch: Any) -> float:
        real, made = self._both(model, batch)
        self.of["judge"].zero_grad()
        loss = nn.functional.softplus(made - real).mean()
        loss.backward()
        self.of["judge"].step()
        _, made = self._both(model, batch)
        self.of["maker"].zero_grad()
        nn.functional.softplus(-made).mean().backward()
        self.of["maker"].step()
        return loss.item()


class HalfHooks(Hooks):
    """Parameters of half precision; the optimizer gets their masters."""

    def model(self, seed: int) -> nn.Module:
        return super().model(seed).to(torch.bfloat16)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        out = model(batch.inputs.to(torch.bfloat16)).float()
        return nn.functional.cross_entropy(out, batch.labels)

    def evaluate(self, model: nn.Module, batch: Any) -> Any:
        class Cast(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return model(x.to(torch.bfloat16)).float()

        return super().evaluate(Cast(), batch)
