"""Which CPUs each component runs on, and with how many threads: read the machine, plan, pin.

`make_plan` is a pure function of the topology and the `[placement]` table; every process of a server computes the same
plan from the same facts and pins only itself. Knows nothing about Triton, torch or models.
"""

from .affinity import another_server_on, pin_process, pin_thread, process_affinities, settle
from .here import ALLOWED_CPUS_ENV, plan_here, why_no_device
from .plan import COMPONENTS, ENGINE, ENGINE_HOST, SCHEDULER, SERVER, TOKENIZER, Plan, Share, make_plan
from .threads import limit_blas_threads, limit_library_threads

__all__ = [
    "ALLOWED_CPUS_ENV",
    "COMPONENTS",
    "ENGINE",
    "ENGINE_HOST",
    "SCHEDULER",
    "SERVER",
    "TOKENIZER",
    "Plan",
    "Share",
    "another_server_on",
    "limit_blas_threads",
    "limit_library_threads",
    "make_plan",
    "pin_process",
    "pin_thread",
    "plan_here",
    "process_affinities",
    "settle",
    "why_no_device",
]
