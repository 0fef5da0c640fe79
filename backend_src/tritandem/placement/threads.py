"""How many threads libraries start by themselves, told to them before they are loaded."""

from __future__ import annotations

from collections.abc import MutableMapping

# Read once, when the library is loaded (OpenMP, MKL) or its pool first used (Rayon).
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")
# numpy is loaded by Triton's stub before any code of ours: only the launcher can tell it. Nothing here multiplies
# matrices with numpy, and its idle threads would be one for each CPU of the machine.
BLAS_VARIABLE = "OPENBLAS_NUM_THREADS"


def limit_library_threads(environment: MutableMapping[str, str], threads: int) -> None:
    """What the operator has set stays."""
    for name in THREAD_VARIABLES:
        environment.setdefault(name, str(threads))


def limit_blas_threads(environment: MutableMapping[str, str]) -> None:
    environment.setdefault(BLAS_VARIABLE, "1")
