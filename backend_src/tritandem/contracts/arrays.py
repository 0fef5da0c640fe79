"""The kinds of numpy arrays that rooms hand to each other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
UInt8Array = NDArray[np.uint8]
Float32Array = NDArray[np.float32]
