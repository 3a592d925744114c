"""The values that travel from the data layer and the model through the training step to the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""What the texts of a config mean."""


@runtime_checkable
class PackedWeight(Protocol):
    """A module that stands where a parameter would and holds its values in a form of its own."""

    @property
    def shape(self) -> torch.Size: ...
    @property
    def format(self) -> str:
        """What the form is called."""
        ...

    def pack(self, values: Tensor) -> None:
        """Takes the values of the whole tensor, in any floating dtype."""
        ...


IGNORE = -100
"""The label of a position that is not trained."""


def split_packed(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, PackedWeight]]:
    """The parameters of `model` that stand for themselves, and the packed weights, whose parts the other ones are."""
    packed = {name: module for name, module in model.named_modules() if isinstance(module, PackedWeight)}
    own = {name: each for name, each in model.named_parameters() if name.rpartition(".")[0] not in packed}
    return own, packed


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """How many numbers are trained, and how many there are; a packed weight counts what it stands for."""
    own, packed = split_packed(model)
    trained = sum(each.numel() for each in own.values() if each.requires_grad)
    return trained, sum(each.shape.numel() for each in (*own.values(), *packed.values()))


@dataclass(frozen=True)
class MicrobatchShape:
    """What memory depends on: `rows` of `length` positions, of which `targets` are trained. `packed`: several rows
    stand in a sequence; `weighted`: targets have weights."""

    rows: int
    length: int
    targets: int
    packed: bool = False
    weighted: bool = False

    @property
    def positions(self) -> int:
        return self.rows * self.length


@dataclass(frozen=True)
class Microbatch:
    """The rows of one forward and backward pass, padded on the right.

    Shapes: B rows (or packs), T positions.
    - `tokens_BT` int64: what the model reads.
    - `labels_BT` int64: the token that position t must predict, that is `tokens_BT[:, t + 1]`, or `IGNORE`. Labels are
      shifted here, once; nothing downstream shifts again.
    - `positions_BT` int64: the position inside the row; restarts at 0 in each row of a pack.
    - `documents_BT` int64 or None: the number of the row inside a pack; None when a sequence is a single row. Positions
      with different numbers never see each other.
    - `weights_BT` float32 or None: the weight of each target; None means 1.
    - `num_tokens`: positions that are not padding.
    - `rows`: `file:line` of each row, for messages.
    """

    tokens_BT: Tensor
    labels_BT: Tensor
    positions_BT: Tensor
    documents_BT: Tensor | None = None
    weights_BT: Tensor | None = None
    num_tokens: int = 0
    rows: tuple[str, ...] = ()

    @property
    def shape(self) -> MicrobatchShape:
        """Its size."""
        rows, length = self.tokens_BT.shape
        targets = int((self.labels_BT != IGNORE).sum())
        return MicrobatchShape(rows, length, targets, self.documents_BT is not None, self.weights_BT is not None)

    def count_targets(self) -> float:
        """The number of targets: labels that count, each by its weight."""
        counted_BT = self.labels_BT != IGNORE
        if self.weights_BT is None:
            return float(counted_BT.sum())
        return float(self.weights_BT.to(torch.float64)[counted_BT].sum())

    def to(self, device: torch.device | str) -> Microbatch:
        """The same microbatch with its tensors on `device`."""

        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=True)

        return replace(
            self,
            tokens_BT=self.tokens_BT.to(device, non_blocking=True),
            labels_BT=self.labels_BT.to(device, non_blocking=True),
            positions_BT=self.positions_BT.to(device, non_blocking=True),
            documents_BT=move(self.documents_BT),
            weights_BT=move(self.weights_BT),
        )


@dataclass
class Later:
    """Where the loss leaves a way to make a gradient, for the end of backward."""

    is_wanted: bool = False
    make: Callable[[], Tensor] | None = None

    def take(self) -> Tensor | None:
        """The gradient, made now; None where nothing was left. What it was made from is let go."""
        make, self.make = self.make, None
        return None if make is None else make()


@dataclass
class SharedHead:
    """The weight of a head as the embedding that shares it hands it on: a gradient that is sent to `weight_VD`, or that
    is left to be made `later`, reaches the embedding's.

    It goes with hidden states, because it belongs to their graph: states that are cut off from it, or come from another
    one, lead to no weight of this one.
    """

    weight_VD: Tensor
    later: Later = field(default_factory=Later)

    @staticmethod
    def of(hidden_BTD: Tensor) -> SharedHead | None:
        """That which goes with `hidden_BTD`."""
        return getattr(hidden_BTD, "shared_head", None)

    def go_with(self, hidden_BTD: Tensor) -> Tensor:
        """`hidden_BTD`, with this."""
        hidden_BTD.shared_head = self  # pyright: ignore[reportAttributeAccessIssue]
        return hidden_BTD
