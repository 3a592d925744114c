"""The immediate stepper: each weight is updated in its own backward, before the gradient flows on.

In the backward of every function that has a parameter: (1) the parameter's gradient is taken from the saved input at
the old weight, (2) it is reduced over the data-parallel ranks, (3) the optimizer updates that parameter alone, (4)
the gradient of the function's input is taken with the **new** weight. It is another algorithm than backpropagation,
not another order of it: `docs/immediate.md` says what is known about it.

- `local` (to train with): the input's gradient is the function's vector-Jacobian product at the saved input and the new
  weight, with the same incoming gradient. A linear layer costs the three matrix products that it always costs.
- `exact` (reference, quadratic in depth): the gradient of each parameter is taken with everything downstream updated.

Rules, for any `nn.Module`:
- A *layer* is one torch function that gets a parameter, together with arithmetic on parameters alone that feeds it
  (`weight.t()`, `1 + weight`, casts, weight norm, `W + B @ A`). Parameters of one layer are updated together.
- A parameter with several uses (tied embeddings) sums their gradients and is updated after the last of them in
  backward; its other uses pass on gradients taken with the old value.
- A layer for which there is no closed form (see `immediate_match.py`), or under autocast, is evaluated again, once
  for its parameters and once for its inputs.
- What the mode cannot see is refused before a weight changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from optune.errors import ConfigError, TrainingError
from optune.optim.buckets import Bucket, Entry, make_entries
from optune.optim.immediate_exact import ExactSweep
from optune.optim.immediate_local import LocalSweep
from optune.optim.immediate_parts import Slot, uncompiled
from optune.optim.immediate_refuse import find_constants, refuse_model, refuse_unfit
from optune.optim.norms import parameter_norms
from optune.optim.stepper import SkipCounter, StepStats
from optune.optim.subset import check_no_closure, check_subset_step
from optune.optim.update import Update

SWEEPS = {"local": LocalSweep, "exact": ExactSweep}


class ImmediateStepper:
    """Steps `optimizer` on each parameter of `model` inside backward. See the module for the rules.

    - `max_grad_norm` must be None: raises `ConfigError`, because the global norm is known only after the last update.
    - `max_parameter_grad_norm`: each parameter's gradient is scaled down to this L2 norm; None is off.
    - `variant`: `local` or `exact`.
    - `reduce`: applied to each gradient before its update, for example the mean over ranks (in place or not). It is
      called in the order of backward, the same on all ranks as long as they run the same functions.

    One microbatch a step, with one `loss.backward()` in it. A gradient that is not finite ends the run with
    `TrainingError`: on CPU before that parameter changes, elsewhere in `finish()`. Parameters further up have been
    updated by then, so the model in memory is not to be saved; the last checkpoint is whole.
    """

    passes = 1
    frees_gradients = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        max_grad_norm: float | None = None,
        max_parameter_grad_norm: float | None = None,
        variant: Literal["local", "exact"] = "local",
        reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        _check_settings(max_grad_norm, max_parameter_grad_norm, variant)
        check_no_closure(optimizer)
        check_subset_step(optimizer)
        self._model = model
        self._variant = variant
        self._reduce = reduce
        self._max_norm = max_parameter_grad_norm
        self.skips = SkipCounter(1)  # A step that cannot be held back ends the run.
        self._entries = make_entries(model, optimizer)
        self._update = Update(optimizer, self._entries, None)
        self._parts: dict[str, tuple[Entry, Bucket]] = {
            entry.name: (entry, self._update.prepare(entry.name, [entry])) for entry in self._entries
        }
        refuse_model(model)
        refuse_unfit(self._make_slots())
        self._begin_step()

    def _begin_step(self) -> None:
        self._entered = self._stepped = False
        self._smallest_factor: float | Tensor = 1.0
        for entry in self._entries:
            entry.weight.grad = None

    def _make_slots(self) -> list[Slot]:
        return [Slot(entry.name, entry.weight) for entry in self._entries if entry.weight.requires_grad]

    @contextmanager
    def microbatch(self, is_last: bool, pass_index: int = 0) -> Iterator[None]:
        """Stands around the forward pass and `loss.backward()`, which updates the weights."""
        if not is_last or self._entered:
            raise ConfigError(
                "optimizer_step=immediate updates every weight in the first backward of a step, before the other "
                "microbatches are seen",
                where="gradient_accumulation_steps",
                hint="use gradient_accumulation_steps=1 with a larger batch_size, or optimizer_step=in_backward",
            )
        self._entered = True
        slots = self._make_slots()
        refuse_unfit(slots)
        try:
            constants = find_constants(self._model, slots)
            with uncompiled(), SWEEPS[self._variant](slots, self._apply, constants) as sweep:
                yield
            self._stepped = sweep.is_done
            self._refuse_stray_gradients()
        except BaseException:
            self._begin_step()
            raise

    @torch.no_grad()
    def _apply(self, ready: list[tuple[Slot, Tensor]]) -> None:
        """Reduces, measures and clips each gradient, and updates its parameter."""
        with torch.compiler.set_stance("default"):  # optimizers may be compiled; only the model must not be
            self._apply_each(ready)

    def _apply_each(self, ready: list[tuple[Slot, Tensor]]) -> None:
        for slot, gradient in ready:
            entry, part = self._parts[slot.name]
            entry.weight.grad = gradient if self._reduce is None else self._reduce(gradient)
            norm = _measure(entry.weight.grad)
            self._update.record_norm(entry, norm)
            if norm.device.type == "cpu" and not math.isfinite(norm):
                raise _not_finite(f"the gradient of {entry.name} has norm {norm.item()}")
            if self._max_norm is not None:
                factor = torch.clamp(self._max_norm / (norm + 1e-6), max=1.0)
                entry.weight.grad.mul_(factor)
                self._smallest_factor = torch.minimum(factor, torch.as_tensor(self._smallest_factor).to(factor))
            self._update.step(part, 1.0)

    def _refuse_stray_gradients(self) -> None:
        stray = [entry.name for entry in self._entries if entry.weight.grad is not None]
        if stray:
            raise TrainingError(
                f"immediate: {stray[0]} got a gradient that the mode did not see and could not use in time",
                where="optimizer_step",
                hint="use optimizer_step: in_backward with this model",
            )

    def finish(self) -> StepStats:
        """The norm over all gradients, each as it was when its parameter was updated, before clipping. `clip_factor` is
        the smallest factor that a parameter's gradient was scaled by."""
        if not self._stepped:
            raise TrainingError(
                "immediate: no backward ran inside the microbatch, so nothing was updated",
                where="optimizer_step",
                hint="call loss.backward() inside `with stepper.microbatch(True)`",
            )
        grad_norm, factor = self._update.take_norm(), float(self._smallest_factor)
        self._begin_step()
        self._update.count_step()
        if not math.isfinite(grad_norm):
            raise _not_finite(f"the gradient norm is {grad_norm}")
        return StepStats(grad_norm, factor)

    def describe(self) -> str:
        clipping = "no clipping" if self._max_norm is None else f"each gradient clipped to norm {self._max_norm:g}"
        when = "in its own backward, before the gradient flows on"
        if self._variant == "exact":
            when += " and with everything downstream computed anew (reference: quadratic in depth)"
        return f"immediate, {self._variant}: each of {len(self._entries)} parameters is updated {when}; {clipping}"

    def close(self) -> None:
        """Frees what an unfinished step left behind; the model carries no hooks."""
        self._begin_step()


def _measure(gradient: Tensor) -> Tensor:
    # torch's fp32 norm takes no float64.
    return parameter_norms([gradient.float() if gradient.dtype is torch.float64 else gradient])[0]


def _check_settings(max_grad_norm: float | None, max_parameter_grad_norm: float | None, variant: str) -> None:
    if variant not in SWEEPS:
        raise ConfigError(f"{variant!r} is not one of {', '.join(SWEEPS)}", where="variant")
    if max_grad_norm is not None:
        raise ConfigError(
            f"is {max_grad_norm}, but with optimizer_step=immediate the first weight is updated before the global norm "
            "exists",
            where="max_grad_norm",
            hint="set max_grad_norm=null; max_parameter_grad_norm clips each parameter's gradient by its own norm",
        )
    if max_parameter_grad_norm is not None and not max_parameter_grad_norm > 0:
        raise ConfigError(f"is {max_parameter_grad_norm}; it must be above 0", where="max_parameter_grad_norm")


def _not_finite(what: str) -> TrainingError:
    return TrainingError(
        f"immediate: {what}; other weights of this step are already updated, so it cannot be skipped",
        where="optimizer_step",
        hint="what was saved before is intact; look for NaN or inf in the weights and rows, lower optimizer.lr, or use "
        "optimizer_step=in_backward, which skips such a step",
    )
