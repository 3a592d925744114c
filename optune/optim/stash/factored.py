"""Large gradients wait as what they are made of, where that is smaller."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from optune.errors import ConfigError
from optune.optim.buckets import Bucket, Entry
from optune.optim.kinds import is_compiled
from optune.optim.stash.base import Stash
from optune.optim.stash.factors import EmbeddingFactors, LinearFactors, gram_norms, is_gram_cheaper
from optune.optim.stepper import SkipCounter
from optune.optim.update import Update


@dataclass(eq=False)
class Layer:
    """A module whose weight's gradient may wait in factors.

    `group_width` is the sum of the output widths of all layers that were seen to share this layer's input: the shared
    input is held once, so they decide together whether their pairs are smaller than their gradients.
    """

    module: nn.Module
    entry: Entry
    factors: LinearFactors | EmbeddingFactors
    leader: Layer | None = None
    group_width: int = 0

    def new_factors(self) -> LinearFactors | EmbeddingFactors:
        if isinstance(self.module, nn.Embedding):
            return EmbeddingFactors(self.module.num_embeddings, self.module.padding_idx)
        return LinearFactors()

    def are_factors_smaller(self, rows: int) -> bool:
        """True while `rows` tokens of factors take less memory than the gradient, the shared input counted once."""
        if isinstance(self.module, nn.Embedding):
            return rows < self.module.num_embeddings
        inputs, outputs = self.entry.weight.shape[1], (self.leader or self).group_width
        return rows * (inputs + outputs) < inputs * outputs


class FactoredStash(Stash):
    """Equal to the update after backward to rounding; one process only.

    While a microbatch runs, `forward` of each `nn.Linear` and `nn.Embedding` that owns its weight alone goes through an
    autograd function that hands (X, dY) over instead of making dW. Factors of several microbatches are put one after
    the other; as soon as they would take more memory than dW, dW is made, and grows like any gradient. Norms, biases,
    tied weights and weights used outside their module keep their real gradient.

    In `finish()` gradients are made and stepped in small parts, see `make_parts`.
    """

    name = "factored"

    def __init__(
        self, update: Update, buckets: Sequence[Bucket], skips: SkipCounter, reason: str, model: nn.Module
    ) -> None:
        refuse_compiled(model)
        super().__init__(update, buckets, skips, reason)
        self._layers = find_layers(model, update.entries)
        self._by_entry = {layer.entry.index: layer for layer in self._layers}
        self._parts = make_parts(update, buckets)
        self._last: tuple[ref[Tensor], int, Layer] | None = None

    @contextmanager
    def watch_forward(self) -> Iterator[None]:
        try:
            for layer in self._layers:
                # An instance attribute goes before the class's method; it stays only while a microbatch runs, so that
                # copies of the model never carry it.
                layer.module.forward = partial(self._forward, layer)
            yield
        finally:
            for layer in self._layers:
                vars(layer.module).pop("forward", None)
            self._last = None

    def take(self, bucket: Bucket) -> None:
        layers = [self._by_entry[entry.index] for entry in bucket.entries if entry.index in self._by_entry]
        waiting = [layer for layer in layers if layer.factors.rows]
        for layer in waiting:
            if layer.entry.weight.grad is not None:  # also used outside its module: only the sum has a norm
                self._make_gradient(layer)
        self.update.measure(bucket.entries)
        self._measure_factors([layer for layer in waiting if layer.factors.rows])

    def parts(self) -> Iterable[Bucket]:
        return self._parts

    def restore(self, part: Bucket) -> None:
        for entry in part.entries:
            layer = self._by_entry.get(entry.index)
            if layer is not None and layer.factors.rows:
                self._make_gradient(layer)

    def drop(self) -> None:
        super().drop()
        for layer in self._layers:
            layer.factors = layer.new_factors()

    def _forward(self, layer: Layer, input: Tensor) -> Tensor:
        module, weight = layer.module, layer.entry.weight
        if not torch.is_grad_enabled() or torch.is_autocast_enabled(weight.device.type):
            return type(module).forward(module, input)
        if isinstance(module, nn.Embedding):
            if input.numel() >= module.num_embeddings:
                return type(module).forward(module, input)
            return _FactoredEmbedding.apply(input, weight, module.padding_idx, partial(self._record, layer))
        self._note_shared_input(layer, input)
        # Even with its input for nothing, a layer's dY is the larger one; torch's own path is then faster. The choice
        # depends on shapes alone, so that a checkpointed block makes it twice in the same way.
        if input.numel() >= weight.shape[1] ** 2:
            return type(module).forward(module, input)
        return _FactoredLinear.apply(input, weight, module.bias, partial(self._record, layer))

    def _note_shared_input(self, layer: Layer, input: Tensor) -> None:
        if self._last is not None and is_whole(input):
            last_input, version, last_layer = self._last
            if last_input() is input and version == input._version and layer.leader is None:
                leader = last_layer.leader or last_layer
                if leader is not layer:
                    layer.leader = leader
                    leader.group_width += layer.group_width
        self._last = (ref(input), input._version, layer)

    def _record(self, layer: Layer, input: Tensor, output_gradient: Tensor) -> None:
        """Called in backward with the rows of one use of the layer."""
        layer.factors.add(_own_storage(input), _own_storage(output_gradient))
        if layer.entry.weight.grad is not None or not layer.are_factors_smaller(layer.factors.rows):
            self._make_gradient(layer)

    def _make_gradient(self, layer: Layer) -> None:
        """Turns factors into (a part of) the real gradient."""
        gradient = layer.factors.make()
        layer.factors = layer.new_factors()
        weight = layer.entry.weight
        if weight.grad is None:
            weight.grad = gradient
        else:
            weight.grad += gradient

    def _measure_factors(self, layers: Sequence[Layer]) -> None:
        groups: list[list[Layer]] = []
        for layer in layers:
            factors, entry = layer.factors, layer.entry
            if isinstance(factors, EmbeddingFactors):
                self.update.record_norm(entry, factors.norm())
            elif not is_gram_cheaper(factors.rows, entry.weight.shape, entry.weight.element_size() < 4):
                self.update.measure_made(entry, factors.make())
            else:
                same = (g for g in groups if factors.shares_inputs(g[0].factors))  # pyright: ignore[reportArgumentType]
                group = next(same, None)
                groups.append([layer]) if group is None else group.append(layer)
        for group in groups:
            norms = gram_norms([layer.factors for layer in group])  # pyright: ignore[reportArgumentType]
            for layer, norm in zip(group, norms, strict=True):
                self.update.record_norm(layer.entry, norm)


class _FactoredLinear(torch.autograd.Function):
    """`F.linear` whose weight gradient is handed over as (X, dY).

    The weight is an input although its gradient is always None: so autograd tells, by the weight's hook, when all uses
    of the weight have run, these and others.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, record: Any) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.record = record
        return F.linear(input, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, output_gradient: Tensor
    ) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        gradient_TO = output_gradient.reshape(-1, output_gradient.shape[-1])
        input_gradient = output_gradient @ weight if ctx.needs_input_grad[0] else None
        bias_gradient = gradient_TO.sum(0) if ctx.needs_input_grad[2] else None
        if ctx.needs_input_grad[1]:
            ctx.record(input.detach().reshape(-1, input.shape[-1]), gradient_TO)
        return input_gradient, None, bias_gradient, None


class _FactoredEmbedding(torch.autograd.Function):
    """`F.embedding` whose weight gradient is handed over as rows."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, padding_index: int | None, record: Any) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.record = record
        return F.embedding(tokens, weight, padding_index)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, output_gradient: Tensor
    ) -> tuple[None, ...]:
        (tokens,) = ctx.saved_tensors
        ctx.record(tokens.reshape(-1), output_gradient.reshape(-1, output_gradient.shape[-1]))
        return None, None, None, None


def refuse_compiled(model: nn.Module) -> None:
    """Raises `ConfigError` for a compiled model: nothing in it calls the modules whose inputs are wanted."""
    if has_compiled_part(model):
        raise ConfigError(
            "factored replaces the forward of linear layers, which a compiled block does not call",
            where="gradient_stash",
            hint="use gradient_stash: auto or hold, or compile: false",
        )


def has_compiled_part(model: nn.Module) -> bool:
    """True when `model` or a part of it was compiled in place or wrapped."""
    return any(map(is_compiled, model.modules()))


def find_layers(model: nn.Module, entries: Sequence[Entry]) -> list[Layer]:
    """The linear and embedding modules of `model` that own a trained weight alone and use torch's own forward."""
    by_weight = {id(entry.weight): entry for entry in entries}
    owners: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(module)
    layers = []
    for weight_id, modules in owners.items():
        module, entry = modules[0], by_weight.get(weight_id)
        if entry is None or len(modules) > 1 or module._parameters.get("weight") is not entry.weight:
            continue
        if "forward" in vars(module):
            continue
        plain_linear = type(module).forward is nn.Linear.forward
        plain_embedding = (
            type(module).forward is nn.Embedding.forward
            and module.max_norm is None
            and not module.scale_grad_by_freq
            and not module.sparse
        )
        if plain_linear or plain_embedding:
            layer = Layer(module, entry, LinearFactors(), group_width=entry.weight.shape[0])
            layer.factors = layer.new_factors()
            layers.append(layer)
    return layers


def make_parts(update: Update, buckets: Sequence[Bucket]) -> list[Bucket]:
    """What is stepped together: smallest first, and no more at once than half the largest parameter of a block.

    The first parts are made while nearly all factors wait, the largest parameters, one by one, when most are gone.
    """
    in_blocks = [entry.weight.numel() for bucket in buckets if len(bucket.entries) > 1 for entry in bucket.entries]
    limit = max(in_blocks, default=0) // 2
    parts: list[list[Entry]] = [[]]
    size = 0
    for entry in sorted(update.entries, key=lambda entry: entry.weight.numel()):
        if size + entry.weight.numel() > limit and parts[-1]:
            parts.append([])
            size = 0
        parts[-1].append(entry)
        size += entry.weight.numel()
    return [update.prepare(f"part {index}", part) for index, part in enumerate(parts)]


def is_whole(tensor: Tensor) -> bool:
    """True when the tensor is dense and its storage holds nothing else."""
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes


def _own_storage(tensor: Tensor) -> Tensor:
    """The tensor, copied when it would keep alive a storage larger than itself, or is expanded from a smaller one."""
    return tensor if is_whole(tensor) else tensor.clone(memory_format=torch.contiguous_format)
