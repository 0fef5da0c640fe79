"""The runner for the CPU: a step runs when it is launched, prefill and decode in one packed pass.

Owns the model, the KV cache and the slot rows. The slow twin of the CUDA runner: the same forward, slots
and sampler without streams, graphs or staging. Runs in the core's thread.
"""

from __future__ import annotations

import time
from collections import deque

import numpy as np
import torch

from ...config import EngineConfig
from ...contracts.arrays import Int32Array
from ...contracts.stream import TokenScores
from ...telemetry.step_meter import StepMeter
from ..attention.interface import AttentionBatch, Heads
from ..attention.kv_type import resolve_kv_type
from ..attention.registry import choose_attention
from ..model.loader import LoadedModel
from ..model.packed import KvCache, PackedForward, kv_bytes_per_token, window_tokens
from ..model.states.cache import StateCache
from ..rows.state import SlotState
from ..sampling.prompt_scores import host_scores, score_chunks, scored_rows
from ..sampling.sampler import sample
from ..step import TABLE_PLACES, TABLED, RunnerSpec, StepFailed, StepPlan, StepResult

DEFAULT_SLOTS = 16
DEFAULT_PREFILL_TOKENS = 256


def cpu_spec(loaded: LoadedModel, config: EngineConfig) -> RunnerSpec:
    """Sizes from the configuration and the KV memory it allows. The null block comes on top."""
    kv_type = resolve_kv_type(config.kv_dtype, loaded.model.dtype, torch.device("cpu"))
    block_bytes = kv_bytes_per_token(loaded.layers, kv_type) * config.block_tokens
    num_blocks = config.num_blocks or max(2, config.cpu_kv_bytes // block_bytes)
    prefill_tokens = config.prefill_tokens_per_step or DEFAULT_PREFILL_TOKENS
    return RunnerSpec(
        device="cpu",
        num_slots=config.max_sequences or DEFAULT_SLOTS,
        num_blocks=num_blocks,
        block_tokens=config.block_tokens,
        max_context_tokens=loaded.served_context(config, num_blocks),
        prefill_tokens_per_step=prefill_tokens,
        interleaved_prefill_tokens=min(prefill_tokens, config.interleaved_prefill_tokens or prefill_tokens),
        efficient_prefill_tokens=((config.max_sequences or DEFAULT_SLOTS, prefill_tokens),),
        vocab_size=loaded.vocab_size,
        launch_ahead_steps=0,
        table_places=TABLE_PLACES,
        window_tokens=window_tokens(loaded.layers),
        stateful=loaded.state_bytes > 0,
    )


class CpuRunner:
    """`Runner` without concurrency."""

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        meter: StepMeter | None = None,
        masks: Int32Array | None = None,
    ) -> None:
        """`masks`: those of another runner that runs the same steps."""
        self.spec = spec = cpu_spec(loaded, config)
        kv_type = resolve_kv_type(config.kv_dtype, loaded.model.dtype, torch.device("cpu"))
        cache = KvCache.allocate(loaded.layers, spec.num_blocks, spec.block_tokens, kv_type, "cpu")
        shapes = [Heads(layer.heads, layer.kv_heads, layer.head_dim) for layer in loaded.layers]
        backend = choose_attention("cpu", config.attention, shapes, config.max_sequences, torch.device("cpu"))
        states = StateCache.allocate(loaded.model, spec.num_slots) if spec.stateful else None
        self._forward = PackedForward(loaded.model, cache, backend, states)
        max_blocks = -(-spec.max_context_tokens // spec.block_tokens)
        self._slots = SlotState.empty(spec.num_slots, max_blocks, spec.vocab_size, "cpu", _shared(masks))
        self.masks = self._slots.masks.numpy()
        self._results: deque[StepResult] = deque()
        self._meter, self._finished_ns = meter, 0

    def launch(self, plan: StepPlan) -> None:
        launched_ns = time.monotonic_ns()
        if self._meter is not None and self._meter.busy:
            self._meter.idle_gap.note(launched_ns - self._finished_ns)
        try:
            self._results.append(self._run(plan, launched_ns))
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            raise StepFailed(str(error), [*(chunk.slot for chunk in plan.prefill), *plan.decode_slots]) from error
        self._finished_ns = self._results[-1].finished_ns

    def masks_ready(self, step_id: int) -> None:
        """Nothing waits: a step is launched behind none."""

    def collect(self, wait: bool) -> StepResult | None:
        return self._results.popleft() if self._results else None

    def pending(self) -> int:
        return len(self._results)

    def busy(self) -> bool:
        return False

    def prepare(self) -> bool:
        return False

    def close(self) -> None:
        self._results.clear()

    @torch.inference_mode()
    def _run(self, plan: StepPlan, launched_ns: int) -> StepResult:
        slots = self._slots
        self._change_rows(plan)
        ids, positions, batch = self._pack(plan)
        last = [index for index, chunk in enumerate(plan.prefill) if chunk.last]
        sampling_rows = [*last, *range(len(plan.prefill), len(plan.prefill) + len(plan.decode_slots))]
        row_slots = [plan.prefill[index].slot for index in last] + list(plan.decode_slots)
        rows = torch.tensor(row_slots, dtype=torch.int64)
        ends = batch.query_starts[1:][sampling_rows].long() - 1
        logits = self._forward.logits(ids, positions, torch.cat((ends, scored_rows(plan.prefill, "cpu"))), batch)
        scores = [host_scores(*parts) for parts in score_chunks(plan.prefill, logits[len(ends) :], torch.from_numpy)]
        sampled = sample(logits[: len(ends)], rows, slots, plan.features) if row_slots else None
        # Rows change only once everything that may fail is done: a failed step can then be tried again.
        chunked = torch.tensor([chunk.slot for chunk in plan.prefill], dtype=torch.int64)
        lengths = torch.tensor([chunk.start + len(chunk.ids) for chunk in plan.prefill], dtype=torch.int32)
        slots.set_lengths(chunked, lengths)
        slots.store_one(rows[len(last) :])
        if sampled is None:
            return _result(plan, launched_ns, scores, rows, rows, rows)
        tokens, finish = slots.advance(rows, sampled.tokens, sampled.broken, plan.features.penalised)
        if TABLED in plan.features.asked:
            slots.follow_tables(rows)
        logprobs = (sampled.logprobs, sampled.top_ids, sampled.top_logprobs)
        return _result(plan, launched_ns, scores, rows, tokens, finish, *logprobs)

    def _change_rows(self, plan: StepPlan) -> None:
        for place, words in plan.tables:
            self._slots.write_table(place, torch.from_numpy(words))
        if plan.releases:
            self._slots.release_rows(list(plan.releases))
        for init in plan.inits:
            self._slots.init_row(init, self.spec.max_context_tokens)
        if plan.block_updates is not None:
            self._slots.update_blocks(torch.from_numpy(plan.block_updates))
        if plan.copies:
            self._forward.cache.copy_blocks(torch.tensor(plan.copies))

    def _pack(self, plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor, AttentionBatch]:
        """Ids and positions (int64 [T]) of the prefill chunks, then one token for each decode slot."""
        slots = self._slots
        decoding = torch.tensor(list(plan.decode_slots), dtype=torch.int64)
        prefill_ids = [torch.from_numpy(chunk.ids.astype(np.int64)) for chunk in plan.prefill]
        ranges = [torch.arange(chunk.start, chunk.start + len(chunk.ids)) for chunk in plan.prefill]
        ids = torch.cat((*prefill_ids, slots.last_token[decoding].long()))
        positions = torch.cat((*ranges, slots.length[decoding].long()))

        lens = torch.tensor([len(chunk.ids) for chunk in plan.prefill] + [1] * len(decoding))
        row_slots = torch.cat((torch.tensor([chunk.slot for chunk in plan.prefill], dtype=torch.int64), decoding))
        starts = torch.zeros(len(lens) + 1, dtype=torch.int32)
        starts[1:] = lens.cumsum(0)
        contexts = positions[starts[1:].long() - 1].to(torch.int32) + 1
        idle = torch.cat((torch.zeros(len(plan.prefill), dtype=torch.bool), slots.idle(decoding)))
        block = slots.block_table[row_slots.repeat_interleave(lens), positions // self.spec.block_tokens].long()
        mapping = block * self.spec.block_tokens + positions % self.spec.block_tokens
        batch = AttentionBatch(
            slot_mapping=mapping.masked_fill(idle.repeat_interleave(lens), 0),  # idle rows write to the null block
            block_tables=slots.block_table[row_slots],
            context_lens=contexts.masked_fill(idle, 0),
            query_starts=starts,
            max_query_tokens=int(lens.max()),
            max_context_tokens=int(contexts.max()),
            decode=not plan.prefill,
            slots=row_slots,
        )
        return ids, positions, batch


def _shared(masks: Int32Array | None) -> torch.Tensor | None:
    return None if masks is None else torch.from_numpy(masks)


def _result(
    plan: StepPlan,
    launched_ns: int,
    scores: list[TokenScores],
    rows: torch.Tensor,
    tokens: torch.Tensor,
    finish: torch.Tensor,
    logprobs: torch.Tensor | None = None,
    top_ids: torch.Tensor | None = None,
    top_logprobs: torch.Tensor | None = None,
) -> StepResult:
    return StepResult(
        step_id=plan.step_id,
        slots=rows.to(torch.int32).numpy(),
        tokens=tokens.to(torch.int32).numpy(),
        finish=finish.to(torch.uint8).numpy(),
        launched_ns=launched_ns,
        finished_ns=time.monotonic_ns(),
        logprobs=None if logprobs is None else logprobs.numpy(),
        top_ids=None if top_ids is None else top_ids.numpy(),
        top_logprobs=None if top_logprobs is None else top_logprobs.numpy(),
        scores=scores,
    )
