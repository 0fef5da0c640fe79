"""Proof of equality before the fast engine is used: adversarial texts through both engines.

Owns the check and the remembered verdicts on disk. Start-up only; takes 0.5 to 4 s without a remembered verdict.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import random
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import numpy as np

from ...host import cache_root
from ..files.source import TokenizerSource
from .adversarial import long_texts, short_texts
from .fast import FastEncoder
from .whole import WholeEncoder

CHECK_VERSION = 4  # raise when the texts change, or what the fast engine is built from
SHORT_TEXTS = 400
RUN_CHARS = 5000

log = logging.getLogger("tritandem.tokenizer")


def proven_equal(fast: FastEncoder, whole: WholeEncoder, source: TokenizerSource) -> bool:
    """Whether `fast` gives the ids of `whole`; a verdict for the same files, versions and CPU is reused."""
    file = cache_root() / "tokenizer-verdicts" / f"{_verdict_key(source)}.json"
    try:
        return bool(json.loads(file.read_text(encoding="utf-8"))["equal"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # none yet, or damaged: check again
    difference = first_difference(fast, whole, source)
    if difference is not None:
        log.error("fastokens differs from tokenizers on %r", difference[:200])
    _remember(file, difference is None)
    return difference is None


def first_difference(fast: FastEncoder, whole: WholeEncoder, source: TokenizerSource) -> str | None:
    """A text that comes out differently, or None. A refusal by the fast engine is no difference: it is loud."""
    for text in check_texts(source):
        if fast.vetoes(text):
            continue
        for add_special_tokens in (False, True):
            try:
                ids = fast.encode(text, add_special_tokens)
            except Exception:
                continue
            if not np.array_equal(ids, whole.encode(text, add_special_tokens)):
                return text
    return None


def check_texts(source: TokenizerSource) -> Iterator[str]:
    """The same texts every time for one tokenizer."""
    rng = random.Random(20240607)
    added = [token.content for token in source.added_tokens][:64]
    yield from ("", "\n", *added)
    yield from short_texts(rng, SHORT_TEXTS, added)
    yield from long_texts(rng, RUN_CHARS)


def _verdict_key(source: TokenizerSource) -> str:
    """All that the verdict depends on: files, both engines' versions, the CPU's instruction sets, the texts."""
    versions = [f"{name} {metadata.version(name)}" for name in ("fastokens", "tokenizers")]
    parts = [source.json_text, *versions, platform.machine(), _cpu_flags(), str(CHECK_VERSION)]
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()


def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _remember(file: Path, equal: bool) -> None:
    """Write the verdict so that another process sees all of it or nothing; a read-only cache is no error."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f"{file.name}.{os.getpid()}")
        partial.write_text(json.dumps({"equal": equal}), encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        log.info("the result of the fastokens check could not be saved: %s", error)
