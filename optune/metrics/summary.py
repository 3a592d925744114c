"""The texts at the start and at the end of a run: aligned, plain, at most 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

WIDTH = 80


def format_fields(title: str, fields: Mapping[str, object], width: int = WIDTH) -> str:
    """A title and aligned `name  value` lines. Long values wrap under themselves; empty fields are left out."""
    shown = {name: text for name, value in fields.items() if value is not None and (text := str(value))}
    column = max(map(len, shown), default=0) + 4
    lines = [title]
    for name, value in shown.items():
        # Paths are never broken: a copied path must work.
        wrapped = textwrap.wrap(
            value, max(20, width - column), break_long_words=False, break_on_hyphens=False, drop_whitespace=True
        )
        lines.append(f"  {name:<{column - 2}}{wrapped[0] if wrapped else ''}")
        lines += [" " * column + rest for rest in wrapped[1:]]
    return "\n".join(lines)


def describe_parameters(trainable: int, total: int) -> str:
    """`134,515,008, all trained`, or `460,800 trained of 134,975,808 (0.34 %)`."""
    if trainable == total:
        return f"{total:,}, all trained"
    return f"{trainable:,} trained of {total:,} ({100 * trainable / max(1, total):.2g} %)"


def describe_rows(kept: int, skipped: Mapping[str, int] | None = None) -> str:
    """`200 rows, 3 skipped (2 too long, 1 without targets)`."""
    skipped = {reason: count for reason, count in (skipped or {}).items() if count}
    if not skipped:
        return _count(kept, "row")
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in skipped.items())
    return f"{_count(kept, 'row')}, {sum(skipped.values()):,} skipped ({reasons})"


def describe_steps(
    total_steps: int, *, steps_per_epoch: int | None, rows_per_step: int, first_step: int = 0, unit: str = "row"
) -> str:
    """`150 steps of 8 rows, 50 an epoch (3 epochs)`, and from which step a resumed run goes on; `unit`: row or pack.
    `steps_per_epoch` None: not known."""
    text = f"{_count(total_steps, 'step')} of {_count(rows_per_step, unit)}"
    if steps_per_epoch is not None:
        epochs = total_steps / max(1, steps_per_epoch)
        text += f", {steps_per_epoch:,} an epoch ({epochs:.3g} {'epoch' if epochs == 1 else 'epochs'})"
    return text + (f", going on after step {first_step:,}" if first_step else "")


def describe_saves(written_s: Sequence[float], stalls_s: Sequence[float]) -> str | None:
    """`4 checkpoints, written in up to 0.61 s; training stood still for up to 0.02 s at a save, 0.05 s in all`.

    `written_s`: how long each took; `stalls_s`: how long training stood still, of those after which it went on.
    """
    if not written_s:
        return None
    text = f"{_count(len(written_s), 'checkpoint')}, written in up to {max(written_s):.2f} s"
    if not stalls_s:
        return text
    return f"{text}; training stood still for up to {max(stalls_s):.2f} s at a save, {sum(stalls_s):.2f} s in all"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
