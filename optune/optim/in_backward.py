"""Stepping inside the backward pass: a bucket's gradients are used, or stashed, as soon as they are complete."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import PurePath

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from optune.errors import ConfigError, TrainingError
from optune.optim.buckets import Bucket, Entry
from optune.optim.stash.base import Stash
from optune.optim.stepper import StepStats


class InBackwardStepper:
    """Watches gradients complete and hands whole buckets to a stash, which steps them at once or later.

    In microbatches before the last, gradients only accumulate. In the last one, a bucket is ready when all of its
    parameters have fired; what is not ready when the backward is over (a parameter that the last microbatch did not
    use) is handed over in `finish()`. Parameters without a gradient are left alone.

    Hooks sit on the parameters, so the stepper is made after everything that replaces parameters.
    """

    def __init__(self, model: nn.Module, buckets: Sequence[Bucket], stash: Stash) -> None:
        self._buckets = list(buckets)
        self._stash = stash
        self.skips = stash.skips
        self._is_last = False
        self._started = False
        # Seen once is enough: whether checkpoints are reentrant does not change between steps.
        self._must_check_frames = True
        self._handles: list[RemovableHandle] = [
            entry.weight.register_post_accumulate_grad_hook(partial(self._gradient_arrived, entry))
            for bucket in self._buckets
            for entry in bucket.entries
        ]

    @property
    def passes(self) -> int:
        return self._stash.passes

    @property
    def frees_gradients(self) -> bool:
        return self._stash.frees_gradients

    @contextmanager
    def microbatch(self, is_last: bool, pass_index: int = 0) -> Iterator[None]:
        self._begin_pass(pass_index)
        self._is_last = is_last
        try:
            with self._stash.watch_forward():
                yield
        except BaseException:
            self._abandon()
            raise
        finally:
            self._is_last = False

    def finish(self) -> StepStats:
        try:
            self._hand_over_rest()
            return self._stash.finish()
        finally:
            self._abandon()
            self._stash.update.count_step()

    def describe(self) -> str:
        largest = max(bucket.nbytes for bucket in self._buckets)
        return (
            f"in backward: {len(self._buckets)} buckets, the largest with {largest / 2**20:.1f} MiB of gradients; "
            f"{self._stash.describe()}"
        )

    def close(self) -> None:
        self._abandon()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _begin_pass(self, pass_index: int) -> None:
        if pass_index != self._stash.pass_index:
            self._hand_over_rest()
            self._stash.begin_pass(pass_index)
            self._reset()

    def _gradient_arrived(self, entry: Entry, _: nn.Parameter) -> None:
        bucket = entry.bucket
        if bucket.ready:
            raise TrainingError(
                f"a gradient for {entry.name} arrived after its bucket ({bucket.name}) was complete",
                where="optimizer_step",
                hint="in_backward needs each gradient whole in the last microbatch: one backward pass, and activation "
                "checkpointing that is not reentrant; optimizer_step: after_backward has no such need",
            )
        if self._must_check_frames:
            refuse_reentrant_checkpoint()
        if not self._is_last or entry.fired:
            return
        if not self._started:
            self._started = True
            self._stash.backward_started()
        entry.fired = True
        bucket.pending -= 1
        if not bucket.pending:
            bucket.ready = True
            self._stash.take(bucket)

    def _hand_over_rest(self) -> None:
        for bucket in self._buckets:
            if not bucket.ready:
                bucket.ready = True
                self._stash.take(bucket)
        self._must_check_frames = False

    def _reset(self) -> None:
        self._started = False
        for bucket in self._buckets:
            bucket.reset()

    def _abandon(self) -> None:
        """Forgets what the step has gathered; nothing to forget after a whole step."""
        self._stash.drop()
        self._reset()


def refuse_plain_ddp(model: nn.Module) -> None:
    """Raises `ConfigError` for DDP: it averages what is a sum here, and after hooks have used it, so that ranks drift
    apart silently."""
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ConfigError(
            "DistributedDataParallel averages the gradients of its ranks, after in_backward and immediate have used "
            "them: ranks would drift apart",
            where="optimizer_step",
            hint="hand over the plain model and replicate it by parallel.replicate (`distributed.spread`)",
        )


def refuse_reentrant_checkpoint() -> None:
    """Raises `ConfigError` when called in a backward pass that a reentrant checkpoint runs inside another one: there
    gradients may be partial when they fire."""
    frame = sys._getframe()
    while frame is not None:
        name = PurePath(frame.f_code.co_filename)
        if frame.f_code.co_name == "backward" and name.parts[-2:] == ("utils", "checkpoint.py"):
            raise ConfigError(
                "in_backward needs activation checkpointing that is not reentrant; here gradients may arrive in parts",
                where="optimizer_step",
                hint="pass use_reentrant=False to torch.utils.checkpoint",
            )
        frame = frame.f_back
