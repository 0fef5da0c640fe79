"""Where running sequences live: slots, KV blocks, and the row changes that tell the device about both.

Owns slot numbers, the block pool and what the next step must carry. One thread, the core's. Knows nothing
about who should run or in what order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ...contracts.arrays import Int32Array
from ..step import FREE, MASKED, STRUCTURED, TABLED, TABLES, RunnerSpec, SlotInit
from ..structure.tables import Walker
from .batcher import Admission, Candidate
from .kv_blocks import NULL_BLOCK, BlockPool
from .sequence import NO_SLOT, SequenceState
from .shelf import TableShelf


class RowChanges:
    """What the next launched step must tell the device: releases, inits, block table entries, copies of blocks.

    They stay here until a step that carries them was launched, so that a step that failed loses none; carrying one
    twice is harmless.
    """

    def __init__(self) -> None:
        self.releases: list[int] = []
        self.inits: dict[int, SlotInit] = {}
        self.copies: dict[int, int] = {}  # block -> the one whose content it takes
        self._blocks: dict[int, list[tuple[int, int]]] = {}  # slot -> (index in its table, block)

    def init(self, init: SlotInit) -> None:
        self.inits[init.slot] = init

    def add_blocks(self, slot: int, first_index: int, blocks: list[int]) -> None:
        self._blocks.setdefault(slot, []).extend(enumerate(blocks, first_index))

    def release(self, slot: int) -> None:
        """The row idles from the next step on; what was still to be sent for it is void."""
        self.inits.pop(slot, None)
        self._blocks.pop(slot, None)
        self.releases.append(slot)

    def block_updates(self) -> Int32Array | None:
        """[U, 3] slot, index in its block table, block id."""
        rows = [(slot, index, block) for slot, entries in self._blocks.items() for index, block in entries]
        return np.array(rows, np.int32) if rows else None

    def clear(self) -> None:
        self.releases, self.inits, self.copies, self._blocks = [], {}, {}, {}


class Residency:
    """`admit` / `release` are a pair; `grow` and `register_blocks` act in between."""

    def __init__(self, spec: RunnerSpec, prefix_cache: bool) -> None:
        self.pool = BlockPool(spec.num_blocks, prefix_cache and not spec.stateful)
        self.changes = RowChanges()
        self.shelf = TableShelf(spec.table_places)
        self.hit_tokens = 0  # prompt tokens found in the prefix cache, at first admissions
        self._families: dict[int, list[SequenceState]] = {}  # live sequences of one prompt, by the number they have
        self._num_slots, self._block_tokens, self._stateful = spec.num_slots, spec.block_tokens, spec.stateful
        # What a state was made of cannot be made anew without the blocks of all tokens.
        self.window_tokens = None if spec.stateful else spec.window_tokens
        # A query sees window - 1 tokens before its own: behind full blocks, so many of them.
        self._seen_blocks = None if spec.window_tokens is None else -(-spec.window_tokens // spec.block_tokens)
        self._free_slots = list(range(spec.num_slots - 1, -1, -1))

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    def join(self, sequence: SequenceState) -> None:
        """It lives from now on, and may begin on the blocks of its family, unless those are not all that it needs."""
        if (number := sequence.request.family) and not self._stateful:
            sequence.family = self._families.setdefault(number, [])
            sequence.family.append(sequence)

    def leave(self, sequence: SequenceState) -> None:
        if sequence.family:
            sequence.family.remove(sequence)
            if not sequence.family:
                del self._families[sequence.request.family]

    def candidates(self, waiting: Iterable[SequenceState]) -> Iterator[Candidate]:
        """What admitting each would take. Evaluated only as far as the batcher looks."""
        led: set[int] = set()  # families of which one is admitted here
        for sequence in waiting:
            tokens = sequence.known_tokens
            hits: list[int] = []
            if sequence.forks:
                elder = sequence.elder()
                if elder is None and sequence.request.family not in led:
                    led.add(sequence.request.family)
                elif elder is None or elder.stored < tokens:
                    return  # for the steps that its prompt takes: nobody overtakes it
                else:
                    yield self._fork(sequence, elder)
                    continue
            if self.pool.prefix_cache and sequence.takes_cached and not sequence.scoring:
                # The last token is always computed: its logits are needed.
                full_blocks = (tokens - 1) // self._block_tokens
                hits = self.pool.lookup(sequence.block_hashes(self._block_tokens, full_blocks), self._seen_blocks)
            fresh = -(-tokens // self._block_tokens) - len(hits)
            yield Candidate(sequence, tokens, hits, fresh + self.pool.unreferenced(hits))

    def _fork(self, sequence: SequenceState, elder: SequenceState) -> Candidate:
        """Everything of the prompt but its last token, whose logits are needed: full blocks are shared, what is in the
        next one is copied, as both go on in it."""
        tokens = sequence.prompt_tokens
        full, rest = divmod(tokens - 1, self._block_tokens)
        fresh = -(-tokens // self._block_tokens) - full
        return Candidate(sequence, tokens, elder.blocks[:full], fresh, elder.blocks[full] if rest else 0, rest)

    def take(self, grow: Iterable[tuple[SequenceState, int]], admissions: Sequence[Admission]) -> None:
        """Blocks and slots for one step. All shares come before any allocation, which might evict a hit."""
        for admission in admissions:
            self.pool.share(admission.candidate.cached_blocks)
        for sequence, count in grow:
            self._add_blocks(sequence, count)
        for admission in admissions:
            self._admit(admission)

    def _admit(self, admission: Admission) -> None:
        candidate = admission.candidate
        sequence, hits = candidate.sequence, candidate.cached_blocks
        cached_tokens = candidate.cached_tokens(self._block_tokens)
        slot = self._free_slots.pop()
        if not sequence.prefill_start_ns:  # a preempted one finds its own blocks again
            self.hit_tokens += min(cached_tokens, sequence.prompt_tokens)
        sequence.begin(slot, list(hits), cached_tokens)
        sequence.gives_cached = True
        self._open_row(sequence)
        blocks = -(-candidate.tokens // self._block_tokens) + admission.reserve_blocks
        self._add_blocks(sequence, blocks - len(hits))
        if candidate.copied_tokens:
            self.changes.copies[sequence.blocks[len(hits)]] = candidate.copied_block

    def rewind(self, sequence: SequenceState) -> None:
        """Begin the row anew on the same blocks: whatever a step that failed half-way did to it is undone.

        For a sequence that has not decoded in this slot, or not since a forced run was to be stored: its blocks hold
        all tokens of its prefill.
        """
        self.changes.release(sequence.slot)
        if sequence.forced_start and not self._stateful:
            sequence.stored = sequence.forced_start
        else:
            assert sequence.promised == len(sequence.output_ids), "a step that decodes it is in flight"
            sequence.begin(sequence.slot, sequence.blocks, sequence.reused_tokens)
        self._open_row(sequence)

    def force(self, sequence: SequenceState, run: list[int]) -> bool:
        """Let its next chunk store `run`, of which steps in flight choose the first. False: there is no room for it
        beside what others may need, and nothing has changed."""
        tokens = sequence.known_tokens + len(run)
        missing = max(0, -(-tokens // self._block_tokens) - len(sequence.blocks))
        if missing and missing + self._num_slots - self.free_slots > self.pool.free_blocks:
            return False
        self._add_blocks(sequence, missing)
        sequence.force(run, sequence.promised - len(sequence.output_ids))
        self.changes.release(sequence.slot)
        self._open_row(sequence)
        return True

    def _open_row(self, sequence: SequenceState) -> None:
        request, structure = sequence.request, sequence.structure_ahead
        kind = FREE if structure is None else MASKED
        if isinstance(structure, Walker):
            place = self.shelf.take(structure.table, sequence.slot)
            kind = MASKED if place is None else TABLES + place
        if kind != FREE:
            sequence.follow_by(STRUCTURED if kind == MASKED else TABLED)
        self.changes.init(
            SlotInit(
                slot=sequence.slot,
                prompt_ids=request.prompt_ids,
                sampling=request.sampling,
                stop_ids=tuple(request.stop_ids),
                bad_words=request.bad_words,
                output_ids=sequence.prefill_ids[sequence.prompt_tokens :],
                logit_bias=request.logit_bias,
                allowed_token_ids=request.allowed_token_ids,
                structure=kind,
                structure_state=structure.state if isinstance(structure, Walker) else 0,
            )
        )
        self.changes.add_blocks(sequence.slot, 0, sequence.blocks)

    def _add_blocks(self, sequence: SequenceState, count: int) -> None:
        blocks = self.pool.allocate(count)
        self.changes.add_blocks(sequence.slot, len(sequence.blocks), blocks)
        sequence.blocks.extend(blocks)

    def drop_unseen(self, decoded: Iterable[SequenceState]) -> None:
        """Give back the blocks that no layer of a model with windows sees from the next query on. For sequences that
        the last launched step decoded: `rewind` must find all blocks of the others. Steps already launched run before
        any that writes to these blocks anew; those that the prefix cache is still to be told of wait."""
        if self.window_tokens is None:
            return
        for sequence in decoded:
            unseen = (sequence.stored - self.window_tokens + 1) // self._block_tokens
            if self.pool.prefix_cache and sequence.gives_cached:
                unseen = min(unseen, sequence.registered_blocks)
            if len(sequence.family) > 1:  # another may yet begin on what its prompt's end sees
                unseen = min(unseen, (sequence.prompt_tokens - self.window_tokens) // self._block_tokens)
            dropped = sequence.dropped_blocks
            if unseen > dropped:
                self.pool.free(sequence.blocks[dropped:unseen])
                sequence.blocks[dropped:unseen] = [NULL_BLOCK] * (unseen - dropped)
                sequence.dropped_blocks = unseen

    def register_blocks(self, sequence: SequenceState) -> None:
        """Let others share the full blocks whose content is known and whose writing was launched."""
        full = min(sequence.stored, sequence.known_tokens) // self._block_tokens
        if self.pool.prefix_cache and sequence.gives_cached and full > sequence.registered_blocks:
            names = sequence.block_hashes(self._block_tokens, full)
            for index in range(sequence.registered_blocks, full):
                self.pool.register(sequence.blocks[index], names[index], names[index - 1] if index else None)
            sequence.registered_blocks = full

    def distrust(self, sequences: Sequence[SequenceState], running: Iterable[SequenceState]) -> None:
        """These ended in error: what they stored may be wrong. Their blocks are not found any more, and `running`
        ones that share them make no others findable."""
        doubtful = {block for sequence in sequences for block in sequence.blocks if block != NULL_BLOCK}
        if doubtful:
            self.pool.forget(doubtful)
            for sequence in running:
                sequence.gives_cached &= doubtful.isdisjoint(sequence.blocks)

    def release(self, sequence: SequenceState) -> None:
        """Blocks and slot may be reused by the next launch: steps already launched run before it."""
        for block in sequence.blocks if self.changes.copies else ():
            self.changes.copies.pop(block, None)
        self.pool.free(sequence.blocks)
        self.changes.release(sequence.slot)
        if sequence.structure is not None:
            self.shelf.give_back(sequence.slot)
        self._free_slots.append(sequence.slot)
        sequence.blocks, sequence.slot = [], NO_SLOT

    def check_integrity(self, running: Sequence[SequenceState]) -> None:
        """Slots and blocks are each in one place. Raises AssertionError."""
        self.pool.check_integrity()
        slots = [sequence.slot for sequence in running]
        assert sorted(slots + self._free_slots) == list(range(self._num_slots)), "a slot was lost"
        held = {block for sequence in running for block in sequence.blocks if block != NULL_BLOCK}
        assert all(self._families.values()), "a family outlived its sequences"
        assert len(held) == self.pool.total_blocks - self.pool.free_blocks, "a block has no owner"
