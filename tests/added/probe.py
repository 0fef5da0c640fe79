"""Run by `tests/test_to_change.py` over a changed copy of the packages: says in one JSON object what followed."""

from __future__ import annotations

import json
import sys
from itertools import islice
from typing import Any

import numpy as np
import torch
import tritandem
from tritandem.config import SchedulerConfig
from tritandem.contracts.errors import InvalidRequest
from tritandem.contracts.fields import SamplingParams
from tritandem.contracts.requests import EngineRequest, PriorityClass
from tritandem.contracts.stream import LoadSnapshot
from tritandem.engine.host.core import EngineCore
from tritandem.engine.host.outbox import Outbox
from tritandem.engine.rows.layout import SAMPLING
from tritandem.engine.rows.state import SlotState
from tritandem.engine.sampling.sampler import sample
from tritandem.engine.step import SamplingFeatures, SlotInit
from tritandem.scheduler import admission, messages
from tritandem.scheduler.core import SchedulerCore
from tritandem.scheduler.desk import Desk
from tritandem.scheduler.policy.waiting import PolicyConfig, Waiting
from tritandem.scheduler.waiting_queue import WaitingQueue
from tritandem.telemetry.families import FAMILIES
from tritandem.telemetry.registry import Registry
from tritandem.tokenizer import TokenizerStats
from tritandem.triton_io.hops.engine_wire import pack_submit, unpack_submit
from tritandem.triton_io.request import schema
from tritandem.triton_io.request.sampling_fields import merge
from tritandem.triton_io.request.tensor_values import Inputs
from tritandem_loadtest.arrivals import schedule
from tritandem_loadtest.config import RunConfig

from tests.fakes import triton_python_backend_utils as pb_utils
from tests.fakes.arithmetic_runner import ArithmeticRunner
from tests.fakes.scheduling import request
from tools.pages import generated

PROMPT = np.arange(3, dtype=np.int32)


def sampling() -> dict[str, Any]:
    """From the tensor of a client to the token that a row draws."""
    asked = merge(Inputs({"top_n_sigma": np.array([[0.25]], np.float32)}), {}).sampling(8, None)
    header, tokens = pack_submit([EngineRequest(5, PROMPT, asked, (), ())])
    arrived = unpack_submit(header, tokens)[0].sampling
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1))
    drawn = {}
    for n in (0.001, 0.0):
        state, drawn[n] = SlotState.empty(1, 1, 50, "cpu"), set()
        for seed in range(40):
            params = SamplingParams(temperature=1.0, seed=seed, top_n_sigma=n)  # type: ignore[call-arg]
            state.init_row(SlotInit(0, PROMPT, params, (), (), PROMPT[:0]), 64)
            drawn[n].add(int(sample(logits, torch.tensor([0]), state, SamplingFeatures(params.features)).tokens))
    return {
        "arrived": arrived.top_n_sigma,  # type: ignore[attr-defined]
        "temperature": arrived.temperature,
        "features": sorted(arrived.features),
        "in row": [field.code for field in SAMPLING if field.name == "top_n_sigma"],
        "kept": [drawn[0.001] == {int(logits.argmax())}, len(drawn[0.0]) > 5],
    }


def public() -> dict[str, Any]:
    table = generated.tensors(schema.INPUTS).splitlines()
    return {
        "inputs": {tensor.name: tensor.dtype for tensor in schema.INPUTS},
        "rows": [line for line in table if "top_n_sigma" in line or "spoon" in line],
        "read": Inputs({"spoon": np.array([[True]])}).flag("spoon"),
    }


def order() -> list[int | None]:
    queue: WaitingQueue[int] = WaitingQueue(PolicyConfig(10**10))
    for number in range(3):
        queue.push(Waiting(number, PriorityClass.NORMAL, "", number, None, 1), number, 10)
    taken = []
    while (number := queue.peek(10)) is not None:
        queue.take(number)
        taken.append(number)
    return taken


def admitted() -> list[bool]:
    backlog = admission.Backlog(admission.QueueState(), admission.QueueState(), LoadSnapshot())
    limits = admission.AdmissionLimits(9, 999)
    told = [admission.decide(request(1, prompt_tokens=count), backlog, limits, 0) for count in (12, 13)]
    return [isinstance(error, InvalidRequest) for error in told]


def begun() -> list[int]:
    """Sequences that run after each of the first steps."""
    core = EngineCore(ArithmeticRunner(num_slots=4, num_blocks=40), Outbox())
    for seq_id in range(3):
        core.add(EngineRequest(seq_id, PROMPT, SamplingParams(max_tokens=30)), accepted_ns=1)
    counts = []
    for _ in range(3):
        core.step()
        counts.append(len(core.running))
    return counts


def message() -> int:
    core = SchedulerCore([], Desk(100, lambda ticket: None), SchedulerConfig(), 0)
    core.take(messages.Nudged(3), 0)  # type: ignore[attr-defined]
    return core._moved


def metric() -> dict[str, Any]:
    sys.modules["triton_python_backend_utils"] = pb_utils
    from tritandem.triton_io.reports.metric_sink import TritonMetricSink
    from tritandem.triton_io.reports.tokenizer_report import TokenizerReport

    registry = Registry()
    TokenizerReport(registry, "t", TokenizerStats)()
    TritonMetricSink().publish(registry.changes())
    published = pb_utils.MetricFamily.values["tritandem_spoons_total"]
    return {
        "declared": [family.help for family in FAMILIES if "spoons" in family.name],
        "published": [f"tritandem_spoons_total {dict(labels)} {value:g}" for labels, value in published.items()],
    }


if __name__ == "__main__":
    header, _ = pack_submit([EngineRequest(77, PROMPT, SamplingParams(), (), ())])
    facts = {
        "packages": [tritandem.__file__, sys.modules["tritandem_loadtest"].__file__],
        "sampling": sampling(),
        "public": public(),
        "order": order(),
        "admitted": admitted(),
        "begun": begun(),
        "message": message(),
        "metric": metric(),
        "wire": [int(header[2]), unpack_submit(header, PROMPT)[0].seq_id],
        "default": [SchedulerConfig().default_max_tokens, generated.settings()],
        "arrivals": [a.at_s for a in islice(schedule(RunConfig(arrival="twice", duration_s=9.0)), 4)],
    }
    print(json.dumps(facts))
