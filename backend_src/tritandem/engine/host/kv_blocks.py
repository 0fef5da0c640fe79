"""Which KV block belongs to whom: free list, reference counts, prefix cache by content.

Owns block numbers, never their tensors. Block 0 is the null block and is never handed out. Used by the
core's thread alone. Knows nothing about sequences, slots or devices.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

NULL_BLOCK = 0


def root_hash(salt: int) -> bytes:
    """Parent of a prompt's first block: prompts of different salts (int64) have no block name in common."""
    return salt.to_bytes(8, "little", signed=True) if salt else b""


def chain_hash(parent: bytes, content: bytes) -> bytes:
    """128-bit name of a full block's content and everything before it (BLAKE2b; collisions are out of reach)."""
    return hashlib.blake2b(parent + content, digest_size=16).digest()


class BlockPool:
    """Blocks 1 .. num_blocks - 1. A block is referenced, cached (unreferenced, content kept) or plain free.

    Cached blocks count as free: the one unused for longest is given up when no plain block is left.
    """

    def __init__(self, num_blocks: int, prefix_cache: bool = True) -> None:
        self.total_blocks = num_blocks - 1
        self.prefix_cache = prefix_cache
        self._references = [0] * num_blocks
        self._plain: deque[int] = deque(range(1, num_blocks))
        # Unreferenced with content, oldest first. A plain dict would walk over all that left at its front.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._name_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._parent_of: dict[bytes, bytes] = {}  # the name before it; first blocks have none
        self._children_of: dict[bytes, set[bytes]] = {}

    @property
    def free_blocks(self) -> int:
        return len(self._plain) + len(self._cached)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each. Precondition: `count <= free_blocks`."""
        assert count <= self.free_blocks, f"{count} blocks asked for, {self.free_blocks} free"
        return [self._take() for _ in range(count)]

    def lookup(self, hashes: Sequence[bytes], seen_blocks: int | None = None) -> list[int]:
        """Blocks that hold the longest known prefix of `hashes`. Takes no reference.

        With `seen_blocks`, of a model whose windows see no more than that many full blocks back, only the last ones of
        the prefix must be there; the null block stands for those before.
        """
        if seen_blocks is not None:
            return self._lookup_seen(hashes, seen_blocks)
        found: list[int] = []
        for name in hashes:
            block = self._block_of.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def _lookup_seen(self, hashes: Sequence[bytes], seen_blocks: int) -> list[int]:
        there = [self._block_of.get(name, NULL_BLOCK) for name in hashes]
        unbroken = longest = 0
        for count, block in enumerate(there, start=1):
            unbroken = unbroken + 1 if block != NULL_BLOCK else 0
            if unbroken >= min(seen_blocks, count):
                longest = count
        hidden = max(0, longest - seen_blocks)
        return [NULL_BLOCK] * hidden + there[hidden:longest]

    def unreferenced(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` count as free now, and no longer would once shared."""
        return sum(block in self._cached for block in blocks)

    def share(self, blocks: Sequence[int]) -> None:
        """One more reference to blocks that `lookup` returned."""
        for block in filter(None, blocks):
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def register(self, block: int, name: bytes, parent: bytes | None = None) -> None:
        """Make a referenced block's content findable. The first block of a content keeps the name. `parent` names the
        block before it, from which it was computed."""
        if self.prefix_cache and block != NULL_BLOCK and name not in self._block_of and block not in self._name_of:
            self._block_of[name] = block
            self._name_of[block] = name
            if parent is not None:
                self._parent_of[name] = parent
                self._children_of.setdefault(parent, set()).add(name)

    def forget(self, blocks: Iterable[int]) -> None:
        """What these blocks hold may be wrong: nobody finds them again, nor any that was computed from them."""
        doubtful = [self._name_of[block] for block in blocks if block in self._name_of]
        while doubtful:
            name = doubtful.pop()
            doubtful += self._children_of.get(name, ())
            if (block := self._block_of.get(name)) is not None:
                self._take_name(block)
                if block in self._cached:
                    del self._cached[block]
                    self._plain.append(block)

    def forget_all(self) -> None:
        self.forget(list(self._name_of))

    def free(self, blocks: Sequence[int]) -> None:
        """Give one reference back for each; pass a sequence's blocks in order, its tail is evicted first."""
        for block in filter(None, reversed(blocks)):
            assert self._references[block] > 0, f"block {block} freed twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._name_of:
                    self._cached[block] = None
                else:
                    self._plain.append(block)

    def check_integrity(self) -> None:
        """Every block is in exactly one state and names agree both ways. Raises AssertionError."""
        plain, cached = set(self._plain), set(self._cached)
        held = {block for block, count in enumerate(self._references) if count > 0}
        assert len(plain) == len(self._plain), "a block is on the free list twice"
        assert len(plain) + len(cached) + len(held) == self.total_blocks, "a block is lost or in two states"
        assert plain | cached | held == set(range(1, self.total_blocks + 1)), "a block was lost"
        assert min(self._references) >= 0, "negative reference count"
        assert {block: name for name, block in self._block_of.items()} == self._name_of, "names disagree"
        assert cached <= set(self._name_of), "a cached block has no name"
        assert not plain & set(self._name_of), "a plain block has a name"
        children = {name: parent for parent, names in self._children_of.items() for name in names}
        assert children == self._parent_of, "parents and children disagree"
        assert set(children) <= set(self._block_of), "a name outlived its block"
        assert all(self._children_of.values()), "an empty set of children was kept"

    def _take(self) -> int:
        if self._plain:
            block = self._plain.popleft()
        else:
            block, _ = self._cached.popitem(last=False)
            self._take_name(block)
        self._references[block] = 1
        return block

    def _take_name(self, block: int) -> None:
        name = self._name_of.pop(block)
        del self._block_of[name]
        parent = self._parent_of.pop(name, None)
        if parent is not None:
            siblings = self._children_of[parent]
            siblings.remove(name)
            if not siblings:
                del self._children_of[parent]
