"""Rows of docs/supported-models.md are what the load says; all of them together take minutes and are made by hand."""

from __future__ import annotations

import re

import pytest
import transformers
from tritandem.model_facts.families import Finding, findings

from tools.pages.families import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, probe, tables
from tools.pages.generated import DOCS

PAGE = (DOCS / "supported-models.md").read_text()


def row(family: str) -> list[str]:
    [found] = [line for line in PAGE.splitlines() if line.startswith(f"| `{family}` |")]
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", found)[1:-1]]


def blocks() -> dict[str, str]:
    return dict(re.findall(r"<!-- generated: (\S+) -->\n\n(.*?)\n\n<!-- end -->", PAGE, re.DOTALL))


@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "gemma3_text", "gpt2", "mixtral", "gpt_oss", "falcon", "deepseek_v3", "mamba"]
)
def test_a_row_is_what_the_load_says(family: str) -> None:
    found = probe(family)
    shown = tables([found])
    if found.verdict == "refused":
        assert row(family)[-1] in shown["refused-families"]
        assert f"`{family}`" in blocks()["refused-families"]
    else:
        assert found.verdict == "served"
        assert row(family)[2] == found.attention
        assert f"`{family}`" in blocks()["fused-families"] + blocks()["served-families"]


def test_the_page_says_what_the_program_knows() -> None:
    release, known = findings()
    shown = tables(known, release)
    assert {name: block for name, block in blocks().items() if name in shown} == shown


def test_every_family_stands_in_the_page_once() -> None:
    """Of the newest transformers that this project takes: the page names it."""
    if f"Of transformers {transformers.__version__}:" not in PAGE:
        pytest.skip("the page was made with another release of transformers")
    assert sorted(re.findall(r"^\| `([\w.-]+)` \|", PAGE, re.MULTILINE)) == sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def test_a_reason_keeps_to_its_cell() -> None:
    shown = tables([Finding("llama", "refused", "a | b")])["refused-families"]
    assert shown.splitlines()[-1] == "| `llama` | `LlamaForCausalLM` | a \\| b |"
