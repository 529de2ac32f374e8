"""LeNet-5 and ResNet-18 for small images, without running statistics."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (torch's own convention)

_CLASSES = 10
_CHANNELS_PER_GROUP = 16


def lenet(channels: int, side: int) -> nn.Module:
    """Return LeNet-5 with ReLU and max pooling: (N, channels, side, side) -> logits (N, 10).

    28-pixel images are padded to the 32 that the network was made for.
    """
    padding = 2 if side == 28 else 0
    left = ((side + 2 * padding - 4) // 2 - 4) // 2
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5, padding=padding),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * left * left, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, _CLASSES),
    )


def resnet18(channels: int, width: int) -> nn.Module:
    """Return ResNet-18 in its CIFAR shape: (N, channels, H, W) -> logits (N, 10).

    A 3x3 stem without pooling, then two blocks each of width, 2, 4 and 8 times it. GroupNorm
    stands where the original has BatchNorm, whose running statistics no update would carry.
    """
    layers: list[nn.Module] = [_conv3(channels, width, 1), _norm(width), nn.ReLU()]
    inputs = width
    for stage in range(4):
        outputs = width * 2**stage
        layers += [
            Residual(inputs, outputs, stride=1 if stage == 0 else 2),
            Residual(outputs, outputs, stride=1),
        ]
        inputs = outputs
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, _CLASSES)
    )


class Residual(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            _conv3(inputs, outputs, stride),
            _norm(outputs),
            nn.ReLU(),
            _conv3(outputs, outputs, 1),
            _norm(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), _norm(outputs)
            )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return (N, outputs, H / stride, W / stride)."""
        return F.relu(self.body(images) + self.shortcut(images))


def _conv3(inputs: int, outputs: int, stride: int) -> nn.Conv2d:
    layer = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


def _norm(channels: int) -> nn.GroupNorm:
    groups = channels // _CHANNELS_PER_GROUP if channels % _CHANNELS_PER_GROUP == 0 else 1
    return nn.GroupNorm(groups, channels)
