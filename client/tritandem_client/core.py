"""What the client for threads and the one for asyncio have in common: settings and request building.

Owns the constructor's arguments and their defaults. Knows nothing about I/O. Immutable after construction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tritandem_client.request import Message, Options, TokenIds, WireRequest, build_request, build_stop
from tritandem_client.transports import Address, ProtocolName, parse_url

DIRECT_MODEL = "scheduler"
STOP_TIMEOUT_S = 2.0


class ClientCore:
    """The arguments of `Client` and `AsyncClient`:

    - `url`: `host:port` or `grpc|grpcs|http|https://host:port`; the default is 127.0.0.1 with Triton's port.
    - `model`: the direct model `scheduler` by default. It takes the same tensors as `ensemble`, and Triton
      passes a cancelled gRPC stream on to it at once; an ensemble's steps never hear of it.
    - `protocol`: "grpc" (default) or "http".
    - `timeout_s`: for a whole request, retries included; None is no limit. A call's own `timeout_s` wins.
    - `retries`: how often a request is sent again that was Saturated, waiting as long as the server says, or whose
      connection failed before anything of the answer came: it may then run twice. Off by default.
    - `report`: what to ask for beside the text ("seed" too); () for deployments that lack these inputs.
    - `stop_on_close`: send a `stop` for the request id when a stream is broken off. None: where cancelling alone
      does not reach the server's work at once. That is any model but the direct one, and HTTP, where Triton notices a
      closed connection when it next sends something.
    - `ca_file`, `headers`, `connect_timeout_s`: PEM roots for TLS, metadata for every call, time to connect.
    - `keepalive_s`, gRPC only: ping a silent server this often while requests run, so that one that vanished without
      a word is noticed within twice that time. Tritandem's takes pings 5 s apart or more; Triton by itself breaks
      connections off that ping more often than every 300 s (`--grpc-http2-min-recv-ping-interval-without-data`).
    - `round_robin`, gRPC only: the name stands for several servers, and each gets a connection and its share of the
      requests; otherwise all go to the first that answers. A `stop` reaches one of them, hardly the right one: keep to
      the direct model, which hears of a cancelled stream without it.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        model: str = DIRECT_MODEL,
        protocol: ProtocolName | None = None,
        timeout_s: float | None = 600.0,
        retries: int = 0,
        report: Sequence[str] = ("finish_reason", "num_input_tokens", "num_output_tokens"),
        stop_on_close: bool | None = None,
        ca_file: str | None = None,
        headers: Mapping[str, str] | None = None,
        connect_timeout_s: float = 5.0,
        keepalive_s: float | None = None,
        round_robin: bool = False,
    ) -> None:
        where = parse_url(url, protocol)
        self.address = Address(*where, ca_file, dict(headers or {}), connect_timeout_s, keepalive_s, round_robin)
        self.model, self.timeout_s, self.retries, self.report = model, timeout_s, retries, tuple(report)
        unheard = model != DIRECT_MODEL or self.address.protocol == "http"
        self.stop_on_close = unheard if stop_on_close is None else stop_on_close
        self._connect()

    def _connect(self) -> None:
        """Make the transport. Nothing is sent yet."""
        raise NotImplementedError

    def _build(
        self,
        options: Options,
        *,
        prompt: str | None = None,
        input_ids: TokenIds | None = None,
        messages: Sequence[Message] | None = None,
        stream: bool,
    ) -> WireRequest:
        return build_request(
            self.model,
            options,
            prompt=prompt,
            input_ids=input_ids,
            messages=messages,
            stream=stream,
            report=self.report,
        )

    def _build_stop(self, request_id: str) -> WireRequest:
        return build_stop(self.model, request_id)

    def _timeout_s(self, options: Options) -> float | None:
        return options.get("timeout_s", self.timeout_s)
