"""A small transformer-like model, rows for it, and a training loop with the two calls of a stepper.

Nothing here is the code under test; `run` is given what to test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, INNER, VOCABULARY, LENGTH = 16, 40, 48, 6


class Block(nn.Module):
    """Causal attention with q, k, v of one input, and a gated feed-forward layer."""

    def __init__(
        self, width: int = WIDTH, inner: int = INNER, dropout: float = 0.0, keys: int | None = None, bias: bool = True
    ) -> None:
        super().__init__()
        keys = keys or width // 2
        self.attention_norm = nn.RMSNorm(width)
        # No bias on the keys: softmax takes it away again, so its gradient is rounding alone, which Adam blows up.
        self.q = nn.Linear(width, width, bias=bias)
        self.k = nn.Linear(width, keys, bias=False)
        self.v = nn.Linear(width, keys, bias=bias)
        self.o = nn.Linear(keys, width, bias=False)
        self.feed_norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        self.dropout = dropout

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.attention_norm(hidden)
        query = self.q(normed)[..., : self.k.out_features]
        mixed = F.scaled_dot_product_attention(query, self.k(normed), self.v(normed), is_causal=True)
        hidden = hidden + F.dropout(self.o(mixed), self.dropout, self.training)
        normed = self.feed_norm(hidden)
        return hidden + self.down(F.silu(self.gate(normed)) * self.up(normed))


class SmallModel(nn.Module):
    """Embedding, blocks, norm, head. `unused` is a block's parameter that only long rows use."""

    def __init__(
        self, *, blocks: int = 3, tied: bool = False, frozen: Sequence[str] = (), dropout: float = 0.0, seed: int = 0
    ) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
            self.blocks = nn.ModuleList([Block(dropout=dropout) for _ in range(blocks)])
            self.norm = nn.RMSNorm(WIDTH)
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
            self.long_rows = nn.Parameter(torch.randn(WIDTH) * 0.1)
        if tied:
            self.head.weight = self.embed.weight
        for name in frozen:
            self.get_submodule(name).requires_grad_(False)
        self.activation_checkpointing = "none"

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        if tokens.shape[1] > LENGTH:
            hidden = hidden + self.long_rows
        for block in self.blocks:
            if self.activation_checkpointing == "block":
                hidden = checkpoint(block, hidden, use_reentrant=False)
            else:
                hidden = block(hidden)
        return self.head(self.norm(hidden))


def make_rows(steps: int, microbatches: Sequence[int], *, length: int = LENGTH, seed: int = 1) -> list[list[Tensor]]:
    """Tokens for `steps` steps; step s has `microbatches[s % len]` microbatches of different row counts."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            torch.randint(0, VOCABULARY, (1 + index % 2, length), generator=generator)
            for index in range(microbatches[step % len(microbatches)])
        ]
        for step in range(steps)
    ]


def loss_sum(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


def run(
    model: nn.Module,
    stepper: Any,
    rows: Sequence[Sequence[Tensor]],
    *,
    before_step: Callable[[int], None] = lambda step: None,
    loss: Callable[[nn.Module, Tensor], Tensor] = loss_sum,
    first_step: int = 0,
) -> tuple[list[float], list[Any]]:
    """Losses and stats of each step; dropout's numbers are a function of step and microbatch."""
    losses, stats = [], []
    for step, microbatches in enumerate(rows, start=first_step):
        before_step(step)
        targets = sum(tokens[:, 1:].numel() for tokens in microbatches)
        total = 0.0
        for pass_index in range(stepper.passes):
            total = 0.0
            for index, tokens in enumerate(microbatches):
                torch.manual_seed(1000 * step + index)
                with stepper.microbatch(index == len(microbatches) - 1, pass_index):
                    part = loss(model, tokens) / targets
                    part.backward()
                total += part.item()
        stats.append(stepper.finish())
        losses.append(total)
    return losses, stats


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Every weight and every entry of the optimizer's state, by parameter name."""
    taken: dict[str, Any] = {f"weight {name}": p.detach().clone() for name, p in model.named_parameters()}
    names = {}
    for group in optimizer.param_groups:
        names |= {id(p): name for name, p in zip(group["param_names"], group["params"], strict=True)}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            taken[f"{names[id(parameter)]} {key}"] = plain(value) if isinstance(value, Tensor) else value
    return taken


def plain(tensor: Tensor) -> Tensor:
    return tensor.dequantize().clone() if type(tensor) not in (Tensor, nn.Parameter) else tensor.detach().clone()


def assert_same(left: dict[str, Any], right: dict[str, Any], *, rtol: float = 0.0) -> None:
    """Bitwise with `rtol=0`, else within `rtol` of each tensor's largest element."""
    assert left.keys() == right.keys()
    for key, value in left.items():
        other = right[key]
        if not isinstance(value, Tensor):
            assert value == other, key
        elif rtol == 0:
            assert torch.equal(value, other), f"{key}: differs by {(value - other).abs().max()}"
        else:
            difference = (value.double() - other.double()).abs().max()
            assert difference <= rtol * value.double().abs().max() + 1e-12, f"{key}: differs by {difference}"
