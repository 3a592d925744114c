"""What a run will need, before anything is loaded."""

from optune.plan.formulas import (
    Collective,
    Memory,
    Work,
    bytes_on_the_wire,
    count_parameters,
    flops_per_token,
    memory,
    traffic,
)

__all__ = [
    "Collective",
    "Memory",
    "Work",
    "bytes_on_the_wire",
    "count_parameters",
    "flops_per_token",
    "memory",
    "traffic",
]
