"""Load tests for streaming LLM servers: open-loop arrivals, latency from the intended send time, raw stamps kept.

When to send (`arrivals`), what (`workload`), how (`transport`), what it means (`metrics`) and how it is shown
(`report`, `pictures`, `page`) are separate rooms. gevent and Locust live in the processes of `locust_run` only.
"""

from .cli import add_command
from .config import LoadTestError, RunConfig, parse_slo
from .report import Report
from .runner import run

__all__ = ["LoadTestError", "Report", "RunConfig", "add_command", "parse_slo", "run"]
