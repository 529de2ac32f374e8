"""Random numbers that nobody looks at are not drawn: a model's outline waits for none.

On the meta device tensors have no content. PyTorch works out what a draw would look like with
Python code, and imports its compiler for the first one, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_IN_PLACE: Final = frozenset(
    {
        nn.init.normal_,  # modes do not see what it calls
        Tensor.normal_,
        Tensor.exponential_,
        Tensor.log_normal_,
        Tensor.cauchy_,
        Tensor.geometric_,
        Tensor.erfinv_,  # a step of truncated normal numbers
    }
)


class Undrawn(TorchFunctionMode):
    """Within ``with torch.device("meta"), Undrawn()``: draws without content are left out."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func in _IN_PLACE:
            into = args[0] if args else given["tensor"]
            if into.is_meta:
                return into
        if func is torch.randn and given.get("device") is None and given.get("out") is None:
            made = torch.empty(*args, **{k: v for k, v in given.items() if k != "generator"})
            if made.is_meta:
                return made
        return func(*args, **given)
