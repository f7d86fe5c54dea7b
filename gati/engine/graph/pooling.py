"""Adaptive pooling written with operators that every exporter and runtime supports.

ONNX has no adaptive pooling. If the output size divides the size of the feature map, it equals plain pooling.
Otherwise its cells overlap, and rows and columns are pooled one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.export import ExportedProgram

_aten = torch.ops.aten


def without_adaptive_pooling(program: ExportedProgram) -> ExportedProgram:
    """The same program with 2D adaptive pooling decomposed."""
    written_out = {
        _aten.adaptive_avg_pool2d.default: average_pool,
        _aten.adaptive_max_pool2d.default: maximum_pool,
    }
    if not any(node.target in written_out for node in program.graph.nodes):
        return program
    decomposed: ExportedProgram = program.run_decompositions(written_out)
    return decomposed


def average_pool(x: Tensor, output_size: Sequence[int]) -> Tensor:
    """Average over each cell of a grid: [..., H, W] -> [..., *output_size]."""
    height, width = x.shape[-2:]
    rows, columns = output_size
    if height % rows == 0 and width % columns == 0:
        window = [height // rows, width // columns]
        pooled: Tensor = _aten.avg_pool2d.default(x, window, window)
        return pooled
    x = torch.cat([x[..., cell, :].mean(-2, keepdim=True) for cell in _cells(height, rows)], dim=-2)
    return torch.cat([x[..., cell].mean(-1, keepdim=True) for cell in _cells(width, columns)], dim=-1)


def maximum_pool(x: Tensor, output_size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Maximum of each cell, and its index, which is 0 unless `output_size` divides the size of the map."""
    height, width = x.shape[-2:]
    rows, columns = output_size
    if height % rows == 0 and width % columns == 0:
        window = [height // rows, width // columns]
        pooled: tuple[Tensor, Tensor] = _aten.max_pool2d_with_indices.default(x, window, window)
        return pooled
    x = torch.cat([x[..., cell, :].amax(-2, keepdim=True) for cell in _cells(height, rows)], dim=-2)
    x = torch.cat([x[..., cell].amax(-1, keepdim=True) for cell in _cells(width, columns)], dim=-1)
    return x, torch.zeros_like(x, dtype=torch.int64)


def _cells(size: int, count: int) -> list[slice]:
    """PyTorch's cells: from floor(i * size / count) up to ceil((i + 1) * size / count)."""
    return [slice(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]
