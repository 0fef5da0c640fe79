"""A configuration is refused by file, key, what was given and what is allowed, before anything starts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tritandem import config
from tritandem.config import Config, load_config
from tritandem.contracts.errors import ConfigError


def loaded(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "serving.toml"
    path.write_text(text, encoding="utf-8")
    return load_config(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[engine]\nblock_tokens = 0", r"serving.toml.engine.block_tokens: given 0, allowed: 1 to 1024"),
        ("[engine]\nmax_sequences = -1", r"engine.max_sequences: given -1, allowed: 0 to 4096"),
        ("[engine]\nkv_memory_fraction = 1.5", r"given 1.5, allowed: 0.01 to 1"),
        ("[engine]\nkv_memory_fraction = nan", r"given nan, allowed"),
        ("[engine]\nnum_blocks = -5", r"given -5, allowed: 0 or more"),
        ("[engine]\nattention = 'flash'", r"attention: given 'flash', allowed: auto, dense, paged"),
        ("[engine]\ndtype = 'int8'", r"dtype: given 'int8', allowed: auto, bfloat16, float16, float32"),
        ("[engine]\ndevice = 'tpu'", r"engine.device: given 'tpu', allowed: auto, cpu, cuda, cuda:N"),
        ("[engine]\ndevice = ''", r"engine.device: given '', allowed: auto, cpu"),
        ("[engine]\ndevice = 'cuda:x'", r"engine.device: given 'cuda:x', allowed: auto, cpu"),
        ("[engine]\ndevice = 'cuda:-1'", r"engine.device: given 'cuda:-1', allowed: auto, cpu"),
        ("[engine]\nprefix_cache = 1", r"prefix_cache: given 1, allowed: a value of type bool"),
        ("[engine]\nmax_sequences = 2.0", r"max_sequences: given 2.0, allowed: a value of type int"),
        ("[engine]\nmax_sequences = true", r"max_sequences: given True, allowed: a value of type int"),
        ("[engine]\nbatch = 3", r"engine.batch: unknown key; known keys: .*block_tokens"),
        ("[scheduler]\nsender_threads = 0", r"sender_threads: given 0, allowed: 1 to 64"),
        ("[scheduler]\ntarget_inter_token_s = inf", r"given inf, allowed: 0.0001 or more"),
        ("[scheduler]\ndefault_priority = 'high'", r"given 'high', allowed: interactive, normal, batch"),
        ("[tokenizer]\nshadow_check_rate = 2", r"given 2.0, allowed: 0 to 1"),
        ("[telemetry]\ntraces_url = 'collector'", r"traces_url: given 'collector', allowed: http://HOST:PORT/PATH, "),
        ("[telemetry]\ntraces_url = 'http://'", r"traces_url: given 'http://', allowed: http"),
        ("[telemetry]\ntraces_url = 'grpc://a:4317'", r"traces_url: given 'grpc://a:4317', allowed: http"),
        ("[telemetry]\ntraces_url = 'http://a:x/v1'", r"traces_url: given 'http://a:x/v1', allowed: http"),
        ("[telemetry]\ntraces_url = 'http://[a/v1'", r"traces_url: given .*, allowed: http"),
        ("[placement]\npolicy = 'on'", r"given 'on', allowed: auto, explicit, off"),
        ("engine = 3", r"engine: given 3, allowed: a table"),
        ("[engines]", r"engines: unknown key; known keys: engine"),
        ("[engine", r"not valid TOML"),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loaded(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[engine]\ndevice = 'cuda:7'", "cuda:7"),
        ("[telemetry]\ntraces_url = 'https://[::1]:4318/v1/traces'", "https://[::1]:4318/v1/traces"),
        ("[telemetry]\ntraces_url = ''", ""),
    ],
)
def test_what_has_the_form_is_taken(tmp_path: Path, text: str, found: str) -> None:
    got = loaded(tmp_path, text)
    assert found in (got.engine.device, got.telemetry.traces_url)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"bytes.toml: not valid TOML"):
        load_config(tmp_path / "bytes.toml")
    with pytest.raises(ConfigError, match=r"missing.toml: cannot be read: No such file"):
        load_config(tmp_path / "missing.toml")


def test_good_values_arrive_and_the_rest_keeps_its_defaults(tmp_path: Path) -> None:
    got = loaded(tmp_path, "[engine]\nmax_sequences = 7\n[scheduler]\ntick_s = 0\n")
    assert got.engine == dataclasses.replace(Config().engine, max_sequences=7)
    assert got.scheduler == dataclasses.replace(Config().scheduler, tick_s=0.0)
    assert load_config(None) == Config()


def test_the_environment_goes_before_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config.config_from_environment().scheduler.generation_config == "none"
    monkeypatch.setenv(config.GENERATION_ENV, "auto")
    assert config.config_from_environment().scheduler.generation_config == "auto"
    monkeypatch.setenv(config.GENERATION_ENV, "vllm")
    with pytest.raises(ConfigError, match="GENERATION_CONFIG: given 'vllm', allowed: none, auto"):
        config.config_from_environment()
    monkeypatch.delenv(config.GENERATION_ENV)
    monkeypatch.setenv(config.QUANTIZATION_ENV, "fp8")
    monkeypatch.setenv(config.KV_DTYPE_ENV, "fp8_e4m3")
    engine = config.config_from_environment().engine
    assert (engine.quantization, engine.kv_dtype) == ("fp8", "fp8_e4m3")
    monkeypatch.setenv(config.KV_DTYPE_ENV, "fp8")
    with pytest.raises(ConfigError, match="TRITANDEM_KV_DTYPE: given 'fp8', allowed: auto, bf16, fp8_e4m3"):
        config.config_from_environment()


def test_every_key_says_what_it_means_and_its_default_is_itself_allowed() -> None:
    for section in dataclasses.fields(Config):
        table = getattr(Config(), section.name)
        values = dataclasses.asdict(table)
        assert config.from_mapping(type(table), values, "defaults") == table
        settings = config.settings_of(type(table))
        assert list(settings) == list(values)
        assert all(setting.doc and setting.low <= setting.high for setting in settings.values())
