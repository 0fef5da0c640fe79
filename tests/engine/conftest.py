"""Makes `fakes` importable; one torch thread, so that tests do not fight for cores."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch._dynamo  # looks for a package `triton`: before the folder of that name in tests/ can be found

torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parents[1]))
