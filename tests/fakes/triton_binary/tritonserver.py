"""Stands in for the Triton binary: readiness, stub processes, the log lines that are read, a drain.

Behaves as the JSON in FAKE_TRITON says and refuses flags that the real binary does not have. Keys: `stubs`,
`ready_after_s`, `fail` (last words of a failed start), `drained` (before SIGTERM comes), `drain_s`, `held_open` (never
exits after the drain), `ignore_sigterm`, `shm` (leave a region behind). SIGUSR1 makes it crash, SIGUSR2 makes it lose a
stub.
"""

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time

KNOWN = {
    "model-repository", "backend-directory", "cache-directory", "model-control-mode", "strict-readiness",
    "exit-on-error", "exit-timeout-secs", "http-address", "http-port", "http-restricted-api", "grpc-address",
    "grpc-port", "grpc-restricted-protocol", "grpc-keepalive-time", "grpc-keepalive-timeout",
    "grpc-keepalive-permit-without-calls", "grpc-http2-max-pings-without-data",
    "grpc-http2-min-recv-ping-interval-without-data", "metrics-address", "metrics-port", "log-verbose",
    "backend-config", "http-thread-count", "trace-config",
}  # fmt: skip
BEHAVIOURS = {"stubs", "ready_after_s", "fail", "drained", "drain_s", "held_open", "ignore_sigterm", "shm"}
behaviour = {}
ready = False
asked_to_stop = threading.Event()


class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        assert self.path == "/v2/health/ready", self.path
        self.send_response(200 if ready else 400)
        self.end_headers()

    def do_POST(self):
        """The scheduler's part in a drain: says that it drains, and that it is done, after SIGTERM or before."""
        fields = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v2/models/scheduler/generate_stream", self.path
        assert fields["drain_key"] == os.environ["TRITANDEM_DRAIN_KEY"]
        log("I", f"asked to drain within {fields['drain_timeout_ms']} ms, {asked_to_stop.is_set()=}")
        head = b"HTTP/1.0 200 OK\r\n\r\ndraining"
        if not behaviour.get("drained"):
            self.wfile.write(head)
            head = b""
            asked_to_stop.wait()
        log("I", f"drained, {asked_to_stop.is_set()=}")
        self.wfile.write(head + b"drained")  # in one piece: between two, a busy machine outlasts any patience

    def log_message(self, *_):
        pass


def log(level, text):
    print(f'{level}1129 13:00:00.000000 {os.getpid()} server.cc:1] "{text}"', flush=True)


def main():
    global behaviour, ready
    flags = {}
    for word in sys.argv[1:]:
        name, _, value = word.removeprefix("--").partition("=")
        if name not in KNOWN:
            sys.exit(f"error: unrecognized option '{word}'")
        flags.setdefault(name, []).append(value)
    behaviour = json.loads(os.environ.get("FAKE_TRITON", "{}"))
    assert set(behaviour) <= BEHAVIOURS, behaviour
    print(json.dumps({"flags": flags, "model": os.environ.get("TRITANDEM_MODEL")}), flush=True)

    if behaviour.get("ignore_sigterm"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: asked_to_stop.set())
    if fail := behaviour.get("fail"):
        log("E", fail)
        sys.exit(1)
    if behaviour.get("shm"):
        prefix = next(v for v in flags["backend-config"] if "shm-region" in v).partition("=")[2]
        with open(f"/dev/shm/{prefix}region", "w"):
            pass
    # `tail -f` waits for ever and takes any words; as a real stub's, one of them is the name of its region.
    prefix = "".join(value.partition("=")[2] for value in flags["backend-config"] if "shm-region" in value)
    words = ["triton_python_backend_stub", "-f", "/dev/null", f"{prefix}region"]
    stubs = [
        subprocess.Popen(words, executable="/usr/bin/tail", stderr=subprocess.DEVNULL)
        for _ in range(behaviour.get("stubs", 2))
    ]
    signal.signal(signal.SIGUSR1, lambda *_: os.kill(os.getpid(), signal.SIGSEGV))
    signal.signal(signal.SIGUSR2, lambda *_: stubs[0].kill())
    server = http.server.ThreadingHTTPServer((flags["http-address"][0], int(flags["http-port"][0])), Health)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    time.sleep(behaviour.get("ready_after_s", 0.0))
    log("I", "successfully loaded 'echo'")
    ready = True

    asked_to_stop.wait()
    ready = False
    time.sleep(behaviour.get("drain_s", 0.0))
    log("I", "All models are stopped, unloading models")
    for stub in stubs:
        stub.terminate()
        stub.wait()
    if behaviour.get("held_open"):
        time.sleep(1000)
    os._exit(0)


main()
