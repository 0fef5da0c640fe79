"""The engines of one model and the order in which a text tries them: fast, prefix cache, pieces, whole.

Owns the reference tokenizer and the choice for each text. Knows nothing about batches of callers, their threads or
requests. Any thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...config import TokenizerConfig
from ...contracts.arrays import Int32Array
from ..chats.renderer import control_tokens, template_text
from ..chats.segments import Segment
from ..files.source import TokenizerSource
from .affixes import Affixes, affixes
from .counters import Counters
from .encoded import EngineName, Ids
from .fast import load_fast, warm_up
from .pieces import PieceEncoder
from .plain import PlainEncoder
from .prefix_cache import PrefixCache, keys_of, parting_tokens
from .safe_cuts import cut_rules
from .self_check import proven_equal
from .shadow import ShadowCheck
from .short_first import ShortFirst
from .threads import cores_given, encode_threads
from .whole import WholeEncoder


class Engines:
    """Encodes texts exactly as `tokenizers` would, by the fastest engine that is proven to."""

    def __init__(self, source: TokenizerSource, config: TokenizerConfig, counters: Counters) -> None:
        self.reference = source.new_tokenizer()
        self._whole = WholeEncoder(self.reference)
        control = control_tokens(source)
        self._plain = PlainEncoder(source, control)
        self._affixes = affixes(self._whole)
        self.short_first = ShortFirst()
        self._pieces = _piece_encoder(source, config, self._whole, self._affixes, self.short_first)
        tokens = parting_tokens(control, source.added_tokens, template_text(source))
        usable = config.prefix_cache and tokens and self._affixes is not None
        self._cache = PrefixCache(tokens, config.prefix_cache_bytes) if usable else None
        self._fast = load_fast(source) if config.fast else None
        if self._fast is not None and not proven_equal(self._fast, self._whole, source):
            self._fast.switch_off("it differs from tokenizers in the start-up check")
        self._shadow = None
        if self._fast is not None and self._fast.enabled:
            warm_up(self._fast)
            self._shadow = ShadowCheck(self._fast, self._whole, config.shadow_check_rate, counters)

    def beginning(self, source: TokenizerSource) -> str:
        """How what is put in front of every text is spelled; "" where that is nothing, or not all."""
        around = self._affixes
        return "" if around is None or len(around.tail) else "".join(source.spellings[i] for i in around.head.tolist())

    @property
    def fast_enabled(self) -> bool:
        return self._fast is not None and self._fast.enabled

    def encode(self, text: str, add_special_tokens: bool, parse_special_tokens: bool) -> Ids:
        """Encode one text by the first engine that takes it."""
        if not parse_special_tokens:
            return Ids(self._plain.encode(text, add_special_tokens), "whole")
        ids = self._try_fast(text, add_special_tokens)
        if ids is not None:
            return Ids(ids, "fast")
        if self._cache is not None and self._affixes is not None:
            parted = self._through_cache(self._cache, self._affixes, text, add_special_tokens)
            if parted is not None:
                return parted
        return self._slow(text, add_special_tokens)

    def encode_segments(self, segments: Sequence[Segment]) -> Ids:
        """Encode a rendered chat whose messages hold text that looks like control tokens."""
        return Ids(self._plain.encode_segments(segments), "whole")

    def present(self) -> dict[str, int | bool]:
        """What only the engines know, by the names of TokenizerStats."""
        sizes = self._cache.present() if self._cache is not None else {}
        return {"fast_enabled": self.fast_enabled, **sizes}

    def close(self) -> None:
        """Stop background work."""
        if self._shadow is not None:
            self._shadow.close()
        if self._pieces is not None:
            self._pieces.close()

    def _try_fast(self, text: str, add_special_tokens: bool) -> Int32Array | None:
        """The fast engine's ids, or None when it is off, must not see the text, or refuses it."""
        fast, shadow = self._fast, self._shadow
        if fast is None or shadow is None or not fast.enabled or fast.vetoes(text):
            return None
        try:
            ids = fast.encode(text, add_special_tokens)
        except Exception:  # a refusal is loud and concerns this text only
            return None
        shadow.offer(text, add_special_tokens, ids)
        return ids

    def _through_cache(self, cache: PrefixCache, around: Affixes, text: str, add_special_tokens: bool) -> Ids | None:
        """Encode what the cache does not know and remember the longest beginning; None where it cannot be parted."""
        keys = keys_of(text, cache.partings(text))
        if not keys:
            return None
        known = cache.find(keys)
        begin = known.chars if known else 0
        parts = [known.ids] if known else []
        last, last_key = keys[-1]
        if last > begin:
            parts.append(self._slow(text[begin:last], False).ids)
            parts = [Affixes.join(parts)]
            cache.remember(last_key, parts[0])
        parts.append(self._slow(text[last:], False).ids)
        engine: EngineName = "prefix_cache" if known else self._slow_engine
        return Ids(around.around(parts, add_special_tokens), engine)

    def _slow(self, text: str, add_special_tokens: bool) -> Ids:
        if self._pieces is not None:
            return Ids(self._pieces.encode(text, add_special_tokens), self._slow_engine)
        return Ids(self._whole.encode(text, add_special_tokens), self._slow_engine)

    @property
    def _slow_engine(self) -> EngineName:
        return "pieces" if self._pieces is not None else "whole"


def _piece_encoder(
    source: TokenizerSource, config: TokenizerConfig, whole: WholeEncoder, around: Affixes | None, gate: ShortFirst
) -> PieceEncoder | None:
    rules = cut_rules(source)
    if rules is None or around is None:
        return None
    threads = encode_threads(config.threads, cores_given())
    return PieceEncoder(whole, rules, around, config.piece_chars, threads, config.inline_chars, gate)
