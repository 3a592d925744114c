"""The goals that optune was built towards, and what the results say about each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.bench.roofline import step_shares
from scripts.bench.scaling import curves, line_through, median_times
from scripts.bench.tables import Run, Summary, summarize

MIB_OF_GRADIENTS = 256.6
"""SmolLM2-135M in bf16: 134.5 million parameters of two bytes."""


@dataclass(frozen=True)
class Goal:
    """`found` is None where the results lack what is needed."""

    what: str
    bound: float
    found: float | None
    at_least: bool = True

    @property
    def line(self) -> str:
        sign = "≥" if self.at_least else "≤"
        if self.found is None:
            return f"?      {self.what}: {sign} {self.bound:g}, not measured"
        is_met = self.found >= self.bound if self.at_least else self.found <= self.bound
        return f"{'met   ' if is_met else 'MISSED'} {self.what}: {sign} {self.bound:g}, found {self.found:.3g}"


def peer_goals(runs: Sequence[Run]) -> list[Goal]:
    found = summarize(runs)

    def get(tool: str, cell: str) -> Summary | None:
        return found.get(f"{tool}: {cell}")

    def ratio(cell: str, peers: str, key: str, best: Any) -> float | None:
        own, others = get("optune", cell), [one for tool in peers.split() if (one := get(tool, cell))]
        return getattr(own, key) / best(getattr(other, key) for other in others) if own and others else None

    full, lora, fp32 = "full bf16 4 x 512", "lora bf16 4 x 512", "full fp32 4 x 512"
    goals = []
    for mode, bound, seconds in (("eager", 1.4, 8.0), ("compiled", 1.3, 20.0)):
        cell = f"{full}, {mode}"
        own = get("optune", cell)
        goals.append(Goal(f"{cell}: × torchtune's tokens/s", bound, ratio(cell, "torchtune", "speed", max)))
        goals.append(Goal(f"{cell}: s to the first step", seconds, own and own.first_step_s, at_least=False))
    for mode in ("eager", "compiled", "checkpointed"):
        cell = f"{full}, {mode}"
        memory = ratio(cell, "torchtune", "peak_mib", min)
        goals.append(Goal(f"{cell}: × torchtune's memory", 0.6, memory, at_least=False))
    cell = f"{lora}, eager"
    everyone = "torchtune litgpt trl"
    goals.append(Goal(f"{cell}: × the fastest peer's tokens/s", 1.7, ratio(cell, everyone, "speed", max)))
    leanest = ratio(cell, everyone, "peak_mib", min)
    goals.append(Goal(f"{cell}: × the leanest peer's memory", 0.55, leanest, at_least=False))
    cell = f"{fp32}, eager"
    goals.append(Goal(f"{cell}: × the faster of torchtune and TRL", 1.3, ratio(cell, "torchtune trl", "speed", max)))
    after = get("optune", "full bf16 1 x 512, checkpointed")
    within = get("optune", "full bf16 1 x 512, checkpointed, in backward")
    saved = (after.peak_mib - within.peak_mib) / MIB_OF_GRADIENTS if after and within else None
    goals.append(Goal("in backward, checkpointed, 1 x 512: memory saved, × the gradients'", 0.8, saved))
    return goals


def scaling_goals(result: Mapping[str, Any]) -> list[Goal]:
    goals = []
    for title, names in curves().items():
        times = median_times(result["cells"], names)
        if title != "longer rows" and len(times) > 2:
            off = line_through(times)[2].values()
            goals.append(Goal(f"{title}: furthest off a line", 0.05, max(map(abs, off)), at_least=False))
    # Below that the logits may be a single chunk.
    rows = [row for row in result.get("loss_memory", []) if row["logits_mib"] >= 256]
    if rows:
        held = [row["peak_mib"] - row["gradients_mib"] for row in rows]
        logits = [row["logits_mib"] for row in rows]
        growth = (max(held) - min(held)) / (max(logits) - min(logits))
        goals.append(Goal("memory of the loss: MiB more for each MiB more of logits", 0.05, growth, at_least=False))
    return goals


def roofline_goals(result: Mapping[str, Any]) -> list[Goal]:
    shares = [share for share in step_shares(dict(result)) if (share["mode"], share["dtype"]) == ("compiled", "bf16")]
    return [
        Goal("compiled bf16 step: share of the machine's matmul rate", 0.55, share["needed_share"]) for share in shares
    ]
