"""Several CUDA devices that execute the same programs together, each on its part of the model.

Owns how a step gets to all of them. A replayed step is launched on one after the other by the thread that steps: its
words first, then its graphs. Whatever may make the host wait for a device runs on a thread a rank, because a device
that waits for another is waited for as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from ...config import EngineConfig
from ..model.loader import LoadedModel
from ..parallel.interface import LOADING_PATIENCE_S
from ..rows.inputs import PassInputs
from .company import RankCompany
from .device import Device, Landing
from .graph_sizes import GraphSizes
from .pass_size import GraphSize
from .program import Program
from .rank_threads import RankThreads


class RankDevices:
    """As `Device`, whose place it takes: what is read comes from the first."""

    def __init__(
        self,
        parts: Sequence[LoadedModel],
        ranks: RankThreads,
        config: EngineConfig,
        on_progress: Callable[[str], None],
        note_skew: Callable[[int], None] | None = None,
    ) -> None:
        """Raises as `Device` does. `note_skew` gets ns between the launches on the first and on the last device."""
        self._ranks, self._patience_s, self._note_skew = ranks, config.rank_patience_s, note_skew
        self._set_patience(0)
        company = RankCompany.of(ranks)
        silent: Callable[[str], None] = lambda _: None  # noqa: E731  (what one says, all would)
        self.devices = ranks.each(
            lambda rank: Device(parts[rank], config, silent if rank else on_progress, company[rank])
        )
        ranks.require()  # else they have agreed on nothing
        self.first = first = self.devices[0]
        self._share_a_device = len({device.name for device in self.devices}) < len(self.devices)
        self._set_patience(self._patience_s)
        self.name, self.spec, self.state, self.forward = first.name, first.spec, first.state, first.forward
        self.staging, self.streams, self.captures = first.staging, first.streams, first.captures
        self.ring, self.masks_ready, self.mask_waits = first.ring, first.masks_ready, first.mask_waits

    def graph_sizes(self) -> GraphSizes:
        return self.first.graph_sizes()

    def capture(self, size: GraphSize, record: int) -> tuple[bool, float | None]:
        """Rank by rank, while nothing runs."""
        self._set_patience(0)
        done = [device.capture(size, record) for device in self._each_current()]
        self._set_patience(self._patience_s)
        if len({there for there, _ in done}) > 1:  # they have run different numbers of sums since
            self._ranks.exchanges[0].abort(f"not every rank could capture {size}")
            self._ranks.require()
        return done[0]

    def execute(self, program: Program) -> list[Landing]:
        """Enqueue a step everywhere; the current stream is the first device's. Raises RanksFailed when they are no
        longer together."""
        sizes = self.first.sizes_of(program)
        if program.eager is None and all(device.captures.holds(size) for device in self.devices for size in sizes):
            return self._replay(program)
        if not all(device.captures.knows(size) for device in self.devices for size in sizes):
            self._set_patience(0)
            for device in self._each_current():
                device.rehearse(program)
            self._set_patience(self._patience_s)
        told = [device.tell(program) for device in self._each_current()]
        if self._share_a_device and program.eager is not None:
            self._set_patience(0)  # one that waits there would keep the other's kernels from being loaded
            for device, inputs in zip(self._each_current(), told, strict=True):
                if inputs is not None:
                    device.prefill_logits(program.eager, inputs)
            self._set_patience(self._patience_s)
        return self._ranks.each(lambda rank: self._run(rank, program, told[rank]))[0]

    def recover(self, record: int) -> None:
        """A step that was launched on some of them cannot be taken back."""
        self._ranks.exchanges[0].abort("a step could not be launched on every rank")

    def close(self) -> None:
        self._ranks.exchanges[0].abort("the engine is closed")  # nobody waits for a step that is not launched any more
        for device in self._each_current():
            device.close()
        self._ranks.close()

    def _replay(self, program: Program) -> list[Landing]:
        told = [device.tell(program) for device in self._each_current()]
        first_ns = last_ns = 0
        for device, inputs in zip(self._each_current(), told, strict=True):
            last_ns = time.monotonic_ns()
            first_ns = first_ns or last_ns
            device.run(program, inputs)
        if self._note_skew is not None:
            self._note_skew(last_ns - first_ns)
        return []

    def _run(self, rank: int, program: Program, inputs: PassInputs | None) -> list[Landing]:
        """On the rank's thread. Kernels may be compiled on the way, by each rank in its own time."""
        exchange, device = self._ranks.exchanges[rank], self.devices[rank]
        with torch.inference_mode(), torch.cuda.stream(device.streams.compute):
            exchange.patience(LOADING_PATIENCE_S)
            scores = device.run(program, inputs)
            exchange.patience(self._patience_s)
        return scores

    def _set_patience(self, seconds: float) -> None:
        """Of all ranks, once all are idle: whoever waits for nobody may overwrite what another has not read."""
        exchanges = self._ranks.exchanges
        devices = dict.fromkeys(exchange.rank.device for exchange in exchanges)
        for device in devices:
            torch.cuda.synchronize(device)
        for exchange in exchanges:
            with torch.cuda.device(exchange.rank.device):
                exchange.patience(seconds)
        for device in devices:
            torch.cuda.synchronize(device)

    def _each_current(self) -> Iterator[Device]:
        """Every device in turn, its compute stream being the current one."""
        for device in self.devices:
            with torch.cuda.stream(device.streams.compute):
                yield device
