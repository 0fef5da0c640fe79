"""Source trees against each other through Triton: what a change costs, without the noise between two runs.

One server of each tree, all at once where the machine has room (a GPU may hold only one model: `--one-at-a-time`), and
short loads in turns. The load generator is this tree's. The first round warms up and does not count. Prints medians,
their ratios to the first tree and, as the last line, one JSON document. A tree is a checkout, for example of
`git archive REVISION | tar x -C FOLDER`.

    python -m tritandem_bench.revisions --trees /tmp/old . --model smollm2 --streams 1,64 --seconds 5 --rounds 6
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from tritandem_loadtest import run

from .word_loads import closed, word_load

WARMUP_S = 1.0
READY_S = 600.0
STOP_S = 60.0
FIGURES = ("output_tokens_per_s", "ttft_ms_p50", "e2e_ms_p50", "itl_chunk_ms_p99", "pause_ms_p50", "pause_ms_max")


def environment_of(tree: Path, folder: Path) -> Path:
    """The interpreter of an environment that has `tree`'s sources before everything that this one has."""
    venv.create(folder, with_pip=False)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "lib" / version / "site-packages"
    sources = [tree / "backend_src", tree / "client", tree / "loadtest"]
    (site / "00_tree.pth").write_text("".join(f"{path.resolve()}\n" for path in sources))
    ours = Path(sys.prefix) / "lib" / version / "site-packages"
    (site / "99_rest.pth").write_text(f"import site; site.addsitedir({str(ours)!r})\n")
    return folder / "bin" / "python"


@contextmanager
def served(tree: str, python: Path, port: int, args: argparse.Namespace) -> Iterator[str]:
    """A server of that tree; its gRPC address. Raises RuntimeError when it does not come up."""
    words = [str(python), "-c", "import sys; from tritandem.cli.main import main; sys.exit(main())", "serve"]
    words += ["--model", args.model, "--no-restart", *args.serve]
    for number, name in enumerate(("http", "grpc", "metrics")):
        words += [f"--{name}-port", str(port + number)]
    if (Path(tree) / "backend_src" / "tritandem" / "front").is_dir():
        words += ["--openai-port", "0"]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + READY_S
            while not _ready(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    output.seek(0)
                    raise RuntimeError(f"{tree} did not come up:\n{output.read()[-2000:]}")
                time.sleep(0.5)
            yield f"localhost:{port + 1}"
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            process.kill()
            process.wait()


def _ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://localhost:{port}/v2/health/ready", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def measure(url: str, streams: int, seed: int, args: argparse.Namespace) -> dict[str, float]:
    times = {"duration_s": WARMUP_S + args.seconds, "warmup_s": WARMUP_S}
    processes = max(1, min(args.processes, streams // 16))
    load = word_load(url, "scheduler", args.words, args.tokens, **closed(streams, processes), **times, seed=seed)
    summary = run(load).summary
    if not summary["completed"] or summary["failed"]:
        raise RuntimeError(f"{url}: {summary['completed']} completed, {summary['failures']} failed")
    figures = {name: summary[name] for name in FIGURES if summary[name] is not None}
    figures["tokens_per_response"] = summary["output_tokens"] / summary["responses"]
    stages = {stage: spread["p50"] for stage, spread in summary["server_ms"].items() if "p50" in spread}
    return {**figures, **{f"{stage}_ms_p50": value for stage, value in stages.items()}}


def main(argv: list[str]) -> int:
    args = _parse(argv)
    measured: dict[tuple[str, int], list[dict[str, float]]] = {}

    def load_all(tree: str, url: str, turn: int) -> None:
        for streams in args.streams:
            figures = measure(url, streams, turn * 10_000 + streams, args)
            if turn:
                measured.setdefault((tree, streams), []).append(figures)

    with tempfile.TemporaryDirectory() as folder:
        pythons = {tree: environment_of(Path(tree), Path(folder) / str(i)) for i, tree in enumerate(args.trees)}
        if args.one_at_a_time:
            for turn in range(args.rounds + 1):
                for tree in args.trees:
                    with served(tree, pythons[tree], args.port, args) as url:
                        load_all(tree, url, turn)
        else:
            with ExitStack() as servers:
                urls = {
                    tree: servers.enter_context(served(tree, python, args.port + 10 * number, args))
                    for number, (tree, python) in enumerate(pythons.items())
                }
                for turn in range(args.rounds + 1):
                    for tree in args.trees if turn % 2 else reversed(args.trees):
                        load_all(tree, urls[tree], turn)
    rows = [row for streams in args.streams for row in table(args.trees, streams, measured)]
    for row in rows:
        values = " ".join(f"{value:>12.3f} ({row['ratios'][i]:.3f})" for i, value in enumerate(row["medians"]))
        print(f"{row['streams']:>5} {row['figure']:<24}{values}")
    cores = len(os.sched_getaffinity(0))
    print(json.dumps({"trees": args.trees, "cores": cores, "load": os.getloadavg()[0], "rows": rows}))
    return 0


def table(
    trees: list[str], streams: int, measured: dict[tuple[str, int], list[dict[str, float]]]
) -> Iterator[dict[str, Any]]:
    """One row a figure that every tree has: the trees' medians and their ratios to the first tree's."""
    rounds = [measured[tree, streams] for tree in trees]
    for figure in rounds[0][0]:
        if all(figure in one for of_tree in rounds for one in of_tree):
            medians = [round(statistics.median(one[figure] for one in of_tree), 3) for of_tree in rounds]
            ratios = [round(median / medians[0], 4) if medians[0] else 0.0 for median in medians]
            yield {"streams": streams, "figure": figure, "medians": medians, "ratios": ratios}


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--trees", nargs="+", required=True, metavar="FOLDER", help="the first is what the others are compared with")
    add("--model", required=True, help="as for `tritandem serve`")
    add("--serve", nargs="*", default=[], metavar="WORD", help="further words for `tritandem serve` of every tree")
    add("--streams", type=lambda text: [int(n) for n in text.split(",")], default=[1, 64, 256])
    add("--words", type=int, default=300)
    add("--tokens", type=int, default=128)
    add("--seconds", type=float, default=5.0, help="measured, of each load in each round")
    add("--rounds", type=int, default=6)
    add("--processes", type=int, default=4, help="load-generating processes at most")
    add("--one-at-a-time", action="store_true", help="start the servers in turns, each for its loads alone")
    add("--port", type=int, default=18190, help="ten free ports a tree from here on")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
