"""Exit codes and one-line refusals of the command line, and what the demo prints."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tritandem.cli import demo
from tritandem.cli.main import build_parser, main
from tritandem.cli.server_flags import front_options, server_arguments

from tests.fakes.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]


def complaint(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on standard error."""
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    (folder / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")  # of no weights
    return folder


def serve(model: Path | str, *flags: str) -> int:
    http, grpc, metrics = free_ports(3)
    ports = ["--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics), "--openai-port", "0"]
    return main(["serve", "--model", str(model), *ports, *flags])


def test_every_subcommand_is_listed() -> None:
    text = build_parser().format_help()
    for command in ("serve", "demo", "model", "doctor", "generate", "chat", "loadtest"):
        assert re.search(rf"^    {command} ", text, re.MULTILINE)


@pytest.mark.parametrize("words", [["loadtest", "--rps", "8"], ["loadtest", "sweep"], ["demo"]])
def test_without_the_load_generator_the_commands_that_need_it_say_what_to_install(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tritandem_loadtest", None)
    assert re.search(r"^    loadtest .*not installed", build_parser().format_help(), re.MULTILINE)
    assert main(words) == 2
    assert "`pip install tritandem-loadtest` brings it" in complaint(capsys)


def test_help_needs_no_heavy_library() -> None:
    heavy = "{'torch', 'transformers', 'locust', 'grpc'} & set(sys.modules)"
    code = f"import sys; from tritandem.cli.main import build_parser; build_parser(); print({heavy})"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


def test_a_missing_model_is_refused_with_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve("/absent/model") == 2
    assert complaint(capsys) == ("tritandem: model /absent/model does not exist: give an existing folder or .gguf file")


def test_an_incomplete_model_is_refused(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model_folder / "tokenizer.json").unlink()
    assert serve(model_folder) == 2
    assert "no tokenizer (tokenizer.json or tokenizer.model)" in capsys.readouterr().err.splitlines()[-1]


def test_a_model_whose_files_contradict_one_another_is_refused_before_a_server_is_started(
    model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model_folder / "config.json").write_text('{"vocab_size": 100}')
    (model_folder / "generation_config.json").write_text('{"eos_token_id": 100}')
    assert serve(model_folder) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"tritandem: {model_folder}/generation_config.json: eos_token_id: given 100, allowed:")


def test_a_busy_port_is_refused(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert serve(model_folder, "--http-port", str(port)) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"tritandem: port {port} on 127.0.0.1 cannot be used")
    assert last.endswith("choose another with --http-port")


def test_a_wrong_configuration_is_refused(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "engine.toml"
    config.write_text("[scheduler]\nmax_queued_requests = 'many'\n")
    assert serve(model_folder, "--engine-config", str(config)) == 2
    assert "max_queued_requests: given 'many'" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "flags",
    [
        ["--http-port", "0"],
        ["--grpc-port", "70000"],
        ["--tokenizer-instances", "0"],
        ["--drain-timeout-s", "nan"],
        ["--ready-timeout-s", "-1"],
        ["--max-restarts", "-1"],
        ["--openai-port", "70000"],
        ["--openai-workers", "-1"],
    ],
)
def test_numbers_out_of_range_are_wrong_usage(flags: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["serve", *flags])


@pytest.mark.parametrize(
    "flags",
    [
        ["--openai-keys", "nowhere.toml"],
        ["--openai-tls-cert", "chain.pem"],
        ["--openai-tls-cert", "chain.pem", "--openai-tls-key", "key.pem"],
    ],
)
def test_files_of_the_openai_api_are_read_before_anything_is_started(
    flags: list[str], model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--model", str(model_folder), *flags]) == 2
    assert complaint(capsys).startswith(f"tritandem: {flags[0]}")


@pytest.mark.parametrize(
    ("flags", "names"),
    [([], ("model",)), (["--openai-model", "a", "--openai-model", "b"], ("a", "b")), (["--openai-port", "0"], None)],
)
def test_the_openai_api_calls_the_model_what_it_is_told(
    flags: list[str], names: tuple[str, ...] | None, model_folder: Path
) -> None:
    options = front_options(build_parser().parse_args(["serve", "--model", str(model_folder), *flags]))
    assert (options and options.models) == names


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--placement", "off"], "off"),
        (["--cpus", "engine=2-3", "--cpus", "server=0,1"], "engine=2-3 server=0,1"),
        ([], ""),
    ],
)
def test_placement_is_handed_on_in_words(flags: list[str], words: str, model_folder: Path) -> None:
    args = build_parser().parse_args(["serve", "--model", str(model_folder), *flags])
    args.unknown = []
    assert server_arguments(args, lambda line: None)["placement"] == words


@pytest.mark.parametrize(
    "flags", [["--cpus", "engine"], ["--cpus", "gpu=1"], ["--placement", "off", "--cpus", "engine=1"]]
)
def test_a_placement_that_says_nothing_is_refused(
    flags: list[str], model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve(model_folder, *flags) == 2
    assert "placement" in complaint(capsys)


def test_only_serve_and_demo_pass_unknown_flags_on(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["model", "list", "--log-verbose=1"])
    assert "unrecognized arguments: --log-verbose=1" in capsys.readouterr().err


def test_an_unknown_model_name_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["model", "fetch", "gpt5"], ["model", "path", "gpt5"], ["serve", "--model", "gpt5"]):
        assert main(words) == 2
        assert "unknown model 'gpt5': known names: smollm2" in complaint(capsys)


def test_models_that_are_not_fetched_are_listed_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["model", "list"]) == 0
    assert "not fetched" in capsys.readouterr().out
    assert main(["model", "path"]) == 2
    assert "run: tritandem model fetch smollm2" in complaint(capsys)


def test_the_doctor_says_what_would_be_refused(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model_folder / "config.json").unlink()
    ports = [str(port) for port in free_ports(3)]
    words = ["doctor", "--preflight", "--model", str(model_folder), "--http-port", ports[0], "--grpc-port", ports[1]]
    assert main([*words, "--metrics-port", ports[2]]) == 2
    verdicts = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert verdicts["ports"] == "ok"
    assert re.fullmatch(r"folder +NO: model folder .* has no config.json .*", verdicts["model"])


SUMMARY = {
    "requests": 160, "failed": 0, "failures": {}, "achieved_rps": 7.98,
    "ttft_ms_p50": 80.0, "ttft_ms_p90": 120.0, "ttft_ms_p99": 200.0, "tpot_ms_p50": 30.0,
    "itl_ms_p50": 31.0, "itl_ms_p90": 40.0, "itl_ms_p99": 50.0,
    "e2e_ms_p50": 180.0, "e2e_ms_p90": 220.0, "e2e_ms_p99": 300.0,
}  # fmt: skip


def test_the_last_line_has_the_promised_keys() -> None:
    line = json.loads(json.dumps(demo.last_line("Paris.", 8.0, SUMMARY)))
    assert list(line) == [
        "answer", "target_rps", "achieved_rps", "requests", "failed", "ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50",
    ]  # fmt: skip
    assert line["failed"] == 0


def test_the_table_shows_counts_and_percentiles() -> None:
    lines = demo.table(SUMMARY).splitlines()
    assert lines[0] == "sent 160   failed 0   rate 7.98/s"
    assert lines[2].split()[-3:] == ["80.0", "120.0", "200.0"]
    assert len(lines) == 5


def test_a_table_without_figures_shows_dashes() -> None:
    bare = {"requests": 1, "failed": 1, "achieved_rps": 0.0}
    assert demo.table(bare).splitlines()[-1].split()[-3:] == ["-", "-", "-"]


@pytest.mark.parametrize(
    ("answer", "changes", "exit_code", "complaint"),
    [
        ("It is Lyon.", {}, 0, "does not name Paris"),
        ("", {}, 0, "does not name Paris"),
        ("Paris", {"failed": 2, "failures": {"FAILED": 2}}, 0, "2 of 160 requests failed"),
        ("Paris", {"achieved_rps": 7.5}, 0, "reached 7.5 requests/s instead of 8"),
        ("Paris", {}, 1, "exit code 1"),
    ],
)
def test_each_thing_that_goes_wrong_fails_the_demo(
    answer: str, changes: dict[str, object], exit_code: int, complaint: str
) -> None:
    (found,) = demo.complaints(answer, "Paris", 8.0, {**SUMMARY, **changes}, exit_code)
    assert complaint in found


def test_a_good_demo_has_no_complaints() -> None:
    assert demo.complaints("Paris.", "Paris", 8.0, SUMMARY, 0) == []


@pytest.mark.parametrize(("version", "refused"), [((3, 9), True), ((3, 10), False), ((3, 12), False), ((3, 13), True)])
def test_make_refuses_a_python_that_cannot_work(version: tuple[int, int], refused: bool) -> None:
    code = f"import make_venv; print(make_venv.refuse({version}, 'linux', 'x86_64'))"
    said = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT / "tools", text=True)
    assert len(said.splitlines()) == 1
    assert ("numpy < 2, which has no wheels for 3.13" in said) is refused


def test_make_refuses_another_kind_of_machine() -> None:
    code = "import make_venv; print(make_venv.refuse((3, 12), 'darwin', 'arm64'))"
    said = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT / "tools", text=True)
    assert "Linux on x86-64 only" in said


def test_the_narrator_tells_the_time(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from tritandem.cli.narrator import Narrator

    say = Narrator()
    began = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began + 65.0)
    say("ready")
    assert re.fullmatch(r"\[   65\.\d s\] ready", complaint(capsys))
