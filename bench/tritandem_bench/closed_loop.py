"""The load of benchmarks that keep a number of streams busy: prompts of words, answers of full length."""

from __future__ import annotations

import argparse

from tritandem_loadtest import RunConfig

WARMUP_S = 3.0


def closed_loop(url: str, model: str, streams: int, args: argparse.Namespace) -> RunConfig:
    """`args`: processes, words, tokens and seconds (measured, after WARMUP_S)."""
    return RunConfig(
        url=url,
        model=model,
        arrival="closed",
        users=streams,
        processes=args.processes,
        workload="words",
        prompt_words=str(args.words),
        output_tokens=str(args.tokens),
        ignore_eos=True,
        duration_s=WARMUP_S + args.seconds,
        warmup_s=WARMUP_S,
    )
