"""How byte-level tokenizers cut a text before pairs are joined, by GGUF's names for it.

A file names its way in ``tokenizer.ggml.pre``. The names, and which of them go together, are those
of llama.cpp (``src/llama-vocab.cpp``, as of 2026); the expressions are those of the models' own
tokenizer.json where llama.cpp quotes them, for Oniguruma, which the package ``tokenizers`` uses.
Several expressions cut one after the other: each takes what the ones before it have left, and both
what it matches and what lies between its matches is cut further by the next.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from typing import Final

from ..errors import UnsupportedModelError

__all__ = ["TEXT_SPLITS", "TextSplit", "text_split"]


@dataclass(frozen=True, slots=True)
class TextSplit:
    """A way to cut a text, and what goes with it where a file does not say."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token is one, whatever the merges make of it
    add_bos: bool = False  # a prompt begins with BOS


# Parts of expressions: English endings, any case of them; the end of most expressions.
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"


def _cl100k(numbers: str) -> str:
    """GPT-4's expression (cl100k), which Llama 3 and Qwen 2 have with their own `numbers`."""
    return rf"{_ENDINGS}|{_WORDS}|{numbers}|{_SIGNS}|{_SPACES}"


def _cased(numbers: str, endings: str, upper: str, lower: str) -> str:
    """GPT-4o's expression (o200k): words end where a capital follows a small letter."""
    front = r"[^\r\n\p{L}\p{N}]?"
    signs = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
    words = f"{front}{upper}*{lower}+{endings}|{front}{upper}+{lower}*{endings}"
    return f"{words}|{numbers}|{signs}|{_SPACES}"


_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_NO_HAN = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ONE, _THREE = r"\p{N}", r"\p{N}{1,3}"
_GPT4O = _cased(_THREE, f"{_ENDINGS}?", _UPPER, _LOWER)
_HAN_KANA = r"[\u4E00-\u9FA5\u3040-\u309F\u30A0-\u30FF]+"
_ASCII_SIGNS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_DEEPSEEK3 = (
    _ASCII_SIGNS
    + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _SPACES
)
_BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uFF0C\u3001\u0964\u06D4\u060C)]+"
_DEEPSEEK_HAN = r"[\u4E00-\u9FA5\u0800-\u4E00\uAC00-\uD7FF]+"
# Letters with case of Unicode 13, as DeepSeek's tokenizer lists them.
_CASED_LETTERS = (
    r"A-Za-z\u00B5\u00C0-\u00D6\u00D8-\u00F6\u00F8-\u01BA\u01BC-\u01BF\u01C4-\u0293\u0295-\u02AF"
    r"\u0370-\u0373\u0376\u0377\u037B-\u037D\u037F\u0386\u0388-\u038A\u038C\u038E-\u03A1"
    r"\u03A3-\u03F5\u03F7-\u0481\u048A-\u052F\u0531-\u0556\u10A0-\u10C5\u13A0-\u13F5\u13F8-\u13FD"
    r"\u1C90-\u1CBA\u1CBD-\u1CBF\u1D00-\u1D2B\u1D6B-\u1D77\u1D79-\u1D9A\u1E00-\u1F15\u1F18-\u1F1D"
    r"\u1F20-\u1F45\u1F48-\u1F4D\u1F50-\u1F57\u1F59\u1F5B\u1F5D\u1F5F-\u1F7D\u1F80-\u1FB4"
    r"\u1FB6-\u1FBC\u1FBE\u1FC2-\u1FC4\u1FC6-\u1FCC\u1FD0-\u1FD3\u1FD6-\u1FDB\u1FE0-\u1FEC"
    r"\u1FF2-\u1FF4\u1FF6-\u1FFC\u2102\u2107\u210A-\u2113\u2115\u2119-\u211D\u2124\u2126\u2128"
    r"\u212A-\u212D\u212F-\u2134\u2139\u213C-\u213F\u2145-\u2149\u214E\u2183\u2184\u2C00-\u2C7B"
    r"\u2C7E-\u2CE4\u2CEB-\u2CEE\u2CF2\u2CF3\uA640-\uA66D\uA680-\uA69B\uA722-\uA76F\uA771-\uA787"
    r"\uA78B-\uA78E\uAB70-\uABBF\uFB00-\uFB06\uFB13-\uFB17\uFF21-\uFF3A\uFF41-\uFF5A"
    r"\U00010400-\U0001044F\U000104B0-\U000104D3\U000104D8-\U000104FB\U00010C80-\U00010CB2"
    r"\U00010CC0-\U00010CF2\U000118A0-\U000118DF\U0001E900-\U0001E943"
)
_AFMOE_SCRIPTS = (  # Han, kana, Thai, Lao, Khmer, Myanmar, Hangul
    r"[\u4E00-\u9FFF\u3400-\u4DBF\uF900-\uFAFF\u3040-\u309F\u30A0-\u30FF\uFF65-\uFF9F\u2F00-\u2FDF"
    r"\u0E40-\u0E7F\u0E80-\u0EFF\u1780-\u17FF\u1000-\u109F\uAA60-\uAA7F\uA9E0-\uA9FF\uAC00-\uD7AF"
    r"\u1100-\u11FF]+"
)
_EIGHT_LENGTHS = "|".join(rf"\s{{{2**n}}}(?!\S)" for n in range(9, 1, -1))  # 512 to 4 spaces

_DEEPSEEK3_STEPS = (_THREE, _HAN_KANA, _DEEPSEEK3)
_LLAMA3 = TextSplit((_cl100k(_THREE),))
_QWEN2 = TextSplit((_cl100k(_ONE),))
_DIGITS_GPT2 = TextSplit((_ONE, _GPT2))

# A way to cut, and the names that files have for it.
_NAMES: tuple[tuple[TextSplit, str], ...] = (
    (
        TextSplit((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
        "default",
    ),
    (
        TextSplit((_cl100k(_THREE),), ignore_merges=True, add_bos=True),
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    ),
    (_LLAMA3, "smaug-bpe dbrx glm4 chatglm-bpe"),
    (
        TextSplit((_THREE, _cl100k(r"\p{N}+")), ignore_merges=True),
        "minicpm5",
    ),
    (
        TextSplit(
            (
                rf"{_ENDINGS}|{_WORDS}|{_THREE}|{_SIGNS}|\s*[\r\n]+|{_EIGHT_LENGTHS}"
                r"|\s{1,2}(?!\S)|\s{1}",
            )
        ),
        "jais-2",
    ),
    (
        _QWEN2,
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
    ),
    (
        TextSplit(
            (
                rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
                rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
            )
        ),
        "qwen35",
    ),
    (TextSplit((rf"{_WORDS}|{_ONE}|{_SIGNS}|{_SPACES}",)), "ufakzeka"),
    (TextSplit((r"[^\n]+|[\n]+", _cl100k(_ONE))), "laguna"),
    (
        TextSplit((rf"{_ENDINGS}|{_WORDS}|{_ONE}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)),
        "seed-coder",
    ),
    (
        TextSplit(
            (
                r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
                r"|\s*[\r\n]|\s+(?!\S)|\s+",
            )
        ),
        "bailingmoe bailingmoe2 llada-moe",
    ),
    (
        TextSplit(
            (
                rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+"
                r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
            )
        ),
        "exaone-moe",
    ),
    (
        TextSplit((_GPT2,)),
        "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert "
        "jina-v1-en jina-v2-code roberta-bpe mpt olmo jais exaone4 trillion granite-docling",
    ),
    (
        _DIGITS_GPT2,
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    ),
    (
        TextSplit((r"[\p{P}$+<=>^~|`]+", _GPT2, r"[0-9][0-9][0-9]")),
        "falcon",
    ),
    (TextSplit((_BLOOM,)), "bloom poro-chat gpt3-finnish"),
    (TextSplit((_BLOOM, _ONE)), "viking"),
    (
        TextSplit(
            (
                r"[\r\n]",
                rf"\s?[{_CASED_LETTERS}]+",
                r"\s?[!-/:-~\uFF01-\uFF0F\uFF1A-\uFF5E\u2018-\u201F\u3000-\u3002]+",
                r"\s+$",
                _DEEPSEEK_HAN,
                r"\p{N}+",
            )
        ),
        "deepseek-llm",
    ),
    (
        TextSplit((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_HAN, _ONE)),
        "deepseek-coder",
    ),
    (TextSplit(_DEEPSEEK3_STEPS), "deepseek-v3 hunyuan-dense hy_v4 joyai-llm"),
    (
        TextSplit(
            (
                _THREE,
                _HAN_KANA,
                _ASCII_SIGNS + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
                r"|[\r\n]|\s+(?!\S)|\s+",
                _ONE,
            )
        ),
        "spark2_5",
    ),
    (
        TextSplit(
            (
                r"[\uAC00-\uD7A3\u3131-\u318E]+"
                r"|[\uFF01\u2026\u201C\u201D\u2018\u2019\u2014\uFF1A\uFF1B\uFF0C\u3001-\u303F"
                rf"\uFE30-\uFE4F]+|[\u3105-\u312F]+|{_HAN_KANA}",
                _cased(_ONE, f"{_ENDINGS}?", _UPPER, _LOWER),
            ),
            ignore_merges=True,
        ),
        "youtu",
    ),
    (
        TextSplit((_cased(_ONE, "", _UPPER, _LOWER),), ignore_merges=True, add_bos=True),
        "tekken",
    ),
    (TextSplit((_GPT4O,)), "gpt-4o llama4 kanana2 talkie minimax-m2"),
    (TextSplit((_GPT4O,), ignore_merges=True), "granite-embed-multi-97m"),
    (TextSplit((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)), "tiny_aya cohere2moe"),
    (
        TextSplit(
            (
                rf"[\p{{Han}}]+|{_cased(_THREE, f'{_ENDINGS}?', *_NO_HAN)}".replace(
                    r"[\r\n/]*", r"[\r\n]*"
                ),
            )
        ),
        "kimi-k2",
    ),
    (TextSplit((r"\p{N}+", r"(?=(\d{3})+(?!\d))")), "superbpe"),
    (
        TextSplit((r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _AFMOE_SCRIPTS, _DEEPSEEK3)),
        "afmoe",
    ),
    (
        TextSplit(
            (
                r"<sentinel:[0-9]+>",
                r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                r"([\t\n]|    |  )",
                _ONE,
                r"[\p{P}!-/:-@\[-`{-~]",
                _GPT2,
            ),
            add_bos=True,
        ),
        "chameleon",
    ),
)


def _oniguruma(pattern: str) -> str:
    r"""An expression with characters for their numbers: Oniguruma has no ``\u4E00``."""
    number = re.compile(r"\\u([0-9A-F]{4})|\\U([0-9A-F]{8})")
    return number.sub(lambda match: chr(int(match[1] or match[2], 16)), pattern)


#: GGUF's name -> how a text is cut.
TEXT_SPLITS: Final = {
    name: replace(split, patterns=tuple(map(_oniguruma, split.patterns)))
    for split, names in _NAMES
    for name in names.split()
}

# Names of tokenizers that are not byte-level: they join characters of plain text.
_OTHERS = ("gemma4", "granite-embed-multi-311m", "sarvam-moe", "whitespace")


def text_split(name: str) -> TextSplit:
    """How a text is cut, by GGUF's name for it; an empty name is "default", as in llama.cpp.

    Raises
    ------
    UnsupportedModelError
        For a name that is not known.
    """
    found = TEXT_SPLITS.get(name or "default")
    if found is not None:
        return found
    if name in _OTHERS:
        raise UnsupportedModelError(
            f"text splitting {name!r} is of a tokenizer that is not byte-level: not supported"
        )
    near = difflib.get_close_matches(name, TEXT_SPLITS, n=5, cutoff=0.4)
    hint = f"; names near it: {', '.join(near)}" if near else ""
    raise UnsupportedModelError(
        f"text splitting {name!r:.80} is not supported: it is none of the {len(TEXT_SPLITS)} names "
        f"known{hint}"
    )
