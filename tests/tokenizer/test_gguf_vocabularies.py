"""Vocabularies in GGUF files: texts are parted as the file says, to the character, or the file is refused."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import regex
from gguf import GGUFWriter
from tritandem.contracts.errors import ConfigError
from tritandem.model_facts.gguf_header import read_gguf
from tritandem.models.gguf import save_tokenizer
from tritandem.tokenizer import TextTokenizer, load_tokenizer
from tritandem.tokenizer.decode.token_text import byte_alphabet
from tritandem.tokenizer.encode.adversarial import short_texts
from tritandem.tokenizer.files.pretokenizers import GGUF_SPLITTERS
from tritandem.tokenizer.files.source import TokenizerSource, read_source

from tests.tokenizer.byte_models import SLOW

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
SPACE = "\u2581"
Entries = Sequence[tuple[str, float, int]]  # piece, score, kind


def write_gguf(
    path: Path, entries: Entries, model: str, merges: Sequence[str] = (), architecture: str = "llama", **keys: object
) -> Path:
    writer = GGUFWriter(str(path), architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(entries))
    writer.add_tokenizer_model(model)
    writer.add_token_list([piece for piece, _, _ in entries])
    writer.add_token_scores([score for _, score, _ in entries])
    writer.add_token_types([kind for _, _, kind in entries])
    if merges:
        writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in keys.items():
        name = f"tokenizer.ggml.{key}"
        writer.add_bool(name, value) if isinstance(value, bool) else writer.add_string(name, str(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# -- byte-level ------------------------------------------------------------------------------------

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
HARD_TEXTS = ["\treturn x", "  a\n\n b 12345 '\r\nS", "x² 1١٢", "«a» b!? C", "ab漢字かな한글 12"]
SOME_SPLITTERS = ["smollm", "deepseek-coder", "deepseek-v3", "glm4", "seed-coder", "bailingmoe", "stablelm2", "tekken"]


def parted(text: str, regexes: Sequence[str]) -> list[str]:
    """The pieces by each regex in turn, on what the last one left: matches, and what stands between them."""
    pieces = [text]
    for one in regexes:
        compiled, before, pieces = regex.compile(one), pieces, []
        for piece in before:
            at = 0
            for match in compiled.finditer(piece):
                pieces += [piece[at : match.start()], match.group()]
                at = match.end()
            pieces.append(piece[at:])
    return [piece for piece in pieces if piece]


BYTE_LEVEL: Entries = [
    ("<unk>", 0.0, CONTROL),
    ("<s>", 0.0, CONTROL),
    ("</s>", 0.0, CONTROL),
    *((char, 0.0, NORMAL) for char in byte_alphabet()),
    ("ĉr", 0.0, NORMAL),
    ("12", 0.0, NORMAL),
]


def byte_level(path: Path, **keys: object) -> TokenizerSource:
    return read_source(write_gguf(path, BYTE_LEVEL, "gpt2", ["ĉ r", "1 2"], **keys))


@pytest.mark.parametrize("name", [*SOME_SPLITTERS, "gpt-2", "qwen35"])
def test_a_text_is_parted_as_the_named_regexes_part_it(name: str, tmp_path: Path) -> None:
    splitter = GGUF_SPLITTERS[name]
    regexes = splitter.chain or ([r"\p{N}", GPT2] if splitter.digits else [GPT2])
    backend = byte_level(tmp_path / "x.gguf", pre=name).new_tokenizer()
    spell = byte_alphabet()
    rng = random.Random(5)
    for text in (*HARD_TEXTS, *short_texts(rng, 300, [])):
        if any(unicodedata.category(char) == "Cn" for char in text):
            continue  # tables of different ages
        pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        expected = ["".join(spell[byte] for byte in piece.encode()) for piece in parted(text, regexes)]
        assert pieces == expected, repr(text)


def test_the_same_text_gets_the_ids_of_its_own_splitter(tmp_path: Path) -> None:
    names = [piece for piece, _, _ in BYTE_LEVEL]
    ids = {}
    for name in ("gpt-2", "glm4", "deepseek-coder", "smollm", "llama-bpe"):
        tokenizer = byte_level(tmp_path / f"{name}.gguf", pre=name).new_tokenizer()
        ids[name] = tokenizer.encode("\treturn 12", add_special_tokens=False).ids
    first = {name: names[found[0]] for name, found in ids.items()}
    assert first == {"gpt-2": "ĉ", "glm4": "ĉr", "deepseek-coder": "ĉr", "smollm": "ĉ", "llama-bpe": "ĉr"}
    last = {name: names[found[-1]] for name, found in ids.items()}
    assert last == {"gpt-2": "12", "glm4": "12", "deepseek-coder": "2", "smollm": "2", "llama-bpe": "12"}


@pytest.mark.parametrize("name", ["deepseek-llm", "falcon", "kimi-k2", "default", "made-up", None])
def test_a_splitter_that_is_not_known_is_refused_by_name(name: str | None, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"tokenizer\.ggml\.pre is {name!r}.*qwen2"):
        byte_level(tmp_path / "x.gguf", **({"pre": name} if name else {}))


def test_a_llama_3_file_begins_texts_with_bos_unless_it_says_otherwise(tmp_path: Path) -> None:
    for number, (name, keys, begins) in enumerate(
        [("llama-bpe", {}, True), ("llama-bpe", {"add_bos_token": False}, False), ("qwen2", {}, False)]
    ):
        tokenizer = byte_level(tmp_path / f"{number}.gguf", pre=name, **keys).new_tokenizer()
        assert (tokenizer.encode("x").ids[0] == 1) is begins


def test_qwens_texts_are_composed_first(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path / "x.gguf", pre="qwen2").new_tokenizer()
    assert tokenizer.encode("e\u0301").ids == tokenizer.encode("\u00e9").ids


# -- SentencePiece ---------------------------------------------------------------------------------

PIECES = [SPACE, SPACE * 2, SPACE * 4, *"hi[]INST", "hi", SPACE + "h", SPACE + "hi", SPACE + "["]
SENTENCEPIECE: Entries = [
    ("<unk>", 0.0, UNKNOWN),
    ("<s>", 0.0, CONTROL),
    ("</s>", 0.0, CONTROL),
    *((f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)),
    *((piece, -float(rank), NORMAL) for rank, piece in enumerate(sorted(PIECES, key=len, reverse=True))),
]
TEXTS = ["hi", " hi", "  hi", "hi  hi hi", "", " ", "   ", "hi\nhi", "é", "</s>hi", "hi</s>"]
TEXTS += ["<s>[INST] hi", "hi</s> hi</s>hi"]


def sentencepiece_ids(text: str, prefixed: bool) -> list[int]:
    """SentencePiece by its definition: the best-scored neighbours merge first, the rest are bytes."""
    index = {piece: number for number, (piece, _, _) in enumerate(SENTENCEPIECE)}
    score = {piece: score for piece, score, kind in SENTENCEPIECE if kind == NORMAL}
    ids: list[int] = []
    for part in regex.split("(<s>|</s>)", text):
        if part in ("<s>", "</s>"):
            ids.append(index[part])
            continue
        symbols = list((SPACE if prefixed and part else "") + part.replace(" ", SPACE))
        while True:
            pairs = [(score.get(a + b, -1e9), -at) for at, (a, b) in enumerate(pairwise(symbols))]
            best, at = max(pairs, default=(-1e9, 0))
            if best == -1e9:
                break
            symbols[-at : -at + 2] = [symbols[-at] + symbols[-at + 1]]
        for symbol in symbols:
            ids += [index[symbol]] if symbol in score else [index[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return ids


def encode(tokenizer: TextTokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids.tolist()


@pytest.mark.parametrize("prefixed", [True, False])
def test_spaces_stand_where_sentencepiece_puts_them(prefixed: bool, tmp_path: Path) -> None:
    keys = {} if prefixed else {"add_space_prefix": False}
    tokenizer = load_tokenizer(write_gguf(tmp_path / "x.gguf", SENTENCEPIECE, "llama", **keys), SLOW)
    for text in TEXTS:
        assert encode(tokenizer, text) == sentencepiece_ids(text, prefixed), repr(text)
    assert tokenizer._source.renderer.decode(encode(tokenizer, "hi  hi")) == "hi  hi"


def test_the_folder_that_a_file_becomes_gives_the_same_ids(tmp_path: Path) -> None:
    """`tritandem model fetch` turns a file into a folder."""
    for number, (entries, model, merges, keys) in enumerate(
        [
            (SENTENCEPIECE, "llama", (), {}),
            (SENTENCEPIECE, "llama", (), {"add_space_prefix": False}),
            (BYTE_LEVEL, "gpt2", ("ĉ r", "1 2"), {"pre": "deepseek-coder"}),
            (BYTE_LEVEL, "gpt2", ("ĉ r", "1 2"), {"pre": "llama-bpe"}),
        ]
    ):
        file = write_gguf(tmp_path / f"{number}.gguf", entries, model, merges, **keys)
        folder = tmp_path / str(number)
        folder.mkdir()
        save_tokenizer(read_gguf(file), folder)
        of_file, of_folder = read_source(file).new_tokenizer(), read_source(folder).new_tokenizer()
        for text in (*TEXTS, "\treturn 12"):
            assert of_folder.encode(text).ids == of_file.encode(text).ids, (keys, text)


def test_mistrals_third_vocabulary_has_a_space_at_the_very_beginning_alone(tmp_path: Path) -> None:
    entries = [*SENTENCEPIECE, ("[INST]", 0.0, CONTROL)]
    tokenizer = load_tokenizer(write_gguf(tmp_path / "x.gguf", entries, "llama"), SLOW)
    names = [piece for piece, _, _ in entries]
    assert [names[token] for token in encode(tokenizer, "hi[INST]hi")] == [f"{SPACE}hi", "[INST]", "hi"]


def test_a_vocabulary_that_drops_spaces_is_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "x.gguf", SENTENCEPIECE, "llama", remove_extra_whitespaces=True)
    with pytest.raises(ConfigError, match="remove_extra_whitespaces"):
        read_source(file)
