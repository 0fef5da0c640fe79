"""Header compression of HTTP/2 (RFC 7541), as far as a gRPC client needs it.

Writes literals only. Reads static and dynamic entries; Huffman-coded strings, which gRPC servers do not send but
some proxies do, are refused by name. Knows nothing about frames or sockets.
"""

from __future__ import annotations

from collections import deque

_STATIC = (
    ":authority|:method GET|:method POST|:path /|:path /index.html|:scheme http|:scheme https|:status 200|:status 204|"
    ":status 206|:status 304|:status 400|:status 404|:status 500|accept-charset|accept-encoding gzip, deflate|"
    "accept-language|accept-ranges|accept|access-control-allow-origin|age|allow|authorization|cache-control|"
    "content-disposition|content-encoding|content-language|content-length|content-location|content-range|content-type|"
    "cookie|date|etag|expect|expires|from|host|if-match|if-modified-since|if-none-match|if-range|if-unmodified-since|"
    "last-modified|link|location|max-forwards|proxy-authenticate|proxy-authorization|range|referer|refresh|retry-after|"
    "server|set-cookie|strict-transport-security|transfer-encoding|user-agent|vary|via|www-authenticate"
)
_STATIC_TABLE = [tuple((entry + " ").split(" ", 1)) for entry in _STATIC.split("|")]
_ENTRY_OVERHEAD_BYTES = 32


class HuffmanRefused(Exception):
    """The peer compresses header strings with Huffman codes."""


def encode(headers: list[tuple[str, str]]) -> bytes:
    """A header block of literals that leave the peer's table alone (section 6.2.2)."""
    block = bytearray()
    for name, value in headers:
        block.append(0x00)
        for text in (name.encode(), value.encode()):
            block += encode_integer(len(text), 7) + text
    return bytes(block)


def encode_integer(value: int, prefix_bits: int) -> bytes:
    """Section 5.1; the bits above the prefix are 0."""
    limit = (1 << prefix_bits) - 1
    if value < limit:
        return bytes([value])
    out, value = bytearray([limit]), value - limit
    while value >= 128:
        out.append(value % 128 + 128)
        value //= 128
    out.append(value)
    return bytes(out)


def decode_integer(block: bytes, at: int, prefix_bits: int) -> tuple[int, int]:
    """(value, offset behind it)."""
    limit = (1 << prefix_bits) - 1
    value, at, shift = block[at] & limit, at + 1, 0
    if value < limit:
        return value, at
    while True:
        byte = block[at]
        value, at, shift = value + ((byte & 127) << shift), at + 1, shift + 7
        if byte < 128:
            return value, at


class Decoder:
    """One per connection: the dynamic table lives as long as it does."""

    def __init__(self, max_table_bytes: int = 4096) -> None:
        self._entries: deque[tuple[str, str]] = deque()
        self._max_bytes = max_table_bytes
        self._bytes = 0

    def decode(self, block: bytes) -> dict[str, str]:
        """Header name -> value (the last one wins). Raises HuffmanRefused, and IndexError for a broken block."""
        headers: dict[str, str] = {}
        at = 0
        while at < len(block):
            first = block[at]
            if first & 0x80:  # indexed
                index, at = decode_integer(block, at, 7)
                name, value = self._entry(index)
            elif first & 0xE0 == 0x20:  # the table's size changes
                self._max_bytes, at = decode_integer(block, at, 5)
                self._evict()
                continue
            else:
                remembered = bool(first & 0x40)
                index, at = decode_integer(block, at, 6 if remembered else 4)
                if index:
                    name = self._entry(index)[0]
                else:
                    name, at = self._string(block, at)
                value, at = self._string(block, at)
                if remembered:
                    self._entries.appendleft((name, value))
                    self._bytes += _ENTRY_OVERHEAD_BYTES + len(name) + len(value)
                    self._evict()
            headers[name] = value
        return headers

    def _entry(self, index: int) -> tuple[str, str]:
        if index == 0:
            raise IndexError("header index 0")
        if index <= len(_STATIC_TABLE):
            name, value = _STATIC_TABLE[index - 1]
            return name, value.rstrip(" ")
        return self._entries[index - len(_STATIC_TABLE) - 1]

    def _string(self, block: bytes, at: int) -> tuple[str, int]:
        if block[at] & 0x80:
            raise HuffmanRefused("the peer sends Huffman-coded headers")
        size, at = decode_integer(block, at, 7)
        return block[at : at + size].decode("latin-1"), at + size

    def _evict(self) -> None:
        while self._bytes > self._max_bytes:
            name, value = self._entries.pop()
            self._bytes -= _ENTRY_OVERHEAD_BYTES + len(name) + len(value)
