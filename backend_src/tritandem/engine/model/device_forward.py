"""Which forward pass a model gets on CUDA, and how both kinds are called by a step.

Owns the choice: the fused decoder where the model is recognised and agrees with transformers' own code on a
probe, else that code itself over the paged kernels. Knows nothing about sampling, graphs or staging.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from ...config import EngineConfig
from ..attention.interface import AttentionBatch, Heads
from ..attention.kv_type import resolve_kv_type
from ..attention.registry import choose_attention
from ..kernels_ahead import KernelsAhead
from ..rows.state import SlotState
from .experts.registry import use_products
from .fused import DecodeRows, FusedDecoder
from .linear.interface import Rounding, Unfusable
from .loader import LoadedModel
from .packed import KvCache, PackedForward
from .quantized.loading import unpack_model
from .states.cache import StateCache

log = logging.getLogger(__name__)

PROBE_TOKENS = 40
PROBE_BLOCK_TOKENS = 16
PROBE_BLOCKS = 1 + -(-(PROBE_TOKENS + 1) // PROBE_BLOCK_TOKENS)


class DeviceForward:
    """Logits of prefill chunks and of decode rows, whose context is found through the slot rows."""

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        max_rows: int,
        on_progress: Callable[[str], None],
        ahead: KernelsAhead | None = None,
        agree: Callable[[Callable[[], None]], None] = lambda check: check(),
    ) -> None:
        """Starts on a tiny KV cache that serves the probe; `use` gives it the real one. The states of layers that have
        one are there at once, for all rows. `ahead`: compiles the probe's kernels, all at once. `agree` runs the check
        of the fused decoder, on every rank of several."""
        model = loaded.model
        device = torch.device(model.device)
        kv_type = resolve_kv_type(config.kv_dtype, model.dtype, device)
        cache = KvCache.allocate(loaded.layers, PROBE_BLOCKS, PROBE_BLOCK_TOKENS, kv_type, device)
        shapes = [Heads(layer.heads, layer.kv_heads, layer.head_dim) for layer in loaded.layers]
        backend = choose_attention("cuda", config.attention, shapes, max_rows, device)
        self.capturable = backend.capturable
        states = StateCache.allocate(model, max_rows) if loaded.state_bytes else None
        self._packed = PackedForward(model, cache, backend, states)
        self.experts = use_products(model) if config.compile else None  # in words what runs them, where there are any
        if self.experts is not None:
            log.info("the model's mixtures of experts run on %s", self.experts)
        self._fused: FusedDecoder | None = None
        attention, why = backend.fused(), ""
        if states is not None:
            size = f"{(max_rows + 1) * loaded.state_bytes / 2**30:.2f} GiB"
            on_progress(f"states of {len(states.layers)} layers for {max_rows} sequences: {size}")
            if config.compile:
                from .states.norms import use_norms  # needs the Triton language

                log.info("%s norms of the model run on own kernels", use_norms(model))
            log.info("the model runs on transformers' own code: %s", "it has layers with a state")
        elif config.compile and attention is not None:
            try:
                fused = FusedDecoder(
                    model, loaded.layers, cache, attention, loaded.max_context_tokens, _can_overlap(device)
                )
                if ahead is not None:
                    with ahead.walking() as walks:
                        if walks:
                            _wrong_products(fused)
                            _probe(fused, self._packed, loaded.vocab_size)
                agree(lambda: _check_agreement(fused, self._packed, loaded.vocab_size))
                self._fused = fused
            except Unfusable as reason:
                log.info("the model runs on transformers' own code: %s", reason)
                why = f": {reason}"
        if self._fused is None:
            unpack_model(model, on_progress)
        on_progress("fused kernels" if self._fused else f"transformers' modelling code over paged attention{why}")

    @property
    def fused(self) -> bool:
        return self._fused is not None

    def use(self, cache: KvCache) -> None:
        """Run over this cache from now on; nothing captured before may be replayed."""
        self._packed.cache = cache
        if self._fused is not None:
            self._fused.cache = cache

    def copy_blocks(self, copies: torch.Tensor) -> None:
        """As of the cache, on the current stream."""
        self._packed.cache.copy_blocks(copies)

    def prefill(
        self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        """Logits [R, V] after the packed tokens `rows` int64 [R], R >= 0."""
        forward = self._fused.prefill if self._fused is not None else self._packed.logits
        return forward(ids, positions, rows, batch)

    def decode(
        self,
        state: SlotState,
        block_tokens: int,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        context_lens: torch.Tensor,
    ) -> torch.Tensor:
        """Logits [S, V] of one token a row; `rows` int64 [S] are slots, idle ones have context length 0."""
        if self._fused is not None:
            return self._fused.decode(ids, _decode_rows(state, block_tokens, rows, context_lens))
        count, tables = rows.shape[0], state.block_table[rows]
        block = tables.gather(1, (positions // block_tokens)[:, None])[:, 0].long()
        mapping = (block * block_tokens + positions % block_tokens).masked_fill(context_lens == 0, 0)
        every = torch.arange(count + 1, dtype=torch.int32, device=rows.device)
        max_context = tables.shape[1] * block_tokens
        batch = AttentionBatch(mapping, tables, context_lens, every, 1, max_context, decode=True, slots=rows)
        return self._packed.logits(ids, positions, every[:count].long(), batch)

    def mixed(
        self,
        state: SlotState,
        block_tokens: int,
        ids: torch.Tensor,
        positions: torch.Tensor,
        logit_rows: torch.Tensor,
        batch: AttentionBatch,
        rows: torch.Tensor,
        context_lens: torch.Tensor,
    ) -> torch.Tensor:
        """Logits [R, V] after the packed tokens `logit_rows` of one pass: decode rows first, then `batch`'s chunks.

        `ids` int64 [S + T], `positions` int64 [T], `rows` and `context_lens` [S] as in `decode`; S may be 0.
        For a fused model only.
        """
        assert self._fused is not None
        decode = _decode_rows(state, block_tokens, rows, context_lens) if rows.shape[0] else None
        return self._fused.prefill(ids, positions, logit_rows, batch, decode)


def _decode_rows(state: SlotState, block_tokens: int, rows: torch.Tensor, context_lens: torch.Tensor) -> DecodeRows:
    """The fused kernel finds blocks through the slot's own table: nothing is gathered for it."""
    batch = AttentionBatch(
        slot_mapping=context_lens,
        block_tables=state.block_table,
        context_lens=context_lens,
        query_starts=context_lens,
        max_query_tokens=1,
        max_context_tokens=state.block_table.shape[1] * block_tokens,
        decode=True,
    )
    return DecodeRows(rows, batch)


@torch.inference_mode()
def _probe(fused: FusedDecoder, packed: PackedForward, vocab_size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Logits of a prefill and of a decode step on the same tokens, nothing rounded: the fused twin's, the other's."""
    device = packed.cache.keys[0].device
    packed_weights = any(isinstance(product, Rounding) for product in fused.products())
    ids = torch.arange(PROBE_TOKENS + 1, device=device) * 7919 % vocab_size
    positions = torch.arange(PROBE_TOKENS + 1, device=device)
    last = torch.tensor([PROBE_TOKENS - 1], device=device)
    # As wide as tables are, whose width kernels are compiled for as so many times 16.
    table = torch.zeros((1, 16), dtype=torch.int32, device=device)
    table[0, : PROBE_BLOCKS - 1] = torch.arange(1, PROBE_BLOCKS, dtype=torch.int32, device=device)

    def batch(start: int, end: int) -> AttentionBatch:
        return AttentionBatch(
            slot_mapping=PROBE_BLOCK_TOKENS + positions[start:end],
            block_tables=table,
            context_lens=torch.tensor([end], dtype=torch.int32, device=device),
            query_starts=torch.tensor([0, end - start], dtype=torch.int32, device=device),
            max_query_tokens=end - start,
            max_context_tokens=end,
            decode=end - start == 1,
        )

    prompt, step = batch(0, PROBE_TOKENS), batch(PROBE_TOKENS, PROBE_TOKENS + 1)
    first, second = slice(0, PROBE_TOKENS), slice(PROBE_TOKENS, PROBE_TOKENS + 1)
    zero = last * 0
    want = [
        packed.logits(ids[first], positions[first], last, prompt),
        packed.logits(ids[second], positions[second], zero, step),
    ]
    got = [
        fused.prefill(ids[first], positions[first], last, prompt, rounds=False),
        fused.decode(ids[second], DecodeRows(zero, step), rounds=not packed_weights),
    ]
    return list(zip(got, want, strict=True))


@torch.inference_mode()
def _wrong_products(fused: FusedDecoder) -> list[str]:
    products = (product for product in fused.products() if isinstance(product, Rounding))
    return [reason for product in products if (reason := product.misses())]


@torch.inference_mode()
def _check_agreement(fused: FusedDecoder, packed: PackedForward, vocab_size: int) -> None:
    """Both twins on the same tokens, nothing rounded: over many layers roundings of random weights add up to half of
    the result. Those are judged one by one. Raises Unfusable when they differ."""
    for reason in _wrong_products(fused):
        raise Unfusable(reason)
    # A deep model with random weights differs by several percent in bfloat16, by up to 17 over a cache of FP8; a wrong
    # kernel by more than half.
    cached = packed.cache.keys[0].dtype
    limit = 1e-3 if cached == torch.float32 else 0.15 if cached.itemsize > 1 else 0.3
    for name, (ours, theirs) in zip(("prefill", "decode"), _probe(fused, packed, vocab_size), strict=True):
        error = float((ours.float() - theirs).norm() / theirs.norm())
        if not error <= limit:
            raise Unfusable(f"its {name} logits differ by {error:.1e} (relative), allowed: {limit:.0e}")
    log.info("the fused decoder agrees with transformers' own code")


def _can_overlap(device: torch.device) -> bool:
    """Programmatic dependent launch exists from compute capability 9.0 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
