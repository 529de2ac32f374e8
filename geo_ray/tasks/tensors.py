"""From NumPy columns to tensors on a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def to_tensor(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy an array (any shape and numeric dtype) to a tensor on `device`.

    Always a copy: columns read from a shard are read-only views of its buffer.
    """
    return torch.from_numpy(np.array(array)).to(device)
