"""Several processes, one run: who they are, what they say to each other, and how a model is spread over them.

with distributed.start(device, shard="auto") as processes:
    distributed.spread(model, processes)
"""

from optune.distributed.devices import find_device, read_device
from optune.distributed.layout import Layout, divide
from optune.distributed.pretending import pretend
from optune.distributed.processes import Processes, start
from optune.distributed.spread import check_model, spread

__all__ = ["Layout", "Processes", "check_model", "divide", "find_device", "pretend", "read_device", "spread", "start"]
