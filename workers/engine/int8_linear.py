"""INT8 linear layers for the CPU: weights scaled per output, activations per row, exact integer sums.

Because every row has its own scale and integer sums do not round, a row's result does not depend on the rows beside
it: a quantised target gives the same ids whether it reads one token or a block of drafts.

bitsandbytes' INT8 also runs on the CPU, and was slower than bfloat16 there; torchao's was slower for a single row.
The product is oneDNN's, the operator that torch's compiler emits for INT8 on the CPU.
"""

import functools
from typing import Any

import torch

_LARGEST = 127.0
_UNSIGNED_ZERO = 128  # adding it to an int8 number is the same as flipping the top bit
_NO_OPERATION: tuple[str, list[Any], str] = ("none", [], "")


class Int8Linear(torch.nn.Module):
    """y = x W^T + b with W in int8 [out_features, in_features]; x [..., in_features] of any floating dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Quantise `weight` [out_features, in_features], each row by its largest magnitude."""
        super().__init__()
        values, scales = quantise_rows(weight.detach().float())
        self.in_features, self.out_features = weight.shape[1], weight.shape[0]
        self._scales = scales.squeeze(1)  # float32 [out_features]
        self._zeros = torch.zeros(self.out_features, dtype=torch.int64)
        self._bias = None if bias is None else bias.detach().float()
        self._with_onednn = onednn_is_exact()
        self._weight = torch.ops.onednn.qlinear_prepack(values, [1, self.in_features]) if self._with_onednn else values

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., out_features] in the dtype of `x`."""
        values, row_scales = quantise_rows(x.reshape(-1, self.in_features).float())
        if self._with_onednn:
            sums = _onednn_product(values, self._weight, self._scales, self._zeros)
        else:
            sums = torch._int_mm(values, self._weight.t()).float().mul_(self._scales)
        sums.mul_(row_scales)
        if self._bias is not None:
            sums.add_(self._bias)
        return sums.to(x.dtype).reshape(*x.shape[:-1], self.out_features)


def quantise_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 [n, m] and float32 scales [n, 1] for float32 `rows` [n, m]; a row of zeros stays zeros."""
    scales = rows.abs().amax(dim=1, keepdim=True).div_(_LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
    return (rows / scales).round_().to(torch.int8), scales


def quantise_linear_layers(model: torch.nn.Module, kept: set[str]) -> int:
    """Replace the linear layers of `model` by INT8 ones, in place, but those named in `kept`; return how many."""
    replaced = 0
    for parent_name, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            full_name = f"{parent_name}.{name}" if parent_name else name
            if full_name in kept:
                continue
            if type(child) is torch.nn.Linear:
                setattr(parent, name, Int8Linear(child.weight, child.bias))
            elif type(child).__name__ == "Conv1D":  # GPT-2's linear layer, with its weight the other way round
                layer: Any = child
                setattr(parent, name, Int8Linear(layer.weight.t().contiguous(), layer.bias))
            else:
                continue
            replaced += 1
    return replaced


@functools.cache
def onednn_is_exact() -> bool:
    """Whether oneDNN's INT8 product is there and adds without saturating, which old processors do."""
    extreme = torch.full((2, 64), 127, dtype=torch.int8)
    try:
        packed = torch.ops.onednn.qlinear_prepack(extreme, [1, 64])
        product = _onednn_product(extreme, packed, torch.ones(2), torch.zeros(2, dtype=torch.int64))
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return bool((product == 64 * 127 * 127).all())


def _onednn_product(
    values: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor
) -> torch.Tensor:
    """Return `values` int8 [n, in] times the packed weight [out, in], scaled per output: float32 [n, out]."""
    # As unsigned numbers around 128: for signed ones and few rows oneDNN falls back to loops 50 times as slow.
    unsigned = values.view(torch.uint8).bitwise_xor(_UNSIGNED_ZERO)
    product: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
        unsigned, 1.0, _UNSIGNED_ZERO, packed, scales, zeros, None, 1.0, 0, torch.float32, *_NO_OPERATION
    )
    return product
