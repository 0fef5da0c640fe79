"""`generate` and `chat` in a terminal: what is printed where, exit codes, Ctrl-C."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tritandem_client.cli import main

from tests.client.scripts import chunk, hanging, last, saying, streaming
from tests.fakes.triton_grpc import FakeTritonGrpc

CLIENT_ROOT = Path(__file__).resolve().parents[2] / "client"


@pytest.fixture
def serve() -> Iterator[Any]:
    servers: list[FakeTritonGrpc] = []

    def start(script: Any) -> FakeTritonGrpc:
        servers.append(FakeTritonGrpc(script))
        return servers[-1].__enter__()

    yield start
    for server in servers:
        server.__exit__()


def test_generate_prints_the_answer_and_nothing_else(serve: Any, capsys: Any) -> None:
    server = serve(streaming())
    assert main(["generate", "The capital", "--url", server.url]) == 0
    assert capsys.readouterr() == ("Paris.\n", "")


def test_generate_reads_standard_input(serve: Any, monkeypatch: Any) -> None:
    server = serve(streaming())
    monkeypatch.setattr("sys.stdin", io.StringIO("line one\nline two é\n"))
    assert main(["generate", "-", "--url", server.url]) == 0
    assert server.visitors.requests[0].prompt == "line one\nline two é\n"


def test_options_of_the_command_line_reach_the_server(serve: Any) -> None:
    server = serve(streaming())
    options = ["--max-tokens", "5", "--temperature", "0.5", "--top-k", "3", "--top-p", "0.5", "--seed", "9"]
    options += ["--priority", "batch", "--tenant", "me"]
    options += ["--header", "X-Team: a:b"]
    options += ["--stop", "\n", "--stop", "END", "--bad-word", "no", "--request-id", "r1", "--model", "ensemble"]
    assert main(["generate", "x", "--url", server.url, *options]) == 0
    request = server.visitors.requests[0]
    assert (request.request_id, request.model) == ("r1", "ensemble")
    assert request.inputs["max_tokens"] == [5]
    assert request.inputs["stop_words"] == ["\n", "END"]
    assert request.inputs["bad_words"] == ["no"]
    assert request.parameters == {"priority_class": "batch", "tenant": "me"}
    assert "min_p" not in request.inputs
    assert request.headers["x-team"] == "a:b"


def test_json_is_one_document_with_everything(serve: Any, capsys: Any) -> None:
    server = serve(streaming())
    assert main(["generate", "x", "--url", server.url, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["text"], document["num_output_tokens"], document["outcome"]) == ("Paris.", 3, "COMPLETED")
    assert document["timings"]["server"]["received_ns"] == 10


def test_stats_go_to_standard_error(serve: Any, capsys: Any) -> None:
    server = serve(streaming())
    assert main(["generate", "x", "--url", server.url, "--stats"]) == 0
    out, err = capsys.readouterr()
    assert out == "Paris.\n"
    assert err.startswith("[completed, stop; 5 tokens in (3 cached), 3 out; TTFT ")
    assert "tokens/s" in err


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("REJECTED_INVALID: top_p: given 7.0, allowed: a number in (0, 1]", 2),
        ("REJECTED_SATURATED: full; retry after 1.0 s", 1),
        ("FAILED: the engine broke", 1),
        ("Request for unknown model: 'scheduler' is not found", 3),
    ],
)
def test_errors_are_one_line_and_an_exit_code(text: str, code: int, serve: Any, capsys: Any) -> None:
    server = serve(saying(RuntimeError(text)))
    assert main(["generate", "x", "--url", server.url]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert text.partition(": ")[2] in err
    assert err.count("\n") == 1


def test_no_server_is_exit_code_3(capsys: Any) -> None:
    assert main(["generate", "x", "--url", "127.0.0.1:1"]) == 3
    said = capsys.readouterr().err
    assert said.startswith("error: ConnectionFailed: ")
    assert "--url" in said


def test_a_header_without_a_colon_is_refused(capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["generate", "x", "--header", "Authorization"])
    assert "allowed: NAME:VALUE" in capsys.readouterr().err


def test_a_wrong_address_is_exit_code_2(capsys: Any) -> None:
    assert main(["generate", "x", "--url", "ftp://x"]) == 2
    assert "scheme" in capsys.readouterr().err


def test_text_before_an_error_stays_on_its_own_line(serve: Any, capsys: Any) -> None:
    server = serve(saying(chunk("half"), RuntimeError("FAILED: broke")))
    assert main(["generate", "x", "--url", server.url]) == 1
    assert capsys.readouterr() == ("half\n", "error: FAILED: broke\n")


def chat(server: FakeTritonGrpc, lines: str, monkeypatch: Any, *options: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    return main(["chat", "--url", server.url, *options])


def conversations(server: FakeTritonGrpc) -> list[list[tuple[str, str]]]:
    said = [json.loads(request.parameters["messages"]) for request in server.visitors.requests]
    return [[(turn["role"], turn["content"]) for turn in turns] for turns in said]


def test_chat_keeps_the_history(serve: Any, monkeypatch: Any, capsys: Any) -> None:
    server = serve(streaming())
    assert chat(server, "one\n\ntwo\n", monkeypatch, "--system", "brief") == 0
    first = [("system", "brief"), ("user", "one")]
    assert conversations(server) == [first, [*first, ("assistant", "Paris."), ("user", "two")]]
    assert capsys.readouterr().out == "Paris.\nParis.\n"


def test_chat_commands_change_the_conversation(serve: Any, monkeypatch: Any, capsys: Any) -> None:
    server = serve(streaming())
    assert chat(server, "one\n/reset\n/system be kind\ntwo\n/wat\n/exit\nnever\n", monkeypatch) == 0
    assert conversations(server) == [[("user", "one")], [("system", "be kind"), ("user", "two")]]
    assert "unknown command /wat" in capsys.readouterr().err


def test_a_failed_turn_leaves_the_history_as_it_was(serve: Any, monkeypatch: Any, capsys: Any) -> None:
    def script(request: Any) -> Iterator[Any]:
        asked = json.loads(request.parameters["messages"])[-1]["content"]
        yield RuntimeError("FAILED: broke") if asked == "bad" else last("ok", 1)

    server = serve(script)
    assert chat(server, "one\nbad\ntwo\n", monkeypatch) == 0
    assert conversations(server)[2] == [("user", "one"), ("assistant", "ok"), ("user", "two")]
    assert "error: FAILED: broke" in capsys.readouterr().err


def test_chat_as_json_is_one_line_per_answer(serve: Any, monkeypatch: Any, capsys: Any) -> None:
    server = serve(streaming())
    chat(server, "one\ntwo\n", monkeypatch, "--json")
    assert [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()] == ["Paris.", "Paris."]


# A shell starts its background jobs with SIGINT ignored, and children inherit that. Said here and not before `exec`:
# this process has gRPC's threads, and a fork of it may not run Python.
PROGRAM = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from tritandem_client.cli import main; sys.exit(main())"
)


@contextlib.contextmanager
def start_process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Killed when it is still there: a test that fails must not wait for it."""
    environment = {**os.environ, "PYTHONPATH": str(CLIENT_ROOT)}
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", PROGRAM, *arguments]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def test_ctrl_c_cancels_the_answer_and_exits_130(serve: Any) -> None:
    server = serve(hanging(chunk("begun")))
    with start_process("generate", "x", "--url", server.url) as process:
        assert process.stdout is not None
        assert process.stdout.read(5) == "begun"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (130, "\n", "")
    assert server.visitors.requests[0].gone.wait(10)


def test_ctrl_c_in_a_chat_ends_the_answer_not_the_chat(serve: Any) -> None:
    def script(request: Any) -> Iterator[Any]:
        if json.loads(request.parameters["messages"])[-1]["content"] == "long":
            yield from hanging(chunk("begun"))(request)
        else:
            yield last("fine", 1)

    server = serve(script)
    with start_process("chat", "--url", server.url) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdin.write("long\n")
        process.stdin.flush()
        assert process.stdout.read(5) == "begun"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate("next\n", timeout=20)
    assert (process.returncode, out, err) == (0, "\nfine\n", "")
    assert conversations(server)[1] == [("user", "long"), ("assistant", "begun"), ("user", "next")]


def test_a_reader_that_leaves_is_no_traceback(serve: Any) -> None:
    def script(request: Any) -> Iterator[Any]:
        while not request.gone.is_set():
            yield chunk("x" * 1000 + "\n")

    server = serve(script)
    with start_process("generate", "x", "--url", server.url) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(20) == 1
        assert process.stderr is not None
        assert process.stderr.read() == ""
