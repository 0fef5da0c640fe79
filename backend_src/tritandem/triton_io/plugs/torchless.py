"""Keeps torch out of the processes that compute nothing with it.

transformers imports torch, where it finds it, with its first tokenizer: seconds of CPU at every start and 250 MB in
every process. Without torch it still reads tokenizers and renders chats, as its documentation promises.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def keep_torch_out(model: Path) -> None:
    """To be called before anything imports transformers; holds for the rest of the process.

    Without effect for a GGUF file, whose reader in transformers needs torch, and where torch was imported before.
    """
    if model.is_file():
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # one says that torch is missing
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # None: to find or import it fails
