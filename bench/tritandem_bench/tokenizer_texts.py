"""Texts for the tokenizer benchmark: a kind, a size, never the same twice.

Owns the corpus: what Python itself ships as documentation, code and translations. Knows nothing about tokenizers.
"""

from __future__ import annotations

import base64
import random
import sysconfig
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

KINDS = ("prose", "code", "cjk", "base64", "one word", "emoji")
MAX_CORPUS_CHARS = 6_000_000
HAN = (
    "的一是不了人我在有他这中大来上国个到说们为子和你地出道也时年得就那要下以生会自着去之过家学对可她里后小么心多天而能好都然没日于起还发成事只作当想看文无开手十用主行方又如前所本见经头面公同三已老从动两长"
    "知民样现分将外但身些与高意进把法此实回二理美点月明其种声全工己话儿者向情部正名定女问力机给等几很业最间新什打便位因重被走电四第门相次东政海口使教西再平真听世气信北少关并内加化由却代军产入先山五太水万市"
    "眼体别处总才场师书比住员九笑性通目华报立马命张活难神数件安表原车白应路期叫死常提感金何更反合放做系计或司利受光王果亲界及今京务制解各任至清物台象记边共风战干接它许八特觉望直服毛林题建南度统色字请交爱让"
    "认算论百吃义科怎元社术结六功指思非流每青管夫连远资队跟带花快条院变联言权往展该领传近留红治决周保达办运武半候七必城父强步完革深区即求品士转量空甚众技轻程告江语英基派满式李息写呢识极令黄德收脸钱党倒未持"
    "取设始版双历越史商千片容研像找友孩站广改议形委早房音火际则首单据导影失拿网香似斯专石若兵弟谁校读志飞观争究包组造落视济喜离虽坏兴且"
)
KANA = "のにはをたがでてとしれさあるいもすかならきこりっ"
EMOJI = "😀😂🤣😍🙏👍🏽🎉🚀💻🔥✨❤️👩‍💻👨‍👩‍👧🇩🇪🇯🇵🏳️‍🌈🦩🧠🥑⚡☀️🌍🐍🍜🎸🏔️🚲📦🔧"


class Corpus:
    """Makes texts from shuffled real lines and from random characters."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def text(self, kind: str, chars: int) -> str:
        """A new text of exactly `chars` characters."""
        rng = self._rng
        if kind in ("prose", "code"):
            lines = self._prose if kind == "prose" else self._code
            parts, size = [], 0
            while size < chars:
                begin = rng.randrange(len(lines))
                parts.append("\n".join(lines[begin : begin + rng.randint(3, 12)]))
                size += len(parts[-1]) + 2
            return "\n\n".join(parts)[:chars]
        if kind == "cjk":
            text = ""
            while len(text) < chars:
                text += "".join(rng.choices(HAN + KANA, k=rng.randint(5, 25))) + rng.choice("，。、！\n")
            return text[:chars]
        if kind == "base64":
            encoded = base64.b64encode(rng.randbytes(chars)).decode("ascii")
            return "\n".join(encoded[at : at + 76] for at in range(0, chars, 76))[:chars]
        if kind == "one word":
            return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=chars))
        return "".join(rng.choices(EMOJI, k=chars))

    def chars_for(self, kind: str, tokens: int, count: Callable[[str], int]) -> int:
        """How many characters make about `tokens` tokens, judged by `count` of a sample."""
        sample = self.text(kind, 20_000)
        return max(1, round(tokens * len(sample) / count(sample)))

    @cached_property
    def _code(self) -> list[str]:
        return _lines(self._library_files(), lambda line: bool(line.strip()))

    @cached_property
    def _prose(self) -> list[str]:
        """Lines of the library's documentation and comments that read like sentences."""
        return _lines(self._library_files(), _reads_like_a_sentence)

    @staticmethod
    def _library_files() -> list[Path]:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("**/*.py"))
        return [file for file in files if "site-packages" not in file.parts]


def _reads_like_a_sentence(line: str) -> bool:
    words = line.strip(" #")
    plain = sum(char.isalpha() or char in " ,.'" for char in words)
    return words.count(" ") > 5 and plain > 0.97 * len(words)


def _lines(files: list[Path], wanted: Callable[[str], bool]) -> list[str]:
    lines: list[str] = []
    size = 0
    for file in files:
        text = file.read_text(encoding="utf-8", errors="ignore")
        for line in filter(wanted, text.splitlines()):
            lines.append(line)
            size += len(line)
        if size > MAX_CORPUS_CHARS:
            break
    return lines
