"""What a person sees of a run: metrics, progress, traces, pictures, a summary (level 5)."""

from moejax.observability.goodput import Goodput, describe_goodput
from moejax.observability.loads import LoadLog, Loads, read_loads
from moejax.observability.metrics import DeadExperts, MetricsLog, read_metrics
from moejax.observability.peak import peak_flops, peak_memory_bytes
from moejax.observability.profile import StepProfiler
from moejax.observability.progress import Progress
from moejax.observability.summary import RunSummary, print_summary
from moejax.observability.writers import MetricsWriter, TensorBoard, Writers, open_writers

__all__ = [
    "DeadExperts",
    "Goodput",
    "LoadLog",
    "Loads",
    "MetricsLog",
    "MetricsWriter",
    "Progress",
    "RunSummary",
    "StepProfiler",
    "TensorBoard",
    "Writers",
    "describe_goodput",
    "open_writers",
    "peak_flops",
    "peak_memory_bytes",
    "print_summary",
    "read_loads",
    "read_metrics",
]
