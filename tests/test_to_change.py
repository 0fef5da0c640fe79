"""The table "to change ... edit ..." is true, row by row: each change is made in a copy, in the files that its row
names and no others, and what should follow does."""

from __future__ import annotations

import ast
import copy
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from tritandem.config import EngineConfig
from tritandem.contracts.fields import FIELDS
from tritandem.engine.attention import registry as attention
from tritandem.engine.attention.interface import AttentionBatch
from tritandem.engine.model.device_forward import DeviceForward
from tritandem.engine.model.linear import registry as linear
from tritandem.engine.model.linear.interface import Unfusable
from tritandem.engine.model.loader import LoadedModel
from tritandem.engine.model.packed import KvCache
from tritandem.engine.model.support import inspect_model
from tritandem.engine.rows.state import SlotState
from tritandem.triton_io.request import schema
from tritandem_client.request import Options
from tritandem_client.tensors import INPUT_TYPES

from tests.added import double_product
from tests.added.loop_attention import LoopAttention
from tests.engine.engine_rig import VOCAB, Rig, generate, make_runner, reference_model, request
from tests.triton_io.test_schema import config, declared

ROOT = Path(__file__).resolve().parents[1]
ADDED = ROOT / "tests" / "added"
B, LOADTEST = "backend_src/tritandem", "loadtest/tritandem_loadtest"
NEW = ""  # instead of an anchor: the file is new
END = "\n"  # likewise: at its end

FIELD = """    top_n_sigma: float = _field(
        0.0, 0.0, 100.0, "a number in [0, 100]; 0 is off",
        tensor="FP32", shown="0", range="0..100", doc="keep logits near the best", row="f",
        feature="top_n_sigma", draws=lambda n: n > 0,
    )
"""
URGENCY = '''
def urgency(deadline_ns: int | None, arrived_ns: int, head_start_ns: int) -> tuple[int, int]:
    """Last come, first served."""
    return 0, -arrived_ns
'''
DECIDE = '''
_before = decide


def decide(request, backlog, limits, now_ns):
    """No prompt of thirteen tokens."""
    unlucky = InvalidRequest("text_input", "13 tokens", "another number")
    return unlucky if len(request.input_ids) == 13 else _before(request, backlog, limits, now_ns)
'''
PLAN = '''
from dataclasses import replace
from itertools import islice

_before = plan


def plan(state, budget):
    """One sequence begins in a step."""
    return _before(replace(state, waiting=islice(state.waiting, 1)), budget)
'''
NUDGED = '''@dataclass(frozen=True, slots=True)
class Nudged:
    """From a test."""

    times: int


'''
HANDLED = "            case Nudged(times):\n                self._moved = times\n"
SPOON = '    _one("spoon", "BOOL", "false", "any", "stir"),\n'
PATH_OF_URGENCY = next(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / B / "scheduler" / "policy").glob("*.py")
    if "def urgency(" in path.read_text()
)
# By row: file, before what (the first place), what. Two rows have tests of their own, which register what they add.
CHANGES: dict[str, tuple[tuple[str, str, str], ...]] = {
    "the order of waiting requests": ((PATH_OF_URGENCY, END, URGENCY),),
    "what is admitted": ((f"{B}/scheduler/admission.py", END, DECIDE),),
    "what a step does": ((f"{B}/engine/host/batcher.py", END, PLAN),),
    "a sampling parameter": (
        (f"{B}/contracts/fields.py", "    seed: int = _field(", FIELD),
        (f"{B}/engine/sampling/top_n_sigma.py", NEW, (ADDED / "top_n_sigma.py").read_text()),
        (f"{B}/engine/sampling/sampler.py", "# (scores float32", "from .top_n_sigma import keep_near\n\n"),
        (f"{B}/engine/sampling/sampler.py", '("filtered", filter_draw)', '("top_n_sigma", keep_near), '),
    ),
    "a message to the scheduling thread": (
        (f"{B}/scheduler/messages.py", "Message: TypeAlias", NUDGED),
        (f"{B}/scheduler/messages.py", "Arrived | Ended", "Nudged | "),
        (f"{B}/scheduler/core.py", "            case DrainBegun():", HANDLED),
        (f"{B}/scheduler/core.py", "from .messages import ", "from .messages import Nudged\n"),
    ),
    "a public tensor": (
        (f"{B}/triton_io/request/schema.py", '    _one("priority"', SPOON),
    ),
    "the layout of a message": (
        (f"{B}/triton_io/hops/engine_wire.py", "request.seq_id, *lengths", "-"),
        (f"{B}/triton_io/hops/engine_wire.py", "seq_id,\n                prompt_ids", "-"),
    ),
    "a metric": (
        (f"{B}/telemetry/families.py", "FAMILIES: tuple", 'SPOONS = _counter("spoons", "Stirring", "process")\n'),
        (
            f"{B}/triton_io/reports/tokenizer_report.py",
            "        registry.set(f.TOKENIZER_FAST",
            "        registry.add(f.SPOONS, 2, process=process)\n",
        ),
    ),
    "a setting": ((f"{B}/config.py", "256, \"budget of an answer", "7 * "),),
    "arrivals or workloads": (
        (f"{LOADTEST}/config.py", '"constant", "poisson"', '"twice", '),
        (
            f"{LOADTEST}/arrivals.py",
            '    if config.arrival == "constant"',
            '    if config.arrival == "twice":\n        return (i // 2 for i in count())\n',
        ),
    ),
}  # fmt: skip
REGISTERED = {
    "an attention backend": ("engine/attention/", "engine/attention/registry.py"),
    "a format of weights": ("engine/model/linear/", "engine/model/linear/registry.py"),
    "a field of the OpenAI API": ("front/fields.py",),
    "an endpoint of it": ("front/chat.py",),
    "a kind of grammar": ("contracts/grammars.py", "grammar/source.py", "triton_io/request/guides.py"),
    "a name, tensors or defaults for clients of another server": (
        "tools/repository.py",
        "triton_io/request/dialects.py",
    ),
}


def rows() -> dict[str, str]:
    """What to change -> what to edit."""
    texts = [path.read_text() for path in (ROOT / "docs" / "architecture.md", ROOT / "README.md") if path.exists()]
    table = next(text.split("| to change | edit |\n|---|---|\n")[1] for text in texts if "| to change | edit |" in text)
    lines = table.split("\n\n")[0].splitlines()
    return dict(re.fullmatch(r"\| (.*?) \| (.*) \|", line).groups() for line in lines)  # type: ignore[union-attr, misc]


def row(start: str) -> str:
    [edit] = [edit for what, edit in rows().items() if what.startswith(start)]
    return edit


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the packages say once every change has been made in a copy of them."""
    home = tmp_path_factory.mktemp("changed")
    for package in (B, LOADTEST):
        shutil.copytree(ROOT / package, home / Path(package).name, ignore=shutil.ignore_patterns("__pycache__"))
    for file, before, text in (edit for edits in CHANGES.values() for edit in edits):
        path = home / Path(file).relative_to(Path(file).parents[-2])
        old = "" if before == NEW else path.read_text()
        assert before == NEW or before in old, f"{file} has no place for {text!r}"
        path.write_text(old + text if before in (NEW, END) else old.replace(before, text + before, 1))
    env = {**os.environ, "PYTHONPATH": f"{home}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, ADDED / "probe.py"], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    assert all(path.startswith(str(home)) for path in told["packages"]), told["packages"]
    return told


def test_every_row_is_proven_here() -> None:
    proven = [*CHANGES, *REGISTERED]
    assert [what for what in rows() if not what.startswith(tuple(proven))] == []
    assert all(row(start) for start in proven)


@pytest.mark.parametrize("start", [*CHANGES, *REGISTERED])
def test_a_change_touches_only_what_its_row_names(start: str) -> None:
    named = re.findall(r"`([^`]+)`", row(start))
    files = [file for file, _, _ in CHANGES.get(start, ())] + list(REGISTERED.get(start, ()))
    observed = {f"{B}/triton_io/reports/tokenizer_report.py"} if start == "a metric" else set()  # where it is observed
    assert [f for f in files if f not in observed and not any(f"/{name}" in f"/{f}" for name in named)] == []


def test_a_sampling_parameter_follows_from_the_table_and_one_feature(facts: dict[str, Any]) -> None:
    """From the tensor a client sends, over the wire and the device's row, to the token that is drawn."""
    assert facts["sampling"] == {
        "arrived": 0.25,
        "temperature": 1.0,
        "features": ["sampled", "top_n_sigma"],
        "in row": ["f"],
        "kept": [True, True],
    }
    assert facts["public"]["rows"][0] == "| `top_n_sigma` | FP32 | [1] | 0 | 0..100 | keep logits near the best |"


@pytest.mark.parametrize("model", ["ensemble", "scheduler"])
def test_the_comparison_with_config_pbtxt_names_the_new_tensors(facts: dict[str, Any], model: str) -> None:
    assert facts["public"]["inputs"].keys() - declared(config(model).input).keys() == {"top_n_sigma", "spoon"}
    assert {tensor.name for tensor in schema.INPUTS} <= declared(config(model).input).keys()


def test_the_client_sends_every_sampling_parameter() -> None:
    """Its comparison names a new one as well."""
    assert {t.name: t.dtype for t in schema.SAMPLING_INPUTS}.items() <= INPUT_TYPES.items()
    assert FIELDS.keys() <= Options.__annotations__.keys()


def test_a_sampling_fields_name_stands_in_the_table_and_in_its_feature() -> None:
    elsewhere = {
        "front/fields.py",  # the names of the OpenAI API
        "front/responses.py",  # what a response repeats of its request
        "model_facts/generation.py",  # keys of a generation_config.json, which transformers names
    }
    names = {name for name, fact in FIELDS.items() if fact.feature} - {"temperature"}  # without that nothing is drawn
    where: dict[str, set[str]] = {name: set() for name in names}
    for path in (ROOT / B).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            for key in ("id", "attr", "arg", "value", "name"):
                word = getattr(node, key, None)
                if isinstance(word, str) and word in names:
                    where[word].add(path.relative_to(ROOT / B).as_posix())
    for name, said in where.items():
        features = {path for path in said if path.startswith("engine/sampling/")}
        assert "contracts/fields.py" in said
        assert len(features) == 1, name
        assert said - features - {"contracts/fields.py"} <= elsewhere, name


def test_a_public_tensor_is_documented_and_read_by_its_row_alone(facts: dict[str, Any]) -> None:
    assert facts["public"]["rows"][1:] == ["| `spoon` | BOOL | [1] | false | any | stir |"]
    assert facts["public"]["read"] is True


def test_the_order_follows_from_one_rule(facts: dict[str, Any]) -> None:
    assert facts["order"] == [2, 1, 0]


def test_admission_and_batcher_decide_alone(facts: dict[str, Any]) -> None:
    assert facts["admitted"] == [False, True]
    assert facts["begun"] == [1, 2, 3]


def test_a_message_to_the_scheduling_thread_is_declared_and_handled(facts: dict[str, Any]) -> None:
    assert facts["message"] == 3


def test_both_sides_of_the_wire_follow_from_one_file(facts: dict[str, Any]) -> None:
    assert facts["wire"] == [-77, 77]


def test_a_metric_is_a_line_where_it_is_declared_and_one_where_it_is_observed(facts: dict[str, Any]) -> None:
    assert facts["metric"] == {
        "declared": ["Stirring"],
        "published": ["tritandem_spoons_total {'process': 't'} 2"],
    }


def test_a_default_stands_in_one_place(facts: dict[str, Any]) -> None:
    assert facts["default"][0] == 7 * 256
    assert "| `default_max_tokens` | tokens | `1792` |" in facts["default"][1]


def test_arrivals_are_named_and_made_in_one_place_each(facts: dict[str, Any]) -> None:
    assert facts["arrivals"] == [0, 0, 1, 1]


def test_an_attention_backend_is_one_file_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request through the CPU engine, with tokens that are transformers' own."""
    loop = LoopAttention()
    registered = {"loop": lambda shapes, max_rows, device: loop, **attention.BACKENDS["cpu"]}
    monkeypatch.setattr(attention, "BACKENDS", MappingProxyType({**attention.BACKENDS, "cpu": registered}))
    prompt = np.arange(9, dtype=np.int32)
    answer = Rig(make_runner()).run([request(0, prompt)])[0]
    assert answer.tokens == generate("llama", prompt, 12)
    assert loop.calls > 12


def test_a_format_of_weights_is_one_file_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused decoder runs on it: every product in float64, tokens that are transformers' own."""
    added = linear.Format(double_product.handles, double_product.DoubleNormed, double_product.DoubleResidual)
    monkeypatch.setattr(linear, "FORMATS", (lambda: added, *linear.FORMATS))
    registered = {"loop": lambda shapes, max_rows, device: LoopAttention()}
    monkeypatch.setattr(attention, "BACKENDS", MappingProxyType({"cuda": registered}))
    model = copy.deepcopy(reference_model("llama"))
    loaded = LoadedModel(model, inspect_model(model), VOCAB, 256)
    forward = DeviceForward(loaded, EngineConfig(), 1, lambda progress: None)
    assert forward.fused
    forward.use(KvCache.allocate(loaded.layers, 9, 4, torch.float32, "cpu"))
    double_product.products.clear()
    prompt = np.arange(9, dtype=np.int32)
    assert greedily(forward, prompt, 12) == generate("llama", prompt, 12)
    # Before each token two products behind a norm and two to the residual a layer, and the head.
    assert double_product.products == {"normed": 12 * (2 * 2 + 1), "residual": 12 * 2 * 2}


def test_a_module_that_no_format_handles_is_refused_by_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "FORMATS", (lambda: linear.Format(double_product.handles, None, None),))  # type: ignore[arg-type]
    with pytest.raises(Unfusable, match="Embedding stands where"):
        linear.residual_linear(torch.nn.Embedding(2, 2))


@torch.inference_mode()
def greedily(forward: DeviceForward, prompt: np.ndarray[Any, np.dtype[np.int32]], count: int) -> list[int]:
    """A prefill and `count - 1` decode steps of one sequence in blocks 1 to 8, of 4 tokens each."""
    state = SlotState.empty(1, 8, VOCAB, "cpu")
    state.update_blocks(torch.tensor([(0, index, 1 + index) for index in range(8)]))
    length = len(prompt)
    positions, slot = torch.arange(length), torch.tensor([0])
    contexts, starts = torch.tensor([length], dtype=torch.int32), torch.tensor([0, length], dtype=torch.int32)
    batch = AttentionBatch(4 + positions, state.block_table[slot], contexts, starts, length, length, decode=False)
    logits = forward.prefill(torch.from_numpy(prompt).long(), positions, slot + length - 1, batch)
    tokens = [int(logits.argmax())]
    for position in range(length, length + count - 1):
        one = torch.tensor([position])
        logits = forward.decode(state, 4, torch.tensor(tokens[-1:]), one, slot, (one + 1).int())
        tokens.append(int(logits.argmax()))
    return tokens
