"""A client process that is meant to be killed: streams one long answer for every id it was given.

Run as `python victim.py PROTOCOL MODEL URL ID...`; says `streaming` when every answer has begun.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import Any

from tritandem_client import Client, TritandemClientError

# With a deadline, because the steps of an ensemble never hear of a client that has died.
LONG: Any = {"max_tokens": 2000, "sampling_parameters": {"ignore_eos": True}, "deadline_ms": 20_000}

LINGERS_S = 60.0  # for the kill, should every answer be refused or complete before it


def main(protocol: str, model: str, url: str, request_ids: list[str]) -> None:
    begun = threading.Barrier(len(request_ids) + 1)

    def read(request_id: str) -> None:
        first = True
        with contextlib.suppress(TritandemClientError):
            for _ in client.stream("1, 2, 3,", request_id=request_id, **LONG):
                if first:
                    begun.wait()
                first = False
        if first:
            begun.wait()

    with Client(url, protocol=protocol, model=model) as client:  # type: ignore[arg-type]
        readers = [threading.Thread(target=read, args=(request_id,)) for request_id in request_ids]
        for reader in readers:
            reader.start()
        begun.wait()
        print("streaming", flush=True)
        for reader in readers:
            reader.join()
        time.sleep(LINGERS_S)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
