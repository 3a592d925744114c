"""What a large gradient is made of: for a linear layer its inputs and output gradients, for an embedding its rows.

Shapes: T rows (all tokens of the step), I input width, O output width, V vocabulary.
A linear layer's gradient is `dW_OI = dY_TOᵀ X_TI`; from the pair (X, dY) its norm follows without it:
`‖dW‖² = Σ_st (X Xᵀ)_st (dY dYᵀ)_st`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

GRAM_ROWS = 256
"""Rows of the Gram matrices that are alive at once."""


class LinearFactors:
    """The pairs (X, dY) of one linear weight, from all of its uses in a step."""

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []
        self.output_gradients: list[Tensor] = []

    def add(self, input_TI: Tensor, output_gradient_TO: Tensor) -> None:
        self.inputs.append(input_TI)
        self.output_gradients.append(output_gradient_TO)

    @property
    def rows(self) -> int:
        return sum(part.shape[0] for part in self.inputs)

    def shares_inputs(self, other: LinearFactors) -> bool:
        """True when both have the very same inputs (q, k and v of one attention)."""
        return [_location(part) for part in self.inputs] == [_location(part) for part in other.inputs]

    def make(self) -> Tensor:
        """dW_OI in the dtype of the factors."""
        return _join(self.output_gradients).t() @ _join(self.inputs)


class EmbeddingFactors:
    """The rows (token, gradient) of one embedding weight."""

    def __init__(self, vocabulary: int, padding_index: int | None) -> None:
        self.vocabulary = vocabulary
        self.padding_index = -1 if padding_index is None else padding_index
        self.tokens: list[Tensor] = []
        self.output_gradients: list[Tensor] = []

    def add(self, tokens_T: Tensor, output_gradient_TO: Tensor) -> None:
        self.tokens.append(tokens_T)
        self.output_gradients.append(output_gradient_TO)

    @property
    def rows(self) -> int:
        return sum(part.shape[0] for part in self.tokens)

    def norm(self) -> Tensor:
        """The norm of the gradient, fp32: rows of the same token are summed first."""
        tokens_T, gradient_TO = _join(self.tokens), _join(self.output_gradients).float()
        if self.padding_index >= 0:
            gradient_TO = gradient_TO * (tokens_T != self.padding_index).unsqueeze(1)
        distinct, place_T = tokens_T.unique(return_inverse=True)
        summed = gradient_TO.new_zeros(distinct.numel(), gradient_TO.shape[1]).index_add_(0, place_T, gradient_TO)
        return torch.linalg.vector_norm(summed)

    def make(self) -> Tensor:
        """dW_VO in the dtype of the factors, with torch's own kernel."""
        return torch.ops.aten.embedding_dense_backward(
            _join(self.output_gradients), _join(self.tokens), self.vocabulary, self.padding_index, False
        )


def is_gram_cheaper(rows: int, shape: Sequence[int], low_precision: bool) -> bool:
    """True when two Gram matrices cost less than the gradient itself.

    Their upper halves take T²(I+O) operations, dW takes 2·T·I·O. Low precision multiplies about twice as fast on a CPU
    with bf16 instructions, while Gram matrices are taken in fp32.
    """
    outputs, inputs = shape
    return rows * (inputs + outputs) * (2 if low_precision else 1) < 2 * inputs * outputs


def gram_norms(group: Sequence[LinearFactors]) -> list[Tensor]:
    """The norm of each gradient of a group that shares its inputs, fp32. The inputs' Gram matrix is taken once."""
    input_TI = _join(group[0].inputs)
    gradients = [_join(factors.output_gradients) for factors in group]
    squares = [torch.zeros((), dtype=torch.float32, device=input_TI.device) for _ in group]
    for start in range(0, input_TI.shape[0], GRAM_ROWS):
        input_gram = _gram(input_TI, start)
        for square, gradient_TO in zip(squares, gradients, strict=True):
            products = _gram(gradient_TO, start).mul_(input_gram)
            # The matrices are symmetric: what lies right of the square on the diagonal counts for its mirror image.
            square += products[:, :GRAM_ROWS].sum() + 2 * products[:, GRAM_ROWS:].sum()
    return [square.clamp(min=0).sqrt() for square in squares]


def _gram(rows_TD: Tensor, start: int) -> Tensor:
    """Rows `start` to `start + GRAM_ROWS` of the Gram matrix, from column `start` on, in fp32."""
    rows, columns = rows_TD[start : start + GRAM_ROWS], rows_TD[start:]
    if rows_TD.device.type == "cuda" and rows_TD.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(rows, columns.t(), out_dtype=torch.float32)
    return rows.float() @ columns.float().t()


def _join(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _location(tensor: Tensor) -> tuple[int, ...]:
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset()), tensor.numel(), *tensor.stride()
