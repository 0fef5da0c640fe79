"""The doctor's verdict as a function of two samples of /metrics: one row of the table a limit, and what hides it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest
from tritandem.cli.doctor.report import document, text
from tritandem.cli.doctor.sample import Pair, parse
from tritandem.cli.doctor.verdict import Diagnosis, Severity, Verdict, judge

SECONDS = 10.0
COMPONENTS = ("tokenizer", "scheduler", "engine", "server")

Change = tuple[float, float]  # at the first sample, at the second
Series = dict[str, Change]


def cpu(**cores: tuple[float, float]) -> Series:
    """Busy and waiting cores by component, as counters over SECONDS."""
    found: Series = {}
    for name, (busy, waiting) in cores.items():
        labels = f'{{component="{name}",process="{name}_0"}}'
        found[f"tritandem_process_cpu_seconds_total{labels}"] = (7.0, 7.0 + busy * SECONDS)
        found[f"tritandem_run_queue_wait_seconds_total{labels}"] = (3.0, 3.0 + waiting * SECONDS)
    return found


def histogram(name: str, count: float, mean_s: float, labels: str = "") -> Series:
    return {f"{name}_count{labels}": (5.0, 5.0 + count), f"{name}_sum{labels}": (1.0, 1.0 + count * mean_s)}


IDLE: Series = {
    'tritandem_requests_total{outcome="COMPLETED",priority="normal"}': (40, 40),
    "tritandem_requests_running": (0, 0),
    "tritandem_requests_waiting": (0, 0),
    'tritandem_tokenization_queue_size{process="tokenizer_0_0"}': (0, 0),
    'tritandem_engine_steps_total{engine="engine"}': (900, 900),
    'tritandem_kv_blocks_used{engine="engine"}': (0, 0),
    'tritandem_kv_blocks_free{engine="engine"}': (1000, 1000),
    'tritandem_sequence_limit{engine="engine"}': (16, 16),
    "tritandem_client_connections_stalled": (0, 0),
    "tritandem_client_unsent_bytes": (0, 0),
    "tritandem_unsent_characters": (0, 0),
    "tritandem_cpu_pressure_seconds_total": (100, 100.2),
    "tritandem_cpu_throttled_seconds_total": (0, 0),
    "tritandem_server_cores": (4, 4),
    **cpu(tokenizer=(0, 0), scheduler=(0.01, 0), engine=(0, 0), server=(0.01, 0)),
}
# Requests come and go on a CPU, with slots, blocks and cores to spare.
LIGHT: Series = {
    **IDLE,
    'tritandem_requests_total{outcome="COMPLETED",priority="normal"}': (40, 60),
    "tritandem_requests_running": (2, 1),
    'tritandem_engine_sequences_running{engine="engine"}': (2, 1),
    'tritandem_engine_steps_total{engine="engine"}': (900, 1100),
    'tritandem_kv_blocks_used{engine="engine"}': (40, 20),
    'tritandem_kv_blocks_free{engine="engine"}': (960, 980),
    **histogram("tritandem_time_to_first_token_seconds", 20, 0.2, '{priority="normal"}'),
    **histogram("tritandem_tokenize_seconds", 20, 0.002),
    **histogram("tritandem_decode_step_seconds", 200, 0.04, '{engine="engine"}'),
    **histogram("tritandem_engine_idle_gap_seconds", 190, 0.001, '{engine="engine"}'),
    **cpu(tokenizer=(0.02, 0.0), scheduler=(0.1, 0.05), engine=(0.9, 0.1), server=(0.05, 0.02)),
}
QUEUED: Series = {
    "tritandem_requests_waiting": (9, 12),
    "tritandem_requests_running": (16, 16),
    'tritandem_engine_sequences_running{engine="engine"}': (16, 16),
}
ON_GPU: Series = {
    **LIGHT,
    'nv_gpu_utilization{gpu_uuid="GPU-1"}': (0.5, 0.6),
    **histogram("tritandem_decode_step_seconds", 2000, 0.002, '{engine="engine"}'),
    **histogram("tritandem_engine_idle_gap_seconds", 10, 0.001, '{engine="engine"}'),
    **histogram("tritandem_cuda_kernel_launch_latency_seconds", 2000, 0.0003, '{engine="engine",phase="decode"}'),
}
SHORT_OF_CORES = cpu(tokenizer=(0.05, 0.1), scheduler=(0.1, 0.2), engine=(0.5, 0.6), server=(0.1, 0.1))


@dataclass(frozen=True)
class Case:
    says: str
    series: Series
    verdict: Verdict
    severity: Severity = Severity.OK
    because: str = ""
    also: tuple[Verdict, ...] = field(default=())


CASES = (
    Case("no request ran", IDLE, Verdict.IDLE),
    Case("requests run and nothing is short", LIGHT, Verdict.UNHINDERED),
    Case("a GPU with room", ON_GPU, Verdict.UNHINDERED),
    Case(
        "texts wait for the tokenizer",
        {
            **LIGHT,
            'tritandem_tokenization_queue_size{process="tokenizer_0_0"}': (6, 4),
            **histogram("tritandem_tokenize_seconds", 20, 0.15),
            **cpu(tokenizer=(1.9, 0.1), engine=(0.9, 0.1)),
        },
        Verdict.TOKENIZATION,
        Severity.CRITICAL,
        "4 texts wait for the tokenizer, which uses 1.9 cores; tokenizing takes 75% of the time to first token",
    ),
    Case(
        "requests wait before the tokenizer, where Triton holds them",
        {
            **LIGHT,
            'nv_inference_pending_request_count{model="tokenizer",version="1"}': (30, 20),
            **histogram("tritandem_tokenize_seconds", 20, 0.15),
            **SHORT_OF_CORES,
        },
        Verdict.TOKENIZATION,
        Severity.CRITICAL,
        "20 texts wait",
        also=(Verdict.CORES,),
    ),
    Case(
        "texts wait for the tokenizer now and then, between the samples",
        {
            **LIGHT,
            'tritandem_tokenization_queue_size{process="tokenizer_0_0"}': (0, 1),
            'nv_inference_queue_duration_us{model="tokenizer",version="1"}': (5e6, 35e6),
            **histogram("tritandem_tokenize_seconds", 20, 0.15),
        },
        Verdict.TOKENIZATION,
        Severity.CRITICAL,
        "3 texts wait for the tokenizer",
    ),
    Case(
        "texts wait for the tokenizer, and what comes out of it is refused",
        {
            **IDLE,
            'tritandem_requests_total{outcome="REJECTED_INVALID",priority="normal"}': (40, 90),
            'tritandem_tokenization_queue_size{process="tokenizer_0_0"}': (6, 4),
            **SHORT_OF_CORES,
        },
        Verdict.TOKENIZATION,
        Severity.CRITICAL,
        "4 texts wait for the tokenizer, which uses 0.1 cores; nothing has come further",
        also=(Verdict.CORES,),
    ),
    Case(
        "texts in the tokenizer cost nothing beside the rest",
        {**LIGHT, 'tritandem_tokenization_queue_size{process="tokenizer_0_0"}': (6, 4)},
        Verdict.UNHINDERED,
    ),
    Case(
        "the GPU runs dry between steps",
        {**ON_GPU, **histogram("tritandem_engine_idle_gap_seconds", 1000, 0.003, '{engine="engine"}'), **QUEUED},
        Verdict.LAUNCH,
        Severity.CRITICAL,
        "the GPU idles 30% of the time between steps",
        also=(Verdict.GPU,),
    ),
    Case(
        "a launch takes as long as a step",
        {
            **ON_GPU,
            **histogram(
                "tritandem_cuda_kernel_launch_latency_seconds", 2000, 0.00195, '{engine="engine",phase="decode"}'
            ),
        },
        Verdict.LAUNCH,
        Severity.CRITICAL,
        "launching a step takes the host 1.95 ms",
    ),
    Case(
        "steps wait for the masks of structured answers",
        {
            **ON_GPU,
            **histogram("tritandem_grammar_masks_seconds", 1000, 0.004, '{engine="engine"}'),
            **histogram("tritandem_grammar_wait_seconds", 1000, 0.002, '{engine="engine"}'),
        },
        Verdict.GRAMMAR,
        Severity.CRITICAL,
        "steps wait 20% of the time for the masks of structured answers, which take 4.00 ms a step",
    ),
    Case(
        "on a CPU the time between steps is no launch",
        {**LIGHT, **histogram("tritandem_engine_idle_gap_seconds", 190, 0.02, '{engine="engine"}')},
        Verdict.UNHINDERED,
    ),
    Case(
        "runnable threads wait for cores",
        {**LIGHT, **SHORT_OF_CORES},
        Verdict.CORES,
        Severity.CRITICAL,
        "got 0.8 cores and waited for 1.0 more, most of it the engine (0.6)",
    ),
    Case(
        "a quota stops the server",
        {**LIGHT, "tritandem_cpu_throttled_seconds_total": (3, 5)},
        Verdict.CORES,
        Severity.CRITICAL,
        "the CPU quota stops the server 20% of the time",
    ),
    Case(
        "a loaded machine that leaves the server its cores",
        {**LIGHT, "tritandem_cpu_pressure_seconds_total": (100, 109)},
        Verdict.UNHINDERED,
    ),
    Case(
        "an idle server's threads wait a little",
        {**IDLE, **cpu(scheduler=(0.02, 0.05), server=(0.02, 0.05))},
        Verdict.IDLE,
    ),
    Case(
        "requests wait, KV blocks are gone and slots are left",
        {
            **LIGHT,
            **QUEUED,
            'tritandem_engine_sequences_running{engine="engine"}': (5, 6),
            'tritandem_kv_blocks_used{engine="engine"}': (970, 990),
            'tritandem_kv_blocks_free{engine="engine"}': (30, 10),
        },
        Verdict.MEMORY,
        Severity.WARNING,
        "9 requests wait while 97% of the KV blocks are in use",
        also=(Verdict.ENGINE,),
    ),
    Case(
        "sequences are preempted",
        {**LIGHT, 'tritandem_preemptions_total{engine="engine"}': (4, 24)},
        Verdict.MEMORY,
        Severity.WARNING,
        "2.0 sequences a second are preempted",
    ),
    Case(
        "full of blocks, but nobody waits",
        {
            **LIGHT,
            'tritandem_kv_blocks_used{engine="engine"}': (990, 990),
            'tritandem_kv_blocks_free{engine="engine"}': (10, 10),
        },
        Verdict.UNHINDERED,
    ),
    Case(
        "a client takes nothing, after the engine has long finished",
        {**IDLE, "tritandem_client_connections_stalled": (1, 1), "tritandem_client_unsent_bytes": (40960, 20480)},
        Verdict.DELIVERY,
        Severity.WARNING,
        "1 client connections are stalled; 20 KiB wait to be read",
    ),
    Case(
        "a client that stalled for a moment",
        {**LIGHT, "tritandem_client_connections_stalled": (1, 0), "tritandem_client_unsent_bytes": (40960, 0)},
        Verdict.UNHINDERED,
    ),
    Case(
        "text waits for busy senders",
        {**LIGHT, "tritandem_unsent_characters": (5000, 9000), **histogram("tritandem_send_seconds", 60000, 0.00025)},
        Verdict.DELIVERY,
        Severity.WARNING,
        "5000 characters wait for a sender, and 1.5 threads are sending",
    ),
    Case(
        "requests wait for an engine on the CPU",
        {**LIGHT, **QUEUED},
        Verdict.ENGINE,
        Severity.WARNING,
        "9 requests wait for the engine on this CPU, which runs 16 sequences",
    ),
    Case(
        "every slot is taken and nobody waits",
        {**LIGHT, 'tritandem_engine_sequences_running{engine="engine"}': (16, 15)},
        Verdict.ENGINE,
        Severity.OK,
        "this is how it should be",
    ),
    Case(
        "requests wait for the GPU",
        {**ON_GPU, **QUEUED, 'nv_gpu_utilization{gpu_uuid="GPU-1"}': (0.98, 1.0)},
        Verdict.GPU,
        Severity.WARNING,
        "9 requests wait for the GPU",
    ),
    Case(
        "a busy GPU that keeps up, seen by NVML alone",
        {
            **{name: change for name, change in ON_GPU.items() if not name.startswith("nv_")},
            'tritandem_gpu_utilization{engine="engine",gpu_uuid="GPU-1"}': (0.97, 0.95),
        },
        Verdict.GPU,
        Severity.OK,
        "the GPU is busy and nobody waits",
    ),
    Case("nobody asks an idle server that has no cores", {**IDLE, **SHORT_OF_CORES}, Verdict.IDLE),
    Case("a server that was restarted in between", {**IDLE, **cpu(engine=(-0.5, -0.2))}, Verdict.IDLE),
)


def exposition(series: Series, end: int) -> str:
    """As Triton writes it: histograms of the Python backend are counters by three names."""
    lines: dict[str, list[str]] = {}
    for name, change in series.items():
        lines.setdefault(name.partition("{")[0], []).append(f"{name} {change[end]}")
    return "".join(
        f"# TYPE {name} {'counter' if name.endswith(('_total', '_sum', '_count')) else 'gauge'}\n"
        + "\n".join(its)
        + "\n"
        for name, its in lines.items()
    )


def diagnose(series: Series) -> Diagnosis:
    samples = [parse(exposition(series, end), at_s=1000.0 + end * SECONDS) for end in (0, 1)]
    return judge(Pair(*samples))


def test_every_series_keeps_the_name_it_was_written_with() -> None:
    for name in ("nv_inference_count", "tritandem_send_seconds_count", "tritandem_engine_steps_total", "nv_a_gauge"):
        assert list(parse(exposition({name: (1, 2)}, 0), at_s=0.0).series) == [name]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.says)
def test_the_verdict(case: Case) -> None:
    found = diagnose(case.series)
    assert (found.finding.verdict, found.finding.severity) == (case.verdict, case.severity)
    assert case.because in found.finding.because
    assert tuple(finding.verdict for finding in found.also) == case.also


def test_every_verdict_is_reached() -> None:
    assert {case.verdict for case in CASES} == set(Verdict)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.says)
def test_what_is_wrong_comes_with_what_to_change(case: Case) -> None:
    finding = diagnose(case.series).finding
    assert bool(finding.change) == (finding.severity is not Severity.OK)


def test_a_server_before_its_first_request_is_idle() -> None:
    assert diagnose({"tritandem_requests_running": (0, 0)}).finding.verdict is Verdict.IDLE


@pytest.mark.parametrize(
    ("looks", "verdict"), [((0, 5, 5, 5, 0), Verdict.ENGINE), ((9, 0, 0, 0, 9), Verdict.UNHINDERED)]
)
def test_a_gauge_counts_for_what_it_was_most_of_the_time(looks: tuple[int, ...], verdict: Verdict) -> None:
    samples = [
        parse(exposition({**LIGHT, "tritandem_requests_waiting": (0, waiting)}, end=1), at_s=1000.0 + i)
        for i, waiting in enumerate(looks)
    ]
    first = parse(exposition({**LIGHT, "tritandem_requests_waiting": (looks[0], 0)}, end=0), at_s=1000.0)
    assert judge(Pair(first, samples[-1], samples[1:-1])).finding.verdict is verdict


def test_what_a_process_used_before_it_was_first_seen_is_no_load() -> None:
    engine = '{component="engine",process="engine_0"}'
    other = '{component="engine",process="engine_1"}'
    before = parse(f"tritandem_run_queue_wait_seconds_total{engine} 3\n", at_s=0.0)
    after = parse(
        f"tritandem_run_queue_wait_seconds_total{engine} 4\ntritandem_run_queue_wait_seconds_total{other} 90\n",
        at_s=10.0,
    )
    assert Pair(before, after).continued_rates("tritandem_run_queue_wait_seconds_total", "component") == {"engine": 0.1}


def test_the_table_and_the_document_hold_the_evidence() -> None:
    found = diagnose({**LIGHT, **SHORT_OF_CORES})
    printed = text(found, "http://127.0.0.1:8002/metrics").splitlines()
    assert printed[0].startswith("short of cores: ")
    rows = dict(line.strip().split("  ", 1) for line in printed if line.startswith("  ") and not line.startswith("  -"))
    assert rows["CPU of engine"].strip() == "0.50 cores, waited for 0.60"
    assert rows["decode step"].strip() == "40.00 ms on average"
    assert any(line.startswith("  - give the server more cores") for line in printed)
    known = json.loads(json.dumps(document(found, "url")))
    assert (known["verdict"], known["severity"], known["exit_code"]) == ("short of cores", "critical", 4)
    assert known["signals"]["components"]["engine"] == {"busy_cores": pytest.approx(0.5), "waiting_cores": 0.6}
    assert known["signals"]["gpu_utilisation"] is None
