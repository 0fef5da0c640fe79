"""Flags that are meant for tritonserver: does it know them? It says so itself, with `--help`."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
from collections.abc import Collection, Sequence

from ..host import Refusal
from .locate import TritonInstall

HELP_TIMEOUT_S = 20
# As --help prints a flag: indented by two spaces, its description by a tab.
_FLAG_IN_HELP = re.compile(r"^  --([a-z0-9][a-z0-9-]*)", re.MULTILINE)


def refuse_unknown_flags(words: Sequence[str], known: Collection[str]) -> None:
    """Raises Refusal for a flag of which no beginning of a `known` one is made (getopt takes those too), and for a word
    that belongs to no flag."""
    takes_value = False
    for word in words:
        name, equals, _ = word.removeprefix("--").partition("=")
        if not word.startswith("-"):
            if not takes_value:
                raise Refusal(f"unexpected argument {word!r}", "flags look like --name=value")
            takes_value = False
            continue
        if not word.startswith("--") or not any(flag.startswith(name) for flag in known):
            near = difflib.get_close_matches(name, known, 1)
            raise Refusal(
                f"unknown flag {word!r}: neither `tritandem serve` nor tritonserver has it",
                f"did you mean --{near[0]}?" if near else "`tritandem serve --help` lists its own",
            )
        takes_value = not equals


def known_flags(install: TritonInstall) -> frozenset[str]:
    """Names without dashes; empty where the binary does not tell."""
    libraries = [str(path) for path in install.library_dirs]
    libraries += [path for path in [os.environ.get("LD_LIBRARY_PATH")] if path]
    try:
        done = subprocess.run(
            [install.binary, "--help"],
            env={**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(libraries)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=HELP_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return frozenset()
    return frozenset(_FLAG_IN_HELP.findall(done.stdout))
