"""Kernels of the Triton language compiled ahead of their first launch, several at a time.

Work is walked through without launching a kernel: what it would launch is compiled by a pool of threads, C launchers
and the load onto the device included, and whoever launches one of them first waits for that one alone. Alone knows
the inside of Triton's compiler. A compiler that lacks it compiles at the first launch, as ever.
"""

# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

log = logging.getLogger(__name__)

TELL_EVERY_S = 1.0
MOST_THREADS = 32


_EMPTY = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
}


class _Zeroed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What kernels were to fill holds zeros: others take it for ids and positions, which must be valid ones."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in _EMPTY else made


class _Jobs:
    """Stands where Triton looks for a way to compile in the background (its `AsyncCompileMode`)."""

    def __init__(self, pool: ThreadPoolExecutor, pending: type) -> None:
        self._pool, self._pending = pool, pending
        self.futures: list[Future[Any]] = []

    def submit(self, key: str, compile_kernel: Callable[[], Any], remember: Callable[[Any], None]) -> Any:
        """Start one; what comes later with the same arguments finds `pending`, and a launch of it waits."""
        future = self._pool.submit(_compile_and_load, compile_kernel)
        self.futures.append(future)
        pending = self._pending(remember, future)
        remember(pending)
        return pending


class KernelsAhead:
    """Of one device, which is current in the thread that walks. `close` it once nothing is walked any more."""

    def __init__(self, device: torch.device, threads: int = 0) -> None:
        """`threads`: 0: one for each core that this process may use."""
        self._jobs: _Jobs | None = None
        self._mode = self._kernel_class = None
        if device.type != "cuda" or not (inside := _inside()):
            return
        self._mode, pending, self._kernel_class = inside
        count = min(MOST_THREADS, threads or len(os.sched_getaffinity(0)))
        self._pool = ThreadPoolExecutor(count, "kernels", partial(torch.cuda.set_device, device))
        self._jobs = _Jobs(self._pool, pending)

    def walking(self) -> AbstractContextManager[bool]:
        """Inside, this thread's launches of kernels of the Triton language compile and do not run; everything else is
        executed, on zeros where a kernel would have written. Entered with False where nothing can be compiled ahead:
        there, do not walk."""
        return self._walk() if self._jobs is not None else nullcontext(False)

    @contextmanager
    def _walk(self) -> Iterator[bool]:
        kernels: Any = self._kernel_class
        walker, launches = threading.get_ident(), kernels.__getitem__

        def compiles(kernel: Any, grid: Any) -> Any:
            if threading.get_ident() != walker:
                return launches(kernel, grid)
            return partial(kernel.warmup, grid=grid)

        token = self._mode.set(self._jobs)  # type: ignore[union-attr]
        kernels.__getitem__ = compiles
        try:
            with _Zeroed():  # type: ignore[no-untyped-call]
                yield True
        except Exception as error:  # whatever is wrong is said again when it is run
            log.warning("not all kernels are compiled ahead: %s: %s", type(error).__name__, error)
        finally:
            kernels.__getitem__ = launches
            self._mode.reset(token)  # type: ignore[union-attr]

    def finish(self, on_progress: Callable[[str], None]) -> None:
        """Wait for all that was walked through, with progress and the time left. A kernel that cannot be compiled says
        so when it is launched."""
        if self._jobs is None or not self._jobs.futures:
            return
        futures, started = self._jobs.futures, time.monotonic()
        done_before = sum(future.done() for future in futures)
        while wait(futures, timeout=TELL_EVERY_S).not_done:
            done, taken_s = sum(future.done() for future in futures), time.monotonic() - started
            if done > done_before:
                left_s = taken_s / (done - done_before) * (len(futures) - done)
                on_progress(f"kernels: {done} of {len(futures)} compiled, about {left_s:.0f} s left")
        self._jobs.futures = []

    def close(self) -> None:
        if self._jobs is not None:
            self._pool.shutdown(wait=False)


def _compile_and_load(compile_kernel: Callable[[], Any]) -> Any:
    kernel = compile_kernel()
    try:
        kernel.run  # noqa: B018  (builds its launcher and loads it)
    except Exception as error:  # its launch will raise the same
        log.debug("%s does not load: %s", kernel.name, error)
    return kernel


def _inside() -> tuple[Any, type, type] | None:
    """Where Triton looks for a compiler in the background, what it puts in a kernel's place, and the class of kernels;
    None where it is not the Triton that this file knows."""
    try:
        background = importlib.import_module("triton.runtime._async_compile")
        jit = importlib.import_module("triton.runtime.jit")
        knobs = importlib.import_module("triton.knobs")
        known = background.active_mode, background.FutureKernel, jit.JITFunction
    except (ImportError, AttributeError) as error:
        log.info("kernels are compiled one by one: %s", error)
        return None
    return None if knobs.runtime.interpret else known
