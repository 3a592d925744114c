"""Tensors that are spread over ranks, and files that many ranks read and write: each its own slices.

A rank's part of a tensor follows from the tensor's mesh and placements alone. The file is laid out as one process
would: it does not know how many have written it.
"""

from optune.shards.materialize import materialize
from optune.shards.parts import (
    Part,
    Tensors,
    input_device,
    is_offloaded,
    is_sharded,
    is_spread,
    local_values,
    make_dtensor,
    overlay,
    part_of,
    parts_of,
    slice_like,
)
from optune.shards.ranks import Ranks, check_shared
from optune.shards.stored import (
    FLOATS,
    StoredTensor,
    have_same_bytes,
    is_read_directly,
    read_header,
    read_like,
    read_part,
    read_tensor,
)
from optune.shards.writing import write_file

__all__ = [
    "FLOATS",
    "Part",
    "Ranks",
    "StoredTensor",
    "Tensors",
    "check_shared",
    "have_same_bytes",
    "input_device",
    "is_offloaded",
    "is_read_directly",
    "is_sharded",
    "is_spread",
    "local_values",
    "make_dtensor",
    "materialize",
    "overlay",
    "part_of",
    "parts_of",
    "read_header",
    "read_like",
    "read_part",
    "read_tensor",
    "slice_like",
    "write_file",
]
