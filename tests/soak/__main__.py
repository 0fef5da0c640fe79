"""Soak: twice the load that the server sustains, for a long time, with everything that goes wrong in a long time.

Starts `tritandem serve`, measures how many requests a second it answers, then offers twice as many: clients that
read, read slowly, leave, are cancelled, are stopped by id, ask for nonsense or are killed, over gRPC and HTTP, to the
ensemble and to the scheduler. Beside them hostile neighbours send bad bytes, forge what only the server's own processes
may say, and flood. In the first half model processes are killed or hang, a bounded number of times; the second half
shows whether memory grows. At the end every honest request must be accounted for, once, with the same outcome at its
client, in the server's log and in its metrics, and its text must be the one that it has alone; a hostile one must have
had an end and nothing else. Prints progress, a table and, as the last line, one JSON document; exits 1 when something
was lost, told twice or differently, wrong, harmed, hung, obeyed, or grew.

    python -m tests.soak --seconds 900
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any

from .clients import Clients
from .faults import Faults, read_fault
from .hostile import Hostile
from .ledger import EXAMPLES_KEPT, Audit, Ledger, audit, hostile_faults, table
from .load import Load
from .memory import Growth, Memory, growth
from .pauses import Pauses
from .served import READY, Served
from .server_words import gauge, outcome_counts, request_lines
from .solo import Solo
from .tiny_model import write_tiny_model

OVERLOAD = 2.0
FAULTS = "kill engine,hang scheduler,kill tokenizer,hang engine,kill engine_calls"
SECONDS_PER_FAULT = 100.0  # of a soak, because the server takes up to half a minute to come back
USERS = 24  # of the closed loop: more than the sequences of the engine on a CPU
SAMPLE_EVERY_S = 1.0
EDGE_SAMPLES = 10  # at the beginning and at the end of the flat part, whose medians are compared
QUIET_S = 30.0  # for the server to end what clients have left
METRICS_AGE_S = 5.0  # of the published metrics at most
SCHEDULER_SETTINGS = "[scheduler]\nmax_queued_requests = {queue}\n"
TINY_SETTINGS = "[engine]\nrandom_weights = true\n"


class Soak:
    """One run. The clients are replaced whenever the server was, by our hand or its own fault."""

    def __init__(self, args: argparse.Namespace, served: Served) -> None:
        self._args, self._served = args, served
        self._rng = random.Random(args.seed)
        self._ledger, self._hostile_ledger, self._solo = Ledger(), Ledger(), Solo()
        self._clients, self._hostile = self._new_clients()
        self._retired: list[Clients | Hostile] = []
        urls = {"grpc": served.grpc_url, "http": served.http_url}
        self._load = Load(self._ledger, lambda: self._clients, lambda: self._hostile, urls, self._rng)
        self._faults = Faults(served, self._server_is_back)
        self._memory: list[tuple[float, Memory]] = []
        self._begun_s = time.monotonic()

    async def run(self) -> dict[str, Any]:
        """Everything but the end of the server. Raises RuntimeError when the server does not come back."""
        args = self._args
        await self._clients.learn_answers()
        sustainable = await self._load.sustainable_rate(USERS, args.measure_seconds)
        rate = OVERLOAD * sustainable
        self._say(f"sustains {sustainable:.1f} requests/s; offering {rate:.1f}/s for {args.seconds:.0f} s")
        begin_s = time.monotonic()
        end_s = begin_s + args.seconds
        half_s = begin_s + args.seconds / 2
        watching = [asyncio.create_task(self._watch()), asyncio.create_task(self._faults.watch())]
        jobs = [self._load.offer(rate, end_s), self._load.kill_clients(args.kill_client_every, end_s)]
        if args.hostile_every:
            jobs.append(self._load.be_hostile(args.hostile_every, end_s))
        if args.faults:
            jobs.append(self._faults.run(args.faults, begin_s, half_s))
        loading = asyncio.create_task(self._all(jobs))
        try:
            await asyncio.wait({loading, *watching}, return_when=asyncio.FIRST_COMPLETED)
            for task in (*watching, loading):  # watching ends only with an error
                if task.done():
                    await task
        finally:
            for task in (loading, *watching):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):  # the first error is on its way
                    await task
        left = await self._quiet()
        page = self._served.metrics()
        for clients in (*self._retired, self._clients, self._hostile):
            await clients.close()
        self._say("every client has ended")
        return {"sustainable_rps": round(sustainable, 1), "offered_rps": round(rate, 1), "left": left, "page": page}

    async def _all(self, jobs: Iterable[Coroutine[Any, Any, None]]) -> None:
        await asyncio.gather(*jobs)
        await self._load.finish(QUIET_S + 90.0)
        await self._faults.whole()

    def unplanned(self) -> list[str]:
        return [f"the server was replaced though nobody had harmed it: {line}" for line in self._faults.unplanned]

    def growth(self) -> Growth | None:
        """From the beginning to the end of the flat part, which begins a while after the newest start, when pools have
        their size. None: it was too short."""
        starts = [when for when, line in self._served.said if READY in line]
        flat = [memory for when, memory in self._memory if when >= starts[-1] + self._args.settle_seconds]
        return growth(flat, EDGE_SAMPLES) if len(flat) > EDGE_SAMPLES else None

    def audit(self, lines: Iterable[Mapping[str, Any]]) -> Audit:
        return audit(self._ledger.entries.values(), lines, self._faults.outages)

    def hostile_faults(self) -> list[str]:
        return hostile_faults(self._hostile_ledger.entries.values(), self._faults.outages)

    def table(self) -> list[str]:
        return [
            *table(self._ledger.entries.values()),
            "",
            *table(self._hostile_ledger.entries.values()),
        ]

    def faults(self) -> dict[str, int]:
        return {"kill a client": self._load.victims_killed, **Counter(self._faults.done)}

    def compared(self) -> int:
        """Answers whose text was known from before."""
        return self._solo.compared

    def hostile(self) -> dict[str, int]:
        return dict(sorted(self._hostile_ledger.counts().items()))

    async def _server_is_back(self) -> None:
        self._retired += [self._clients, self._hostile]  # some requests may not have heard the end yet
        self._clients, self._hostile = self._new_clients()
        self._say("the server is back")

    def _new_clients(self) -> tuple[Clients, Hostile]:
        urls = self._served.grpc_url, self._served.http_url
        return Clients(self._ledger, self._solo, *urls, self._rng), Hostile(self._hostile_ledger, *urls, self._rng)

    async def _quiet(self) -> float:
        """Requests that the server still holds when every client has gone; waits for 0, which takes a moment."""
        end_s = time.monotonic() + QUIET_S
        while True:
            await asyncio.sleep(METRICS_AGE_S)
            page = await asyncio.to_thread(self._served.metrics)
            left = gauge(page, "tritandem_requests_running") + gauge(page, "tritandem_requests_waiting")
            if left == 0 or time.monotonic() > end_s:
                return left

    async def _watch(self) -> None:
        """Sample the memory; say how it goes."""
        told_s = time.monotonic()
        while True:
            await asyncio.sleep(SAMPLE_EVERY_S)
            memory = self._served.memory()
            now_s = time.monotonic()
            if memory is not None:
                self._memory.append((now_s, memory))
            if now_s - told_s >= self._args.tell_every and memory is not None:
                told_s = now_s
                counts = ", ".join(f"{word} {count}" for word, count in sorted(self._ledger.counts().items()))
                self._say(
                    f"sent {len(self._ledger.entries)}, open {self._load.open_requests()}; {counts}; "
                    f"private {memory.total_private:.0f} MB, shared {memory.shared:.1f} MB"
                )

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._begun_s:7.1f} s] {text}", flush=True)


def main(argv: list[str]) -> int:
    args = _parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "soak.toml"
        words = ["--engine-config", str(settings), "--drain-timeout-s", "30"]
        text = SCHEDULER_SETTINGS.format(queue=args.queue)
        if args.tiny:
            model = write_tiny_model(Path(args.model), Path(folder) / "tiny") if args.model else None
            words += ["--model", str(model)]
            text += TINY_SETTINGS
        elif args.model:
            words += ["--model", args.model]
        settings.write_text(text)
        log = args.log or Path(folder) / "triton.log"
        log.unlink(missing_ok=True)  # the server would append
        with Served(args.ports, *words, "--log-file", str(log)) as served:
            soak = Soak(args, served)
            facts = asyncio.run(watched(soak))
            exit_code = served.stop()
        return report(args, served, soak, facts, exit_code)


async def watched(soak: Soak) -> dict[str, Any]:
    with Pauses() as pauses:
        facts = await soak.run()
    return facts | {"longest_pause_of_the_clients_s": round(pauses.longest_s, 1)}


def report(args: argparse.Namespace, served: Served, soak: Soak, facts: dict[str, Any], exit_code: int) -> int:
    """Judge and print; the exit code of the program."""
    runs = request_lines(served.log)
    found = soak.audit(itertools.chain.from_iterable(runs))
    in_metrics = outcome_counts(facts.pop("page"))
    in_log = Counter(str(line["outcome"]) for line in runs[-1])
    faults = [*found.examples, *soak.hostile_faults()[:EXAMPLES_KEPT], *soak.unplanned()]
    if in_metrics != in_log:
        faults.append(f"the metrics of the last run say {dict(in_metrics)}, its log {dict(in_log)}")
    if facts["left"] != 0:
        faults.append(f"the server holds {facts['left']} requests though every client has gone")
    growth = soak.growth()
    if growth is None:
        faults.append("the server was not up long enough to see whether its memory grows")
    elif growth.private_mb > args.max_rss_growth_mb or growth.shared_mb > args.max_shm_growth_mb:
        faults.append(f"memory grew: {growth}")
    if leftover := served.leftover_shm():
        faults.append(f"left in /dev/shm: {leftover}")
    if exit_code != 0:
        faults.append(f"tritandem serve ended with exit code {exit_code}")
    print("\n".join([*soak.table(), "", *faults]))
    document = {
        "sent": found.sent,
        "outcomes": found.outcomes,
        "hung": found.hung,
        "duplicated": found.duplicated,
        "disagreeing": found.disagreeing,
        "lost": found.lost,
        "wrong": found.wrong,
        "compared": soak.compared(),
        "harmed": found.harmed,
        "hostile": soak.hostile(),
        "rss_growth_mb": growth and growth.private_mb,
        "shm_growth_mb": growth and growth.shared_mb,
        "rss_growth_mb_by_process": growth and growth.by_process,
        "faults": soak.faults(),
        "unplanned": len(soak.unplanned()),
        "seconds": args.seconds,
        **facts,
        "ok": found.clean and not faults,
    }
    print(json.dumps(document))
    return 0 if document["ok"] else 1


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--seconds", type=float, default=900.0, help="of load (default: %(default)s)")
    add(
        "--measure-seconds",
        type=float,
        default=15.0,
        help="of measuring the sustainable rate, after half as long (default: %(default)s)",
    )
    add("--model", default="smollm2", help="as for `tritandem serve` (default: %(default)s)")
    add("--tiny", action="store_true", help="random weights of two small layers, with the tokenizer of --model DIR")
    add("--ports", type=lambda t: [int(p) for p in t.split(",")], default=[18090, 18091, 18092],
        help="HTTP, gRPC, metrics (default: 18090,18091,18092)")  # fmt: skip
    add("--queue", type=int, default=64, help="requests that may wait (default: %(default)s)")
    add("--faults", type=lambda text: [read_fault(words) for words in text.split(",") if words],
        help=f"one after the other in the first half (default: {FAULTS}, as many as there is time for)")  # fmt: skip
    add("--hostile-every", type=float, default=2.0, help="seconds; 0: all neighbours are honest (default: %(default)s)")
    add("--kill-client-every", type=float, default=15.0, help="seconds (default: %(default)s)")
    add("--settle-seconds", type=float, help="after the last start, until memory must be flat (default: a fifteenth)")
    add("--max-rss-growth-mb", type=float, default=64.0)
    add("--max-shm-growth-mb", type=float, default=16.0)
    add("--tell-every", type=float, default=10.0, help="seconds between two lines of progress")
    add("--log", type=Path, metavar="FILE", help="keep Triton's log there")
    add("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.faults is None:
        args.faults = [read_fault(words) for words in FAULTS.split(",")][: int(args.seconds / SECONDS_PER_FAULT)]
    if args.settle_seconds is None:
        args.settle_seconds = args.seconds / 15
    return args


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the server ends with this program
    sys.exit(main(sys.argv[1:]))
