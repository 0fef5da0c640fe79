"""Open WebUI itself, started against the server: its list of models, a chat in one piece and one streamed, as its page
asks for them."""

import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import suppress

PORT = 17990
HERE = os.path.abspath("data")
SETTINGS = {
    "OPENAI_API_BASE_URL": os.environ.get("OPENAI", ""),
    "OPENAI_API_KEY": "none",
    "ENABLE_OLLAMA_API": "false",
    "WEBUI_AUTH": "false",
    "WEBUI_SECRET_KEY": "of this run",
    "DATA_DIR": HERE,
    "OFFLINE_MODE": "true",
    "HF_HUB_OFFLINE": "1",
    "RAG_EMBEDDING_ENGINE": "openai",  # none of its own, which it would fetch
    "ENABLE_VERSION_UPDATE_CHECK": "false",
}


def ask(path: str, body: object = None, token: str = "") -> bytes:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", data, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read()


def main() -> None:
    shutil.rmtree(HERE, ignore_errors=True)  # it remembers the server of an earlier run
    with open("open-webui.log", "w") as log:
        command = ["bin/open-webui", "serve", "--host", "127.0.0.1", "--port", str(PORT)]
        server = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | SETTINGS)
    try:
        for _ in range(400):
            with suppress(OSError):
                if json.loads(ask("/health"))["status"]:
                    break
            assert server.poll() is None, "it did not start: open-webui.log"
            time.sleep(0.5)
        token = json.loads(ask("/api/v1/auths/signin", {"email": "", "password": ""}))["token"]
        models = [one["id"] for one in json.loads(ask("/api/models", token=token))["data"]]
        assert os.environ["MODEL"] in models, models
        asked = {
            "model": os.environ["MODEL"],
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
        }
        whole = json.loads(ask("/api/chat/completions", {**asked, "temperature": 0, "stream": False}, token))
        text = whole["choices"][0]["message"]["content"]
        assert "Paris" in text, whole
        events = ask("/api/chat/completions", {**asked, "temperature": 0, "stream": True}, token).decode().split("\n\n")
        parts = [json.loads(event[6:]) for event in events if event.startswith("data: {")]
        streamed = "".join(part["choices"][0]["delta"].get("content") or "" for part in parts if part.get("choices"))
        assert streamed == text, streamed
    finally:
        server.terminate()
        server.wait(30)
    print(repr(text))


if __name__ == "__main__":
    main()
