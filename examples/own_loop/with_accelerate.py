"""A loop with Hugging Face Accelerate and gradient accumulation that joins a run.

accelerate launch examples/own_loop/with_accelerate.py ADDRESS REGION CREDENTIALS
"""

import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import geo_ray


def new_model() -> nn.Module:
    """The model, equal in all regions."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))


def rows_of(region: str) -> TensorDataset:
    """The rows of a region, which stay there."""
    generator = torch.Generator().manual_seed(sum(map(ord, region)))
    x = torch.randn(96, 8, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


def train(address: str, region: str, credentials: str) -> Tensor:
    """Train to the end of the run; return the model's parameters."""
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
    model = new_model()
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.01),
        DataLoader(rows_of(region), batch_size=4, shuffle=True),
    )
    group = dist.group.WORLD if accelerator.num_processes > 1 else None
    with (
        geo_ray.join(address, region=region, credentials=credentials, group=group) as site,
        site.training(model) as sync,  # the prepared model
    ):
        rows = 0
        for x, y in sync.batches(loader):
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            rows += len(x)
            if accelerator.sync_gradients:  # a real optimizer step
                sync.step(rows=rows, loss=loss)
                rows = 0
    unwrapped = accelerator.unwrap_model(model)
    return nn.utils.parameters_to_vector(unwrapped.parameters()).detach()


if __name__ == "__main__":
    print(train(*sys.argv[1:]).norm())
