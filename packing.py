"""A second copy of the weights that a CPU reads faster.

A matrix product of few rows is a race through the weights, and the kernels that torch picks for large batches run it
badly: eight rows take two or three times as long as one. oneDNN, the library behind torch's CPU kernels, has better
ones for weights that lie in blocks of its own choosing. Making such a copy takes as much memory again, and no time
worth naming. `model.py` says what it brings.

Step by step: notebook 05, section 2.
"""

from typing import Any

import torch
from torch import Tensor, nn


def packed(weight: Tensor) -> Tensor | None:
    """A copy of a (n_out, n_in) weight in the blocked layout that oneDNN's kernels read straight through; None if there
    is no such thing for its device and dtype, or in this build of torch.

    torch's own compiler uses these operations. They are not public, so whatever goes wrong means: do without. float32
    stays IEEE float32.
    """
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return None
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    try:
        copy = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 8)  # laid out for about 8 rows, good for any
        apply_packed(torch.zeros(1, weight.shape[1], dtype=weight.dtype), copy, None)
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return None
    return copy


def apply_packed(x: Tensor, copy: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + bias with a packed W: (..., n_in) -> (..., n_out)."""
    return torch.ops.mkldnn._linear_pointwise.default(x, copy, bias, "none", [], "")


class Packable(nn.Module):
    """A module that may hold a packed copy of its weights. Moving it, changing its dtype, copying or pickling it drops
    the copy, which would be stale or cannot follow."""

    packed: Tensor | None = None

    def _apply(self, fn: Any, recurse: bool = True) -> "Packable":  # what .to(), .double() and the like go through
        self.packed = None
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "packed"}
