"""What a setting takes at least, from the forecasts that there are: most need no rehearsal of their own."""

from __future__ import annotations

from collections.abc import Sequence

from optune.optim.stash.choose import Choice
from optune.plan.forecasting import Forecast
from optune.plan.settings import KINDS, Current

_OF_STEPPING = ("gradients", "update", "stash")
SURE = 0.95
"""Of what blocks keep, as much is counted: a part of it may be the same for any number of rows."""


class Bounds:
    """Lower bounds for settings of a run that is set as `current` and takes `forecast`; each further one sharpens them.

    - Weights, masters, optimizer state and copies are there whatever is set.
    - Gradients are all there at once where the optimizer steps after backward, where the stash holds them (`decided`:
      what `auto` takes, once known), and where several microbatches add to them one after the other.
    - What blocks keep grows with the rows of a microbatch, and is `inputs` bytes a row at least.
    - A setting that keeps as much or more takes no less than another one, but for what stepping in another way saves:
      the gradients, and what the update makes, at most; of a head that is the embedding too, also what the loss makes.
    """

    def __init__(self, current: Current, forecast: Forecast, inputs: int = 0, decided: Sequence[Choice] = ()) -> None:
        self.stays = forecast.totals["save"]
        stepping = forecast.moments["step"]
        self._gradients = stepping.get("gradients", 0) if current.step == "after_backward" else 0
        # Of a head that is the embedding too, the gradient may be made when the loss is over.
        saving = (*_OF_STEPPING, "loss") if current.trains_shared_head else _OF_STEPPING
        self._saved = sum(max(parts.get(part, 0) for parts in forecast.moments.values()) for part in saving)
        self._current, self._inputs, self._decided = current, inputs, decided
        self._kept: dict[str, float] = {}
        self._known: list[tuple[Current, int]] = []
        self.learn(current, forecast)

    def learn(self, current: Current, forecast: Forecast) -> None:
        """Takes in what the setting `current` was found to take."""
        self._known.append((current, forecast.peak))
        if current.accumulation == "depth_first":
            kept = forecast.moments["forward"].get("activations", 0) / current.batch_size
            self._kept[current.checkpointing] = max(SURE * kept, self._kept.get(current.checkpointing, 0.0))

    def least(self, current: Current) -> int:
        """Bytes that the setting `current` takes at least."""
        held = self._gradients if self._carries_gradients(current) else 0  # those of the microbatches before
        if current.accumulation == "depth_first":
            kept = max(self._inputs, self._kept.get(current.checkpointing, 0.0)) * current.batch_size
        else:
            kept = self._inputs * current.batch_size * current.microbatches
        at_end = self._gradients if current.step == "after_backward" or self._stash_of(current) == "hold" else 0
        like = [peak - self._saved for known, peak in self._known if _keeps_as_much(current, known)]
        return int(max(self.stays + max(at_end, held + kept), *like, 0))

    def is_idle(self, current: Current) -> bool:
        """Whether `current` steps in another way than the run, which saves nothing: all gradients are there anyway."""
        ways = {(each.step, each.stash) for each in (current, self._current)}
        return len(ways) > 1 and self._carries_gradients(current)

    def _carries_gradients(self, current: Current) -> bool:
        """Whether the gradients of one microbatch are there, all of them, when the next one is run."""
        is_in_turn = current.accumulation == "depth_first" and current.microbatches > 1
        return is_in_turn and self._stash_of(current) in ("none", "hold", "two_pass")

    def _stash_of(self, current: Current) -> str:
        """How gradients wait: `none` where they do not wait for a norm, `unknown` where that is still to be decided."""
        if current.step != "in_backward" or not current.clips:
            return "none"
        if current.stash != "auto":
            return current.stash
        return self._decided[0].policy if self._decided else "unknown"


def _keeps_as_much(one: Current, other: Current) -> bool:
    """Whether blocks keep as much or more with `one` as with `other`: breadth first they keep their inputs alone, but
    those of all microbatches."""
    is_same = one.accumulation == other.accumulation and KINDS.index(one.checkpointing) <= KINDS.index(
        other.checkpointing
    )
    is_like = other.accumulation == "depth_first" and other.checkpointing == KINDS[-1]
    return one.batch_size >= other.batch_size and (is_same or is_like)
