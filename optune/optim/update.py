"""The arithmetic of an update, shared by all modes: measure gradients, clip, step a part, free its gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from optune.optim.buckets import Bucket, Entry
from optune.optim.kinds import local_part
from optune.optim.norms import clip_factor, combine_norms, combine_sharded_norms, parameter_norms, share
from optune.optim.rounding import STEP_KEY, fill, settle
from optune.optim.subset import slice_groups, step_slices
from optune.shards import is_sharded


class Update:
    """What one step does to the weights, part by part.

    In all modes the same calls in the same arithmetic: only their moment differs. All of it is done without autograd.
    """

    def __init__(self, optimizer: Optimizer, entries: Sequence[Entry], max_grad_norm: float | None) -> None:
        self.optimizer = optimizer
        self.entries = list(entries)
        self.max_grad_norm = max_grad_norm
        self._norms: list[Tensor | None] = [None] * len(self.entries)
        weights = [entry.weight for entry in self.entries]
        self._shares = [share(weight) for weight in weights] if any(map(is_sharded, weights)) else None

    def prepare(self, name: str, entries: Sequence[Entry]) -> Bucket:
        """A part that can be stepped on its own."""
        return Bucket(name, list(entries), slice_groups(self.optimizer, [entry.held for entry in entries]))

    def measure(self, entries: Sequence[Entry]) -> None:
        """Takes the norms of the gradients that are there."""
        present = [(entry, entry.weight.grad) for entry in entries]
        gradients = [(entry, gradient) for entry, gradient in present if gradient is not None]
        norms = parameter_norms([gradient for _, gradient in gradients])
        for (entry, _), norm in zip(gradients, norms, strict=True):
            self._norms[entry.index] = norm

    def measure_made(self, entry: Entry, gradient: Tensor) -> None:
        """Takes the norm of a gradient that is not in `.grad`."""
        (self._norms[entry.index],) = parameter_norms([gradient])

    def record_norm(self, entry: Entry, norm: Tensor) -> None:
        """Takes the norm of a gradient that was never made."""
        self._norms[entry.index] = norm

    def take_norm(self) -> float:
        """The norm over everything measured since the last call. With sharded gradients all ranks must call it."""
        if self._shares is None:
            norm = combine_norms(self._norms)
        else:
            norm = combine_sharded_norms(self._norms, self._shares, self.entries[0].weight.device)
        self.forget_norms()
        return norm

    def forget_norms(self) -> None:
        """Forgets what was measured in a step that was given up."""
        self._norms = [None] * len(self.entries)

    def clip_factor(self, grad_norm: float) -> float:
        return clip_factor(grad_norm, self.max_grad_norm)

    @torch.no_grad()
    def step(self, bucket: Bucket, factor: float) -> None:
        """Steps the optimizer on the gradients in `bucket` and frees them.

        A parameter whose gradient is None is left alone, weight decay and momentum included, as optimizers do it.
        """
        for entry in bucket.entries:
            # One by one, so that a bucket's bf16 gradients and their fp32 copies do not all live together.
            if not entry.is_own and entry.weight.grad is not None:
                entry.held.grad = entry.weight.grad.float()
                entry.weight.grad = None
        present = [entry for entry in bucket.entries if entry.held.grad is not None]
        if not present:
            return
        if factor != 1.0:
            gradients = [entry.held.grad for entry in present if entry.held.grad is not None]
            torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]
        rounded = [entry for entry in present if entry.is_rounded]
        for entry in rounded:
            fill(entry.held, entry.weight)
        step_slices(self.optimizer, bucket.slices)
        self.rewrite_weights(present)
        self.drop(present)
        for entry in rounded:
            settle(entry.held, entry.weight, self.optimizer.param_groups[0][STEP_KEY])

    def count_step(self) -> None:
        """Called once when a step is over, a skipped one too: random numbers of the next one are others."""
        for group in self.optimizer.param_groups:
            if STEP_KEY in group:
                group[STEP_KEY] += 1

    @torch.no_grad()
    def rewrite_weights(self, entries: Sequence[Entry]) -> None:
        """Sets working weights to their masters, rounded."""
        copies = [entry for entry in entries if entry.has_master]
        if copies:
            weights = [local_part(entry.weight) for entry in copies]
            masters = [local_part(entry.held) for entry in copies]
            torch._foreach_copy_(weights, masters)  # pyright: ignore[reportPrivateImportUsage]

    def drop(self, entries: Sequence[Entry]) -> None:
        """Frees gradients."""
        for entry in entries:
            entry.weight.grad = None
            entry.held.grad = None
