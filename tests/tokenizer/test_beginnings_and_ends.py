"""What stands in front of a text stands there once, and a turn ends where its text says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tritandem.contracts.errors import ConfigError
from tritandem.tokenizer import TextTokenizer, load_tokenizer

from tests.tokenizer.byte_models import SLOW, write_folder
from tests.tokenizer.rendering import encode_chat

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"


def with_bos(folder: Path) -> TextTokenizer:
    write_folder(folder, TEMPLATE, ["<s>", "</s>"])
    file = folder / "tokenizer.json"
    spec = json.loads(file.read_text())
    bos = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    single = [bos, {"Sequence": {"id": "A", "type_id": 0}}]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    tokens = {"<s>": {"id": "<s>", "ids": [256], "tokens": ["<s>"]}}
    spec["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens}
    file.write_text(json.dumps(spec))
    return load_tokenizer(folder, SLOW)


def test_a_text_that_begins_with_bos_gets_no_second_one(tmp_path: Path) -> None:
    tokenizer = with_bos(tmp_path)
    bare = tokenizer.encode("Hi").ids.tolist()
    assert bare == [256, ord("H"), ord("i")]
    assert tokenizer.encode("<s>Hi").ids.tolist() == bare
    assert tokenizer.encode("Hi", add_special_tokens=False).ids.tolist() == bare[1:]
    assert tokenizer.encode(" <s>Hi").ids.tolist()[0] == 256, "not at the beginning: the model's own comes first"
    assert tokenizer.encode("<s>Hi", parse_special_tokens=False).ids.tolist()[:2] == [256, ord("<")], "plain text"
    assert encode_chat(tokenizer, [{"role": "user", "content": "Hi"}]).ids.tolist().count(256) == 1


@pytest.mark.parametrize("end", ["<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>"])
def test_a_turns_end_that_no_configuration_names_ends_an_answer(tmp_path: Path, end: str) -> None:
    write_folder(tmp_path, TEMPLATE, ["</s>", end, "<other>"])
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_text('{"eos_token_id": 0, "vocab_size": 300}')
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "</s>"}))
    assert load_tokenizer(tmp_path, SLOW).end_ids == (0, 256, 257)


def test_the_end_of_a_part_of_an_answer_is_not_its_end(tmp_path: Path) -> None:
    write_folder(tmp_path, TEMPLATE, ["</s>", "<|end|>", "<|return|>"])
    assert load_tokenizer(tmp_path, SLOW).end_ids == (256,)


def test_control_tokens_are_known_by_their_spelling(tmp_path: Path) -> None:
    write_folder(tmp_path, TEMPLATE, ["</s>", "<|im_end|>"], ["<think>"])
    assert load_tokenizer(tmp_path, SLOW).control_ids == {"</s>": 256, "<|im_end|>": 257}, "text shows <think>"


def test_a_sentencepiece_file_alone_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 300}')
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    with pytest.raises(ConfigError, match=r"given tokenizer.model alone, allowed: tokenizer.json; put that"):
        load_tokenizer(tmp_path, SLOW)
