"""A chat template is a stranger's program: it ends, in bounded memory, whatever it tries."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import SecurityError
from tritandem.contracts.errors import ConfigError, InvalidRequest
from tritandem.tokenizer import load_tokenizer
from tritandem.tokenizer.chats.authorship import CLIENT, TooLarge, whole
from tritandem.tokenizer.chats.template_bounds import TooMuchWork
from tritandem.tokenizer.chats.template_sandbox import TemplateSandbox

from tests.tokenizer.byte_models import SLOW, load, write_folder
from tests.tokenizer.rendering import encode_chat, render_chat

GROWING = "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}{{ ns.x is none }}"
ENDLESS = [
    "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "{% for a in range(100000) %}{% for b in range(100000) if b > 100000 %}{% endfor %}{% endfor %}",
    "{% for a in range(100000) %}{% for b in range(100000) %}{{ 'x' * 64 }}{% endfor %}{% endfor %}",
    "{% for a in range(100000) %}{% set x = range(100000) | list | sort %}{% endfor %}",
    "{% for a in range(9) recursive %}{{ loop(range(9)) if loop.depth < 60 }}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
]
LARGE = [
    "{{ 'x' * 10**10 }}",
    "{{ [1] * 10**10 }}",
    "{{ 10 ** (10 ** 10) }}",
    "{{ 'x'.ljust(10**9) }}",
    "{{ ('\\t' * 60000).expandtabs(100000) }}",
    "{{ 'x'.translate({120: 'y' * 10000000}) }}",
    "{{ 'x' | center(1000000000) }}",
    "{{ ('a\\n' * 10000) | indent(100000) }}",
    "{{ ('a\\n' * 10000) | indent('y' * 1000000) }}",
    "{{ [1] | slice(1000000000) | list }}",
    "{{ 1.5 | round(1000000000) }}",
    "{{ '%1000000000d' % 3 }}",
    "{{ '%*d' % (1000000000, 3) }}",
    "{{ '{:1000000000}'.format(3) }}",
    "{{ '{:{w}}'.format(3, w=1000000000) }}",
    "{{ ([range(100000) | list] * 10000) | sum(start=[]) }}",
    "{% set ns = namespace(x=[]) %}{% for i in range(9999) %}{% set ns.x = ns.x + [range(99999) | list] %}{% endfor %}",
    "{% set ns = namespace(x=[]) %}{% set l = range(99999) | list %}"
    "{% for i in range(9999) %}{% set ns.x = ns.x + [l[1:]] %}{% endfor %}",
    *(
        GROWING.replace("START", start).replace("STEP", step)
        for start, step in [
            ("'a'", "ns.x ~ ns.x"),
            ("'a'", "ns.x + ns.x"),
            ("[1]", "ns.x + ns.x"),
            ("3", "ns.x * ns.x"),
            ("'a'", "'%s%s' % (ns.x, ns.x)"),
            ("'a'", "'{0}{0}'.format(ns.x)"),
            ("'a' * 999", "ns.x.replace('a', ns.x)"),
            ("'a' * 999", "ns.x | replace('a', ns.x)"),
            ("'a' * 999", "ns.x.join([ns.x] * 999)"),
            ("'a' * 999", "([ns.x] * 999) | join(ns.x)"),
        ]
    ),
    "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    GROWING.replace("START", "[1]").replace("STEP", "[ns.x, ns.x]") + "{{ ns.x }}",
    GROWING.replace("START", "[1]").replace("STEP", "[ns.x, ns.x]") + "{{ ns.x | tojson }}",
    GROWING.replace("START", "[1]").replace("STEP", "[ns.x, ns.x]") + "{{ ns.x | string }}",
    GROWING.replace("START", "[1]").replace("STEP", "[ns.x, ns.x]") + "{{ 'x' ~ ns.x }}",
]
MAX_GROWTH_KIB = 1 << 20  # of this process's peak; one of the texts above alone takes more without bounds


def rendered(template: str, **variables: Any) -> str:
    sandbox = TemplateSandbox()
    return sandbox.render(sandbox.template(template), 0, variables)


@pytest.mark.parametrize("template", ENDLESS)
def test_a_template_ends(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tritandem.tokenizer.chats.template_bounds.MAX_CPU_S", 0.3)
    with pytest.raises((TooMuchWork, TooLarge)):
        rendered(template)


@pytest.mark.parametrize("template", LARGE)
def test_a_template_takes_bounded_memory(template: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TooLarge):
        rendered(template)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert sys.platform != "linux" or grown < MAX_GROWTH_KIB


@pytest.mark.parametrize(
    "template", ["{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ lipsum() }}", "{{ 'x' | urlize }}"]
)
def test_what_no_chat_needs_is_an_error(template: str) -> None:
    with pytest.raises(Exception, match=r"recursion|undefined|No filter"):
        rendered(template)


@pytest.mark.parametrize(
    "attempt",
    [
        "{{ x.__class__.__mro__ }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ '{0.__class__.__mro__}'.format(x) }}",
        "{{ '{x.__class__.__mro__}'.format_map({'x': x}) }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ x.append(1) }}",
        "{{ m._spans.x }}",
    ],
)
def test_a_template_reaches_nothing_of_python(attempt: str) -> None:
    with pytest.raises(SecurityError):
        rendered(attempt, x=[1], m=whole("m", CLIENT))


def test_a_model_with_an_endless_template_is_refused(tmp_path: Path) -> None:
    for number, template in enumerate((ENDLESS[0], LARGE[0])):
        folder = write_folder(tmp_path / str(number), template)
        with pytest.raises(ConfigError, match="chat template"):
            load_tokenizer(folder, SLOW)


def test_a_template_that_grows_with_one_message_is_that_requests_fault(tmp_path: Path) -> None:
    rarely = "{% if messages[0].content == 'Now' %}" + ENDLESS[0] + "{% endif %}"
    tokenizer = load(tmp_path, rarely + "{{ messages[0].content }}")
    assert render_chat(tokenizer, [{"role": "user", "content": "Later"}]) == "Later"
    with pytest.raises(InvalidRequest, match="steps"):
        encode_chat(tokenizer, [{"role": "user", "content": "Now"}])


def test_long_conversations_stay_far_from_the_bounds(tmp_path: Path) -> None:
    """Also for a template that collects its text in one variable, which copies it for every message."""
    collecting = "{% for m in messages %}{% set ns.x = ns.x ~ m.role ~ m.content %}{% endfor %}{{ ns.x }}"
    messages = [{"role": "user", "content": "some words " * 100}] * 500
    prompt = render_chat(load(tmp_path, "{% set ns = namespace(x='') %}" + collecting), messages)
    assert len(prompt) == 500 * len("user" + "some words " * 100)
