"""What is documented about the log holds for the lines that Triton writes."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from tritandem.server import TritonServer

from tests.real_triton.raw_client import RawClient, number, text
from tests.real_triton.test_ending_early import wait_until

pytestmark = pytest.mark.triton

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "observability.md"
AWKWARD = 'a "quoted" \\ id, ä and ] "{'


def test_the_documented_command_makes_json_of_the_requests_in_the_log(server: TritonServer, client: RawClient) -> None:
    [command] = re.findall(r"^(sed -n .*) triton.log$", GUIDE.read_text(), re.MULTILINE)

    def records() -> list[dict[str, object]]:
        done = subprocess.run(
            f"{command} '{server.log_path}'", shell=True, capture_output=True, text=True, timeout=60, check=True
        )
        # Of the request below alone: under load Triton may write two lines into one another.
        return [json.loads(line) for line in done.stdout.splitlines() if "quoted" in line]

    client.answer("scheduler", {"text_input": text("Hello"), "max_tokens": number(1, np.int32)}, request_id=AWKWARD)
    wait_until("the request is logged", lambda: any(record["id"] == AWKWARD for record in records()))
    assert {record["event"] for record in records()} == {"request"}
    assert {record["outcome"] for record in records()} == {"COMPLETED"}
