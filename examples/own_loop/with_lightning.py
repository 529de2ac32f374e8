"""A Lightning Trainer that joins a run through a callback.

python examples/own_loop/with_lightning.py ADDRESS REGION CREDENTIALS, or with torchrun
"""

import os
import sys

import lightning
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import geo_ray
from geo_ray.joining.callbacks import lightning_callback


class Classifier(lightning.LightningModule):
    """The model, equal in all regions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss of a batch."""
        x, y = batch
        return nn.functional.cross_entropy(self.layers(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def new_model() -> Classifier:
    """The model, equal in all regions."""
    torch.manual_seed(0)
    return Classifier()


def rows_of(region: str) -> TensorDataset:
    """The rows of a region, which stay there."""
    generator = torch.Generator().manual_seed(sum(map(ord, region)))
    x = torch.randn(96, 8, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


def train(address: str, region: str, credentials: str) -> Tensor:
    """Train to the end of the run; return the model's parameters."""
    model = new_model()
    loader = DataLoader(rows_of(region), batch_size=4, shuffle=True)
    group = dist.group.WORLD if dist.is_initialized() else None
    with geo_ray.join(address, region=region, credentials=credentials, group=group) as site:
        trainer = lightning.Trainer(
            accelerator="auto" if torch.cuda.is_available() else "cpu",
            devices=1 if group is None else int(os.environ["LOCAL_WORLD_SIZE"]),
            strategy="auto" if group is None else "ddp",
            accumulate_grad_batches=2,
            max_epochs=-1,  # the callback ends the training
            callbacks=[lightning_callback(site)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, loader)
    return nn.utils.parameters_to_vector(model.parameters()).detach()


if __name__ == "__main__":
    if "RANK" in os.environ:  # before Lightning does it, because `join` needs the group
        dist.init_process_group()
    print(train(*sys.argv[1:]).norm())
