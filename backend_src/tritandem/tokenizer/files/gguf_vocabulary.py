"""What a GGUF file says about its tokenizer beyond the vocabulary: how a text is parted.

Owns what transformers' conversion of the vocabulary leaves out. Start-up only.
"""

from __future__ import annotations

from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

from .pretokenizers import GGUF_SPLITTERS


def restore_tokenizer(converted: Any, header: dict[str, Any]) -> None:
    """Make transformers' conversion of a file's vocabulary part texts as the model it was made from.

    Raises ValueError naming the key for what is not known, rather than giving ids that are nearly right.
    """
    if header.get("tokenizer.ggml.model") == "gpt2":
        _restore_byte_level(converted, header)
    elif header.get("tokenizer.ggml.model") == "llama":
        _restore_sentencepiece(converted.backend_tokenizer, header)


def _restore_byte_level(converted: Any, header: dict[str, Any]) -> None:
    name = header.get("tokenizer.ggml.pre")
    splitter = GGUF_SPLITTERS.get(str(name))
    if splitter is None:
        raise ValueError(f"tokenizer.ggml.pre is {name!r}, allowed: {', '.join(sorted(GGUF_SPLITTERS))}")
    parts: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if splitter.digits else []
    parts += [pre_tokenizers.Split(Regex(regex), "isolated") for regex in splitter.chain]
    parts += [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splitter.chain)]
    backend: Tokenizer = converted.backend_tokenizer
    backend.pre_tokenizer = parts[0] if len(parts) == 1 else pre_tokenizers.Sequence(parts)
    backend.normalizer = normalizers.NFC() if splitter.nfc else None
    backend.model.ignore_merges = splitter.ignore_merges
    if splitter.bos and "tokenizer.ggml.add_bos_token" not in header and converted.bos_token is not None:
        converted.add_bos_token = True
        converted.update_post_processor()


def _restore_sentencepiece(backend: Tokenizer, header: dict[str, Any]) -> None:
    """Spaces become pieces, and one stands in front of every text and after every control token, as SentencePiece does.

    Two families do otherwise and their conversions are right as they are: Gemma has no space in front, and Mistral's
    vocabularies from the third on, told by [INST] as a control token, have one at the very beginning alone.
    """
    if header.get("tokenizer.ggml.remove_extra_whitespaces"):
        raise ValueError("tokenizer.ggml.remove_extra_whitespaces is true, allowed: false")
    prefixed = bool(header.get("tokenizer.ggml.add_space_prefix", True))
    control = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    if str(header.get("general.architecture")).startswith("gemma") or (prefixed and "[INST]" in control):
        return
    spaces = normalizers.Replace(" ", "\u2581")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces]) if prefixed else spaces
    backend.pre_tokenizer = None
    to_text = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(to_text + ([decoders.Strip(" ", left=1)] if prefixed else []))
