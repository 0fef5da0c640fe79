"""How many cores a deployment needs: the published rule, a measured model, what clouds offer.

Tier 4. Knows nothing about running servers: everything is computed from numbers, or measured in this process.
"""

from .coefficients import Coefficients, load_coefficients
from .instances import CloudInstance, load_instances
from .model import CoreNeed, Workload, core_need
from .rule import rule_cores

__all__ = [
    "CloudInstance",
    "Coefficients",
    "CoreNeed",
    "Workload",
    "core_need",
    "load_coefficients",
    "load_instances",
    "rule_cores",
]
