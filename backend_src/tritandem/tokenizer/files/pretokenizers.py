"""The pre-tokenizer regexes this project knows, by the names of the models that brought them.

Pure data. The rules of safe cuts are proven on the chains in SPLIT_CHAINS; with another one, texts are encoded whole.
"""

from __future__ import annotations

from typing import NamedTuple

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # inside `ByteLevel`
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_DIGITS = r"\p{N}{1,3}"
DEEPSEEK_CJK = "[一-龥\u3040-ゟ゠-ヿ]+"
DEEPSEEK_WORDS = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)

# Each is a chain of `Split` pre-tokenizers in front of a `ByteLevel` without a regex of its own.
SPLIT_CHAINS = frozenset({(CL100K,), (QWEN2,), (O200K,), (TEKKEN,), (DEEPSEEK_DIGITS, DEEPSEEK_CJK, DEEPSEEK_WORDS)})

QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SEED_CODER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
    r"|\s+(?!\S)|\s+"
)
# One after the other, each on what those before it left apart.
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
DEEPSEEK_V3 = (DEEPSEEK_DIGITS, DEEPSEEK_CJK, DEEPSEEK_WORDS)


class Splitter(NamedTuple):
    """How a byte-level vocabulary parts a text. Without a chain: GPT-2's regex, after single digits or not."""

    chain: tuple[str, ...] = ()
    digits: bool = False
    nfc: bool = False  # characters are composed first
    ignore_merges: bool = False  # a piece that is an entry is that entry, whatever its merges make of it
    bos: bool = False  # a text begins with BOS, unless the file says otherwise


_LLAMA3 = Splitter((CL100K,), ignore_merges=True, bos=True)
_QWEN2 = Splitter((QWEN2,), nfc=True)
_GPT4O = Splitter((O200K,))
# By what a GGUF file calls it (tokenizer.ggml.pre). A name that is not here is refused: no other splitter is right.
GGUF_SPLITTERS = {
    **dict.fromkeys(("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "jais", "exaone4"), Splitter()),
    **dict.fromkeys(("trillion", "granite-docling"), Splitter()),
    **dict.fromkeys(("mpt", "olmo"), Splitter(nfc=True)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"), Splitter(digits=True)),
    "mellum2": Splitter(digits=True),
    "command-r": Splitter(digits=True, nfc=True),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), Splitter((CL100K,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), _QWEN2),
    **dict.fromkeys(("megrez", "kormo", "f2llmv2", "hunyuan", "solar-open", "grok-2"), Splitter((QWEN2,))),
    "qwen35": Splitter((QWEN35,), nfc=True),
    "tekken": Splitter((TEKKEN,), ignore_merges=True, bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT4O),
    "seed-coder": Splitter((SEED_CODER,)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), Splitter((BAILING,))),
    "deepseek-coder": Splitter(DEEPSEEK_CODER),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), Splitter(DEEPSEEK_V3)),
}
