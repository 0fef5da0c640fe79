"""Finding, laying out, starting, watching and stopping the Triton binary."""

from .launcher import TritonServer
from .options import ServeOptions

__all__ = ["ServeOptions", "TritonServer"]
