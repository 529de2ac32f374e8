"""A plain PyTorch loop that joins a run.

python examples/own_loop/plain.py ADDRESS REGION CREDENTIALS
"""

import sys

import torch
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
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(rows_of(region), batch_size=8, shuffle=True)
    with (
        geo_ray.join(address, region=region, credentials=credentials) as site,
        site.training(model) as sync,
    ):
        for x, y in sync.batches(loader):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sync.step(rows=len(x), loss=loss)
    return nn.utils.parameters_to_vector(model.parameters()).detach()


if __name__ == "__main__":
    print(train(*sys.argv[1:]).norm())
