"""Claims about seeing clients that do not take what they are sent: real sockets, the kernel's own tables."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tritandem.machine.connections import ClientConnections, ConnectionWatch

# A server in a process of its own, so that the test's other sockets do not count: it fills what it accepts.
FILLER = """
import socket
listening = socket.socket()
listening.bind(("127.0.0.1", 0))
listening.listen()
print(listening.getsockname()[1], flush=True)
client, _ = listening.accept()
client.setblocking(False)
try:
    while True:
        client.send(b"x" * 65536)
except BlockingIOError:
    print("full", flush=True)
input()
"""


@pytest.fixture
def filler() -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", FILLER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.communicate("\n", timeout=60)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def read_until(watch: ConnectionWatch, stalled: int) -> ClientConnections:
    """The kernel starts probing a closed window some 200 ms after it closed."""
    end_s = time.monotonic() + 60
    while (found := watch.read()) is None or found.stalled != stalled:
        assert time.monotonic() < end_s, found
        os.sched_yield()
    return found


def test_a_client_that_reads_nothing_is_stalled_until_it_reads(filler: subprocess.Popen[str]) -> None:
    port, watch = int(line(filler)), ConnectionWatch(filler.pid)
    assert watch.read() == ClientConnections(open=0, stalled=0, unsent_bytes=0)
    with socket.create_connection(("127.0.0.1", port)) as client:
        assert line(filler) == "full"
        stalled = read_until(watch, stalled=1)
        assert stalled.open == 1
        assert stalled.unsent_bytes > 0
        assert ConnectionWatch(filler.pid, (port, 1)).read() == stalled
        assert ConnectionWatch(filler.pid, (1,)).read() == ClientConnections(open=0, stalled=0, unsent_bytes=0)
        assert ConnectionWatch(filler.pid, besides=(port,)).read() is None
        client.settimeout(60)
        left = stalled.unsent_bytes
        while left > 0:
            left -= len(client.recv(1 << 20))
        read_until(watch, stalled=0)


def test_a_process_that_listens_nowhere_tells_nothing() -> None:
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert ConnectionWatch(other.pid).read() is None
    other.communicate(b"\n", timeout=60)


def test_a_kernel_without_these_tables_tells_nothing(tmp_path: Path) -> None:
    assert ConnectionWatch(1, proc=tmp_path).read() is None
