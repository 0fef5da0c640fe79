"""A folder's files agree with one another, or the one that is wrong is named with the field."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tritandem.contracts.errors import ConfigError
from tritandem.model_facts import check_folder, read_folder

TEMPLATE = "{% for m in messages %}<|turn|>{{ m['content'] }}{% endfor %}"


def _write(folder: Path, name: str, **values: Any) -> None:
    (folder / name).write_text(json.dumps(values))


def _write_vocabulary(folder: Path, ordinary: dict[str, int], special: dict[str, int]) -> None:
    added = [{"content": text, "id": token, "special": True} for text, token in special.items()]
    _write(folder, "tokenizer.json", model={"type": "BPE", "vocab": ordinary}, added_tokens=added)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten rows of embedding, eight tokens."""
    _write(tmp_path, "config.json", vocab_size=10, eos_token_id=1, max_position_embeddings=100)
    _write(tmp_path, "generation_config.json", eos_token_id=[1, 2], pad_token_id=0)
    _write(tmp_path, "tokenizer_config.json", eos_token="</s>", chat_template=TEMPLATE)
    _write_vocabulary(tmp_path, {chr(97 + token): token for token in range(3, 8)}, {"<s>": 0, "</s>": 1, "<|turn|>": 2})
    return tmp_path


def test_rows_without_a_token_are_padding(folder: Path) -> None:
    check_folder(folder)
    assert read_folder(folder).vocab_size == 10


CONTRADICTIONS: dict[str, tuple[Callable[[Path], None], str]] = {
    "beyond the vocabulary": (
        lambda folder: _write(folder, "generation_config.json", eos_token_id=[1, 99999]),
        r"generation_config\.json: eos_token_id: given 99999, allowed: an id of the vocabulary, 0\.\.9",
    ),
    "a text": (
        lambda folder: _write(folder, "generation_config.json", eos_token_id="2"),
        r"generation_config\.json: eos_token_id: given '2'",
    ),
    "a list in a list": (
        lambda folder: _write(folder, "generation_config.json", eos_token_id=[[2]]),
        r"eos_token_id: given \[2\]",
    ),
    "a truth": (
        lambda folder: _write(folder, "config.json", vocab_size=10, bos_token_id=True),
        "bos_token_id: given True",
    ),
    "a fraction": (lambda folder: _write(folder, "config.json", vocab_size=10, bos_token_id=1.5), "given 1.5"),
    "a list for the beginning": (
        lambda folder: _write(folder, "config.json", vocab_size=10, bos_token_id=[1]),
        r"config\.json: bos_token_id: given \[1\]",
    ),
    "below zero": (
        lambda folder: _write(folder, "config.json", vocab_size=10, eos_token_id=-1),
        "eos_token_id: given -1",
    ),
    "padding": (lambda folder: _write(folder, "config.json", vocab_size=10, pad_token_id=10), "pad_token_id: given 10"),
    "the text part": (
        lambda folder: _write(folder, "config.json", text_config={"vocab_size": 10, "eos_token_id": 11}),
        r"config\.json, text_config: eos_token_id: given 11",
    ),
    "an id in the tokenizer's file": (
        lambda folder: _write(folder, "tokenizer_config.json", eos_token_id=44),
        r"tokenizer_config\.json: eos_token_id: given 44",
    ),
    "an unknown end token": (
        lambda folder: _write(folder, "tokenizer_config.json", eos_token="<end>"),
        r"tokenizer_config\.json: eos_token: given '<end>'",
    ),
    "another model's tokenizer": (
        lambda folder: _write_vocabulary(folder, {str(token): token for token in range(20)}, {"</s>": 1}),
        r"10 tokens of the tokenizer have no row .* 10 \(vocab_size\): '10' is 10",
    ),
    "a turn token without a row": (
        lambda folder: _write_vocabulary(folder, {"a": 3}, {"</s>": 1, "<|turn|>": 10}),
        r"1 tokens of the tokenizer have no row .*'<\|turn\|>' is 10",
    ),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{") and None, r"config\.json: not JSON"),
    "a list": (lambda folder: (folder / "config.json").write_text("[]") and None, "given list, allowed: a JSON object"),
    "no tokenizer": (lambda folder: _write(folder, "tokenizer.json", model={}), r"tokenizer\.json: not a tokenizer"),
}


@pytest.mark.parametrize(("change", "reason"), CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys())
def test_what_contradicts_is_named(folder: Path, change: Callable[[Path], None], reason: str) -> None:
    change(folder)
    with pytest.raises(ConfigError, match=reason):
        check_folder(folder)


def test_what_harms_nobody_passes(folder: Path) -> None:
    """A picture's token without a row that nothing writes; padding in the manner of older files; no end token."""
    _write_vocabulary(folder, {"a": 3}, {"</s>": 1, "<picture>": 10})
    _write(folder, "config.json", vocab_size=10, pad_token_id=-1, eos_token_id=None)
    _write(folder, "generation_config.json", eos_token_id=[])
    check_folder(folder)


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "ends"),
    [
        ({"eos_token_id": [1, 2]}, {"eos_token_id": 5}, None, (1, 2)),
        ({}, {"eos_token_id": 5}, None, (5,)),
        ({"eos_token_id": None}, {"eos_token_id": [5, 6]}, 6, (5, 6)),
        ({"eos_token_id": 0}, {"eos_token_id": 0}, 7, (0, 7)),
        ({}, {}, 7, (7,)),
        ({}, {"text_config": {"eos_token_id": 4}, "eos_token_id": 5}, None, (4,)),
        ({}, {"text_config": {}, "eos_token_id": 5}, None, (5,)),
        ({}, {}, None, ()),
    ],
)
def test_the_generation_configuration_says_what_ends_else_the_model_and_the_tokenizers_own_beside_it(
    tmp_path: Path, generation: Any, config: Any, tokenizer: int | None, ends: tuple[int, ...]
) -> None:
    _write(tmp_path, "generation_config.json", **generation)
    _write(tmp_path, "config.json", **config)
    assert read_folder(tmp_path).end_ids(tokenizer) == ends


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"max_position_embeddings": 100}, 100),
        ({"max_position_embeddings": 100, "rope_scaling": {"type": "longrope"}}, 100),
        ({"max_position_embeddings": 100, "rope_scaling": {"type": "su"}, "original_max_position_embeddings": 40}, 40),
        (
            {
                "max_position_embeddings": 100,
                "rope_parameters": {"rope_type": "dynamic", "original_max_position_embeddings": 30},
            },
            30,
        ),
        (
            {
                "max_position_embeddings": 100,
                "rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 30},
            },
            100,
        ),
        ({}, None),
    ],
)
def test_the_context_ends_where_frequencies_would_start_to_follow_the_batch(
    tmp_path: Path, config: Any, tokens: int | None
) -> None:
    _write(tmp_path, "config.json", **config)
    assert read_folder(tmp_path).context_tokens == tokens
