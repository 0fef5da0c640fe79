"""A plug that cannot start says why: asked of fresh interpreters, because a process that begins is watched for life."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

STARTING = """
import importlib, json, sys
from tests.fakes import triton_python_backend_utils
sys.modules["triton_python_backend_utils"] = triton_python_backend_utils
from tritandem.triton_io.plugs.process import Process
process = Process(json.loads(sys.argv[2]))
importlib.import_module("tritandem.triton_io.plugs." + sys.argv[1]).start(process)
"""


def last_words(plug: str, name: str, device: str = "", **environment: str) -> str:
    parameters = {"device": {"string_value": device}, "engines": {"string_value": "engine"}}
    args = {"model_name": name, "model_instance_name": name, "model_config": json.dumps({"parameters": parameters})}
    done = subprocess.run(
        [sys.executable, "-c", STARTING, plug, json.dumps(args)],
        env={name: value for name, value in os.environ.items() if not name.startswith("TRITANDEM_")} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize("plug", ["engine_start", "scheduler_start", "tokenizer"])
def test_a_plug_without_a_model_says_what_names_it(plug: str) -> None:
    assert last_words(plug, "x").startswith("tritandem.contracts.errors.ConfigError: TRITANDEM_MODEL: not set")


def test_an_engine_on_no_device_says_what_is_allowed() -> None:
    words = "tritandem.contracts.errors.ConfigError: engine.device: given 'tpu', allowed: auto, cpu, cuda, cuda:N"
    assert last_words("engine_start", "engine", device="tpu") == words


def test_a_relay_of_no_engine_says_how_it_is_named() -> None:
    assert last_words("engine_calls", "engine").endswith("a relay is named after its engine, NAME_calls")


@pytest.mark.parametrize("plug", ["engine_start", "engine_calls", "scheduler_start", "tokenizer"])
def test_a_configuration_that_cannot_be_read_is_named(plug: str) -> None:
    words = last_words(plug, "engine_calls", TRITANDEM_CONFIG="/nowhere/engine.toml")
    assert words.startswith("tritandem.contracts.errors.ConfigError: /nowhere/engine.toml: cannot be read")
