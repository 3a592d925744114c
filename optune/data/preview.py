"""What the model is fed, told token by token: from the microbatches of a run back to text.

Everything here is read from the very microbatches that a step trains, so what is shown cannot differ from what is
trained. Steps, ranks, microbatches and places are numbered as people and `metrics.jsonl` count them: steps,
microbatches, places and rows from 1, ranks from 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from optune.data.batches import Batches
from optune.data.tokenizer import Tokenizer
from optune.types import IGNORE, Microbatch

_LONGEST_CHARACTER = 4
"""Tokens that one character may be made of: UTF-8 has at most as many bytes."""

HALVES = ("chosen", "rejected")

_COLUMNS = ("ids", "pieces", "labels", "positions", "documents", "weights", "trained", "special", "padding")


@dataclass(frozen=True)
class Unit:
    """A row, or a pack of rows, in its place in a microbatch; the lists have an entry for each position.

    - `step`, `rank`, `microbatch`, `place`: where it is fed.
    - `rows`: `file:line` of each row in it; none where a rank has nothing to train. `numbers`: theirs among the kept
      rows, from 1. `halves`: chosen or rejected for each row, where rows are halves of pairs.
    - `ids`: the tokens, and `pieces`: the text that each adds; joined, the pieces are the decoded text.
    - `labels`: the id that the position has to predict, None where it is not trained.
    - `positions`: inside the row. `documents`: the number of the row inside the pack, or None without packing.
    - `weights`: what the position's label counts, or None where each counts 1.
    - `trained`: whether this token is predicted by the position before it. `special`: whether it is a control token.
      `padding`: whether it stands behind the last row.
    """

    step: int
    rank: int
    microbatch: int
    place: int
    rows: list[str]
    numbers: list[int]
    halves: list[str]
    ids: list[int]
    pieces: list[str]
    labels: list[int | None]
    positions: list[int]
    documents: list[int] | None
    weights: list[float] | None
    trained: list[bool]
    special: list[bool]
    padding: list[bool]

    @property
    def targets(self) -> int:
        return sum(self.trained)

    @property
    def tokens(self) -> int:
        """Positions that are not padding."""
        return len(self.ids) - sum(self.padding)

    def weight(self, index: int) -> float:
        """What the token at `index` counts as a target; 0 where it is none."""
        if not self.trained[index]:
            return 0.0
        return 1.0 if self.weights is None else self.weights[index - 1]

    def split(self) -> list[Unit]:
        """Each of its rows alone, without padding."""
        if self.documents is None:
            stops = [self.tokens] if self.rows else []
        else:
            documents = self.documents
            stops = [len(documents) - documents[::-1].index(number) for number in range(len(self.rows))]
        return [
            self._slice(start, stop, number)
            for number, (start, stop) in enumerate(zip([0, *stops], stops, strict=False))
        ]

    def _slice(self, start: int, stop: int, number: int) -> Unit:
        columns = {name: getattr(self, name) for name in _COLUMNS}
        cut = {name: None if column is None else column[start:stop] for name, column in columns.items()}
        own = {name: getattr(self, name)[number : number + 1] for name in ("rows", "numbers", "halves")}
        return replace(self, **own, **cut)


def show_step(batches: Batches, tokenizer: Tokenizer, step: int) -> Iterator[Unit]:
    """What step number `step` (from 1) feeds: all units of all ranks, microbatch by microbatch."""
    ranks = [
        list(zip(batches.microbatches(step - 1, rank), batches.rows_of(step - 1, rank), strict=True))
        for rank in range(batches.world_size)
    ]
    for number in range(len(ranks[0])):
        for rank, fed in enumerate(ranks):
            microbatch, units = fed[number]
            for place in range(len(microbatch.tokens_BT)):
                indices = [int(row) for row in units[place]] if len(units) else []
                yield _show(batches, tokenizer, microbatch, indices, (step, rank, number + 1, place + 1))


def show_first(batches: Batches, tokenizer: Tokenizer, count: int) -> list[Unit]:
    """The first `count` units in the order in which the first epoch trains them."""
    shown: list[Unit] = []
    for step in range(1, batches.steps_per_epoch + 1):
        for unit in show_step(batches, tokenizer, step):
            if len(shown) == count:
                return shown
            if unit.rows:
                shown.append(unit)
    return shown


def are_pairs(batches: Batches) -> bool:
    """Whether the rows are those of `load_pairs`."""
    return batches.rows.together == 2


def show_row(batches: Batches, tokenizer: Tokenizer, index: int) -> Unit:
    """The kept row number `index` (from 0), without its padding and what shares its pack, as the first epoch feeds it.

    Raises IndexError for a row that no step of the epoch feeds.
    """
    for step in range(batches.steps_per_epoch):
        for rank in range(batches.world_size):
            if any(index in unit for units in batches.rows_of(step, rank) for unit in units):
                shown = [row for unit in show_step(batches, tokenizer, step + 1) for row in unit.split()]
                return next(row for row in shown if row.numbers == [index + 1])
    raise IndexError(index)


def _show(
    batches: Batches, tokenizer: Tokenizer, microbatch: Microbatch, indices: list[int], at: tuple[int, int, int, int]
) -> Unit:
    place = at[-1] - 1
    ids = microbatch.tokens_BT[place].tolist()
    labels = microbatch.labels_BT[place].tolist()
    tokens = sum(int(batches.rows.lengths[index]) for index in indices)
    step, rank, number, _ = at
    return Unit(
        step=step,
        rank=rank,
        microbatch=number,
        place=place + 1,
        rows=[batches.rows[index].where for index in indices],
        numbers=[index + 1 for index in indices],
        halves=[HALVES[index % 2] for index in indices] if are_pairs(batches) else [],
        ids=ids,
        pieces=split_text(tokenizer, ids),
        labels=[None if label == IGNORE else label for label in labels],
        positions=microbatch.positions_BT[place].tolist(),
        documents=_row_of(microbatch.documents_BT, place),
        weights=_row_of(microbatch.weights_BT, place),
        trained=[False, *(label != IGNORE for label in labels[:-1])],
        special=[token in tokenizer.control_ids for token in ids],
        padding=[position >= tokens for position in range(len(ids))],
    )


def _row_of(tensor_BT: Tensor | None, place: int) -> list | None:
    return None if tensor_BT is None else tensor_BT[place].tolist()


def split_text(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text that each token adds to the decoded text. Where several tokens make one character, the last has it."""
    pieces: list[str] = []
    # A token is decoded behind the one before it, because some decoders treat the first token of a text differently.
    start, read = 0, 0
    for end in range(1, len(ids) + 1):
        before, text = tokenizer.decode(ids[start:read]), tokenizer.decode(ids[start:end])
        is_partial = text.endswith("\ufffd") and end < len(ids) and end - read < _LONGEST_CHARACTER
        pieces.append("" if is_partial else text[len(before) :])
        if not is_partial:
            start, read = read, end
    return pieces
