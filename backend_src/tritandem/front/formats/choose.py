"""Which formats a model speaks, told by the text of its chat template or by the operator. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import deepseek, harmony, hermes, llama_json, mistral, think
from .call_json import Known
from .structure import Calls, Part
from .text import Reading, Text

AUTO, NONE = "auto", "none"
HARMONY = "harmony"
THINK, THINK_OPEN = "think", "think-open"
TOOLS: Mapping[str, Callable[[Text, Known], Reading[None]]] = {
    "hermes": hermes.hermes,
    "llama3-json": llama_json.llama_json,
    "mistral": mistral.mistral,
    "deepseek": deepseek.deepseek,
    HARMONY: harmony.harmony,
}
STRUCTURES: Mapping[str, Callable[[Calls, bool, Part | None], Part]] = {
    "hermes": hermes.structure,
    "llama3-json": llama_json.structure,
    "mistral": mistral.structure,
    "deepseek": deepseek.structure,
    HARMONY: harmony.structure,
}
REASONING = (THINK, THINK_OPEN, HARMONY)  # open: the prompt ends inside the thought
_XML = ("<function=", "<arg_key>", "<invoke ")
TOOL_WORDS, REASONING_WORDS = (AUTO, NONE, *TOOLS), (AUTO, NONE, *REASONING)


def plain(text: Text) -> Reading[None]:
    """All of it is said."""
    return text.rest(text.say)


@dataclass(frozen=True, slots=True)
class Formats:
    """How tools are called and thoughts are marked; "none": not at all. `harmony` does both or neither."""

    tools: str = NONE
    reasoning: str = NONE

    def grammar(self, known: Known, tools: bool) -> Callable[[Text], Reading[None]] | None:
        """How an answer is read; None: as it stands. `known`: names of the request's functions; `tools`: it has any."""
        if self.harmony:
            return lambda text: harmony.harmony(text, known)
        spoken = TOOLS[self.tools] if tools and self.tools != NONE else None
        if spoken is None and self.reasoning == NONE:
            return None

        def answer(text: Text) -> Reading[None]:
            return plain(text) if spoken is None else spoken(text, known)

        if self.reasoning == NONE:
            return answer
        return lambda text: think.think(text, self.reasoning == THINK_OPEN, answer)

    @property
    def thinks(self) -> dict[str, Any] | None:
        """How thoughts stand before a structure, in the scheduler's words; harmony's are part of the structure."""
        if self.reasoning not in (THINK, THINK_OPEN):
            return None
        return {"begin": think.BEGIN, "end": think.END, "open": self.reasoning == THINK_OPEN}

    def structure(self, calls: Calls, several: bool, other: Part | None) -> Part:
        """Of an answer that calls functions, or is `other`. None: it must call; `structure.ANY_TEXT`: it may."""
        return STRUCTURES[HARMONY if self.harmony else self.tools](calls, several, other)

    @property
    def harmony(self) -> bool:
        return HARMONY in (self.tools, self.reasoning)


AS_IT_STANDS = Formats()


def choose(templates: Sequence[str], tools: str = AUTO, reasoning: str = AUTO, prompts: Sequence[str] = ()) -> Formats:
    """`templates`: the model's own; `prompts`: what they make of a question. Words other than auto are taken as they
    are."""
    text = "\n".join(templates)
    thought = _reasoning(text, prompts) if reasoning == AUTO else reasoning
    return Formats(_tools(text) if tools == AUTO else tools, thought)


def marks_thoughts(templates: Sequence[str]) -> bool:
    """Where the prompt's end tells whether it opens one."""
    return any(think.END in one for one in templates)


def _tools(template: str) -> str:
    if "tools" not in template:
        return NONE
    if mistral.MARK in template:
        return "mistral"
    if deepseek.CALL in template:
        return "deepseek"
    if harmony.CHANNEL in template:
        return HARMONY
    if hermes.BEGIN in template:  # others write XML between the same marks
        return NONE if any(mark in template for mark in _XML) else "hermes"
    return "llama3-json" if '"parameters"' in template and "ipython" in template else NONE


def _reasoning(template: str, prompts: Sequence[str]) -> str:
    if harmony.CHANNEL in template:
        return HARMONY
    if think.END not in template:
        return NONE
    return THINK_OPEN if any(one.rstrip().endswith(think.BEGIN) for one in prompts) else THINK
