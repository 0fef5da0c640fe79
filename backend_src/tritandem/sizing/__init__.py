"""How many cores a deployment needs, and how long steps take on several GPUs: models of measured costs.

Tier 4. Knows nothing about running servers: everything is computed from numbers.
"""

from .coefficients import Coefficients, CoefficientsFile, load_coefficients
from .model import CoreNeed, Workload, core_need, rule_cores

__all__ = ["Coefficients", "CoefficientsFile", "CoreNeed", "Workload", "core_need", "load_coefficients", "rule_cores"]
