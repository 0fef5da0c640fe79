"""Do clients take what they are sent? Reads the kernel's tables of TCP connections.

A connection is stalled while its peer's window is closed: the kernel probes it instead of sending. A client that keeps
reading its socket but not its gRPC stream is not seen here: what it leaves lies in the server's memory.
Sources: /proc/PID/net/tcp and tcp6, /proc/PID/fd for the ports that a process listens on. Nothing here raises.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_ESTABLISHED, _LISTENING = "01", "0A"
_ZERO_WINDOW_PROBE = "04"


class _Row(NamedTuple):
    port: int  # the local one
    unsent_bytes: int  # not acknowledged
    timer: str
    inode: str


@dataclass(frozen=True, slots=True)
class ClientConnections:
    """Now, over all connections to the ports of one server."""

    open: int
    stalled: int
    unsent_bytes: int


class ConnectionWatch:
    """The connections to these `ports` of process `pid`, or to whatever it listens on but `besides`. One thread at a
    time."""

    def __init__(
        self, pid: int, ports: Collection[int] = (), proc: Path = Path("/proc"), besides: Collection[int] = ()
    ) -> None:
        self._folder = proc / str(pid)
        self._ports, self._besides = frozenset(ports), frozenset(besides)

    def read(self) -> ClientConnections | None:
        """None while no port is known, or where the kernel does not tell."""
        lines = self._lines()
        if lines is None:
            return None
        if not self._ports:  # they are opened once, when the models have loaded
            inodes = self._socket_inodes()
            listening = [_row(line) for line in lines if line.split(None, 4)[3] == _LISTENING]
            self._ports = frozenset(row.port for row in listening if row.inode in inodes) - self._besides
        if not self._ports:
            return None
        established = [_row(line) for line in lines if line.split(None, 4)[3] == _ESTABLISHED]
        ours = [row for row in established if row.port in self._ports]
        return ClientConnections(
            open=len(ours),
            stalled=sum(row.timer == _ZERO_WINDOW_PROBE for row in ours),
            unsent_bytes=sum(row.unsent_bytes for row in ours),
        )

    def _lines(self) -> list[str] | None:
        """None where there is no table."""
        found: list[str] | None = None
        for name in ("tcp", "tcp6"):
            try:
                rows = (self._folder / "net" / name).read_text().splitlines()[1:]
            except OSError:
                continue
            found = rows if found is None else found + rows
        return found

    def _socket_inodes(self) -> frozenset[str]:
        found = set()
        try:
            for entry in os.scandir(self._folder / "fd"):
                try:
                    target = os.readlink(entry.path)
                except OSError:
                    continue
                if target.startswith("socket:["):
                    found.add(target[8:-1])
        except OSError:
            pass
        return frozenset(found)


def _row(line: str) -> _Row:
    # slot, local, remote, state, tx:rx queue, timer:expiry, retransmits, uid, timeout, inode, ...
    columns = line.split()
    port, unsent = columns[1].rsplit(":", 1)[1], columns[4].split(":")[0]
    return _Row(int(port, 16), int(unsent, 16), columns[5].split(":")[0], columns[9])
