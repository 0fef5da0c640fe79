"""The model `tokenizer`: text, chat or ids in, ids and stamps out; one `execute` serves many requests.

A caller that takes the output `refusal` gets errors there, so that the scheduler, the next to hear, ends every
request; anybody else gets error responses. Who takes `text_output` gets the text of ids that it sent.

`execute` returns before long texts are done: each request has its own response sender, so that a short text
never waits for a long one in its batch, and the dynamic batcher goes on. Responses are sent from Triton's
thread for short texts and from the tokenizer's pool for long ones.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from ...config import model_folder_from_environment
from ...contracts.arrays import Int32Array
from ...contracts.errors import InvalidRequest, TritandemError
from ...grammar.trials import Trials
from ...placement import TOKENIZER
from ...telemetry.publisher import Publisher
from ...telemetry.registry import Registry
from ...tokenizer import Encoded, TextTokenizer, load_tokenizer
from ..answer.replies import FINAL, answer_each, public_error, send_error
from ..hops import handover
from ..hops.bls_tokenizer import MOST_UNTRIED
from ..hops.handover import RARE_REFUSAL, Handover
from ..hops.inner_key import InnerKey, load_inner_key
from ..hops.waiting_texts import WaitingTexts
from ..reports.publishing import tokenizer_publisher
from ..reports.tokenizer_report import TokenizerReport
from ..request.chat_messages import read_messages, read_tools
from ..request.guides import Guide, unpack_guide
from ..request.incoming import read_arrays, read_id, read_parameters_text
from ..request.prompt_source import PromptSource, read_parameters, read_prompt, read_tenant
from ..request.schema import GRAMMAR, REFUSAL
from ..request.tensor_values import Inputs
from .context_limit import most_prompt_tokens
from .placing import place_process
from .process import Process, WatchedPlug
from .torchless import keep_torch_out

TEXT = "text_output"
# Ids of a request that has no prompt because it stops another one; the scheduler does not read them.
_STOP_IDS: Int32Array = np.zeros(1, np.int32)


def start(process: Process) -> WatchedPlug:
    """Raises ConfigError."""
    model, config = model_folder_from_environment(), process.config
    keep_torch_out(model)
    place_process(TOKENIZER, config)
    with process.loading():
        tokenizer = load_tokenizer(model, config.tokenizer)
    name, registry = process.args["model_instance_name"], Registry()
    report = TokenizerReport(registry, name, tokenizer.stats)
    publisher = tokenizer_publisher(config.telemetry, report, registry, name)
    publisher.start()
    note_trial = report.note_trial if config.telemetry.metrics else None
    trials = Trials(tokenizer.json_text, tokenizer.vocab_size, tokenizer.end_ids, note=note_trial)
    trials.start()
    plug = TokenizerPlug(
        tokenizer,
        load_inner_key(),
        max_tokens=most_prompt_tokens(model, config.engine),
        note=report.note if config.telemetry.metrics else None,
        publisher=publisher,
        max_waiting=config.scheduler.max_queued_requests,
        trials=trials,
    )
    return process.watched(plug)


class TokenizerPlug:
    """Answers every request exactly once, with ids or with the error of that request alone.

    Texts that cannot be within `max_tokens` are refused before they cost time; None: no limit. `max_waiting` texts at
    most wait for their ids. `key` seals what it hands over. `note` hears of every text that was encoded. `publisher`,
    if any, has been started and is closed here, as are `trials`, without which no grammar is tried.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        key: InnerKey,
        max_tokens: int | None = None,
        note: Callable[[Encoded], None] | None = None,
        publisher: Publisher | None = None,
        max_waiting: int = sys.maxsize,
        trials: Trials | None = None,
    ) -> None:
        self._tokenizer, self._key = tokenizer, key
        self._waiting = WaitingTexts(max_waiting)
        self._max_tokens = max_tokens
        self._note = note
        self._publisher = publisher
        self._trials, self._untried = trials, WaitingTexts(MOST_UNTRIED, "grammars are waiting for a trial")

    def execute(self, requests: Sequence[Any]) -> None:
        """Short texts are answered when this returns, long ones later."""
        received_ns = time.monotonic_ns()
        prompts: list[tuple[int, PromptSource, str, Guide | None, _Reply]] = []

        def read(request: Any, sender: Any) -> None:
            reply = _Reply(sender, request.requested_output_names(), received_ns, self._key)
            try:
                read_id(request)
                parameters = read_parameters(read_parameters_text(request))
                prompt, tenant = read_prompt(Inputs(read_arrays(request)), parameters), read_tenant(parameters)
                guide = unpack_guide(parameters[GRAMMAR]) if GRAMMAR in parameters else None
                prompts.append((prompt.chars, prompt, tenant, guide, reply))
            except Exception as error:
                reply.refuse(error)

        answer_each(requests, read)
        for _, prompt, tenant, guide, reply in sorted(prompts, key=lambda entry: entry[0]):
            if guide is None:
                self._begin(prompt, tenant, reply)
            else:
                self._try(guide, prompt, tenant, reply)

    def close(self) -> None:
        """Wait for the texts that are still being encoded; nothing is sent afterwards."""
        if self._trials is not None:
            self._trials.close()
        self._tokenizer.close()
        if self._publisher is not None:
            self._publisher.close()

    def _try(self, guide: Guide, prompt: PromptSource, tenant: str, reply: _Reply) -> None:
        """The prompt is encoded when the grammar is known to be sound, on the thread that finds out."""

        def tried(done: Future[None]) -> None:
            self._untried.leave(tenant)
            if (error := done.exception()) is not None:
                reply.refuse(error)
            else:
                self._begin(prompt, tenant, reply)

        if self._trials is None:
            reply.refuse(InvalidRequest(guide.field, "a structure", "none: this model's tokenizer knows no bytes"))
        else:
            try:
                self._untried.enter(tenant)
            except TritandemError as error:
                reply.refuse(error)
                return
            self._trials.check(guide.grammar, guide.field, tenant).add_done_callback(tried)

    def _begin(self, prompt: PromptSource, tenant: str, reply: _Reply) -> None:
        try:
            self._encode(prompt, tenant, reply)
        except Exception as error:
            reply.refuse(error)

    def _encode(self, prompt: PromptSource, tenant: str, reply: _Reply) -> None:
        if prompt.input_ids is not None and reply.takes_text:
            ids = prompt.input_ids
            self._tokenizer.submit_ids(ids.tolist()).add_done_callback(lambda done: reply.settle_text(ids, done))
            return
        if prompt.text is None and prompt.chat is None:
            reply.answer(_STOP_IDS if prompt.input_ids is None else prompt.input_ids)
            return
        self._waiting.enter(tenant)
        try:
            future = self._submit(prompt)
        except BaseException:
            self._waiting.leave(tenant)
            raise
        future.add_done_callback(lambda _: self._waiting.leave(tenant))
        if self._note is not None:
            future.add_done_callback(self._noted)
        future.add_done_callback(reply.settle)

    def _submit(self, prompt: PromptSource) -> Future[Encoded]:
        if prompt.text is not None:
            return self._tokenizer.submit(
                prompt.text, add_special_tokens=prompt.add_special_tokens, max_tokens=self._max_tokens
            )
        messages, tools = read_messages(prompt.chat or ""), read_tools(prompt.tools)
        return self._tokenizer.submit_chat(messages, tools=tools, max_tokens=self._max_tokens)

    def _noted(self, done: Future[Encoded]) -> None:
        if self._note is not None and done.exception() is None:
            self._note(done.result())


class _Reply:
    """The one answer to one request. Nothing here raises."""

    def __init__(self, sender: Any, outputs: Sequence[str], received_ns: int, key: InnerKey) -> None:
        self._sender, self.takes_text = sender, TEXT in outputs
        self._always = REFUSAL.name in outputs
        self._takes_refusals = self._always or RARE_REFUSAL in outputs
        self._received_ns, self._key = received_ns, key

    def settle(self, done: Future[Encoded]) -> None:
        error = done.exception()
        if error is None:
            self.answer(done.result().ids)
        else:
            self.refuse(error)

    def settle_text(self, ids: Int32Array, done: Future[str]) -> None:
        error = done.exception()
        if error is None:
            self.answer(ids, text=done.result())
        else:
            self.refuse(error)

    def refuse(self, error: BaseException) -> None:
        if self._takes_refusals:
            self.answer(_STOP_IDS, public_error(error))
        else:
            send_error(self._sender, error)

    def answer(self, ids: Int32Array, refusal: TritandemError | None = None, text: str = "") -> None:
        try:
            arrays = handover.pack(Handover(ids, self._received_ns, time.monotonic_ns(), refusal), self._key)
            if not self._always:
                told = arrays.pop(REFUSAL.name)
                if refusal is not None and self._takes_refusals:
                    arrays[RARE_REFUSAL] = told
            if self.takes_text:
                arrays[TEXT] = np.array([[text.encode()]], np.object_)
            tensors = [pb_utils.Tensor(name, array) for name, array in arrays.items()]
            self._sender.send(pb_utils.InferenceResponse(output_tensors=tensors), flags=FINAL)
        except Exception as error:
            send_error(self._sender, error)
