"""A Hugging Face Trainer that joins a run through a callback.

python examples/own_loop/with_trainer.py ADDRESS REGION CREDENTIALS, or with torchrun
"""

import sys
import tempfile

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import geo_ray
from geo_ray.joining.callbacks import trainer_callback


class Classifier(nn.Sequential):
    """A model that returns its loss, as Trainer expects."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        """Return loss and logits."""
        logits = super().forward(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Rows(Dataset[dict[str, Tensor]]):
    """The rows of a region, which stay there.

    Args:
        region: the region.
    """

    def __init__(self, region: str) -> None:
        generator = torch.Generator().manual_seed(sum(map(ord, region)))
        self.x = torch.randn(96, 8, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": (self.x[index].sum() > 0).long()}


def new_model() -> nn.Module:
    """The model, equal in all regions."""
    torch.manual_seed(0)
    return Classifier(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))


def train(address: str, region: str, credentials: str, max_steps: int = 12) -> Tensor:
    """Train to the end of the run; return the model's parameters."""
    model = new_model()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            max_steps=max_steps,  # at least `train.steps` of the run
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=0.01,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,  # no clipping
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        group = dist.group.WORLD if dist.is_initialized() else None
        with geo_ray.join(address, region=region, credentials=credentials, group=group) as site:
            callbacks = [trainer_callback(site)]
            Trainer(model, args, train_dataset=Rows(region), callbacks=callbacks).train()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


if __name__ == "__main__":
    print(train(*sys.argv[1:4]).norm())
