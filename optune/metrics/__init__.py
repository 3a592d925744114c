"""What a run says: metrics.jsonl, the progress bar, summaries, experiment loggers, and a plot.

`RunLog` is what a recipe uses. A logger is any object with the three methods of `Logger`; `TensorBoard` and `WandB` are
chosen in the config by `_target_: optune.metrics.TensorBoard`.
"""

from optune.metrics.loggers import Logger, TensorBoard, WandB
from optune.metrics.measure import peak_memory_bytes, peak_memory_gib
from optune.metrics.metrics_file import read_metrics
from optune.metrics.plots import draw_plot
from optune.metrics.run_log import RunLog
from optune.metrics.summary import describe_parameters, describe_rows, describe_saves, describe_steps, format_fields

__all__ = [
    "Logger",
    "RunLog",
    "TensorBoard",
    "WandB",
    "describe_parameters",
    "describe_rows",
    "describe_saves",
    "describe_steps",
    "draw_plot",
    "format_fields",
    "peak_memory_bytes",
    "peak_memory_gib",
    "read_metrics",
]
