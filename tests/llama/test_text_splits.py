"""How byte-level tokenizers cut a text: each of GGUF's names, by two engines and by hand."""

import pytest

import kvedge
from kvedge.llama.byte_level_bpe import ByteLevelBpeTokenizer
from kvedge.llama.text_splits import TEXT_SPLITS, text_split

tokenizers = pytest.importorskip("tokenizers")
pre = tokenizers.pre_tokenizers

ODD = (
    "",
    " ",
    "a",
    "\n\n \n  x\r\n\ty \r",
    "don't DON'T we'Ll 'S it's' ''ve",
    "1 12 123 1234 12345678901 x1y22z333 \u00bd\u0663\u0664\u0665 1,234,567.89",
    "HTMLParser camelCase \u00c5ngstr\u00f6m \u01c5ukan \u00e9t\u00e9 \u1e9e stra\u00dfe",
    "e\u0301\u0302x \u0e01\u0e33\u0e25\u0e31\u0e07 \u0939\u093f\u0928\u094d\u0926\u0940 \u0e40",
    "\u6771\u4eac\u90fd\u306e\u30ab\u30bf\u30ab\u30ca\ud55c\uad6d\uc5b4\u3105\uff01\uff0c\u3002abc",
    "x=y+z<=>^~|`$ #include <a/b>//c\\d [e] {f} (g) @h &i; ...!!! \u2026\u201cq\u201d \u20ac5",
    "\u00a0nbsp\u2003em \u200b zero\u3000wide \u0085 next",
    "\U0001f642\U0001f1e9\U0001f1ea \U00010400\U00010428 \u2126\u212a",
    "  \t  indent\n    four\n" + " " * 70 + "deep" + "\n" * 5,
    "<sentinel:12>IMGIMGABCDZ <|im_start|>_under_score__ a_b",
    "\u060c\u0964\u06d4 a,b.c!d?e(f) \u00b5\u00aa\u00ba\u02b0",
)


def words(name, text):
    """A text as the tokenizer of that name cuts it."""
    tokens = sorted(pre.ByteLevel.alphabet())
    tokenizer = ByteLevelBpeTokenizer(tokens, [], split=name)
    found = tokenizer._bpe.pre_tokenizer.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in found]


@pytest.mark.parametrize("name", TEXT_SPLITS)
def test_a_text_is_cut_as_another_engine_cuts_it(name):
    """The package regex, one expression after the other: on pieces, not on the whole text."""
    regex = pytest.importorskip("regex")
    for text in ODD:
        pieces = [text] if text else []
        for pattern in TEXT_SPLITS[name].patterns:
            # Oniguruma's `$` is the end of a line, and so it reads the tokenizers' expressions
            engine = regex.compile(pattern, regex.V1 | regex.MULTILINE)
            cut = []
            for piece in pieces:
                at = 0
                for match in engine.finditer(piece):
                    cut += [piece[at : match.start()], match[0]]
                    at = match.end()
                cut.append(piece[at:])
            pieces = [piece for piece in cut if piece]
        assert words(name, text) == pieces, text
        assert "".join(pieces) == text


def test_ways_that_the_library_has_built_in_are_the_same():
    gpt2 = pre.ByteLevel(add_prefix_space=False)
    built_in = {
        "gpt-2": gpt2,
        "smollm": pre.Sequence([pre.Digits(individual_digits=True), gpt2]),
        "falcon": pre.Sequence(
            [
                pre.Punctuation(behavior="contiguous"),
                gpt2,
                pre.Split(tokenizers.Regex("[0-9][0-9][0-9]"), behavior="isolated"),
            ]
        ),
    }
    for name, library in built_in.items():
        for text in ODD:
            cut = [text[start:end] for _, (start, end) in library.pre_tokenize_str(text)]
            assert words(name, text) == cut, (name, text)


@pytest.mark.parametrize(
    ("names", "text", "cut"),
    [
        ("gpt-2 mpt olmo jais", "a12345", "a|12345"),
        ("smollm starcoder refact command-r qwen2 deepseek-r1-qwen tekken", "a123", "a|1|2|3"),
        ("llama-bpe smaug-bpe dbrx glm4 gpt-4o deepseek-v3 kimi-k2", "a12345", "a|123|45"),
        ("afmoe tiny_aya superbpe", " 12345678", " |12|345|678"),
        ("default falcon", "a12345!", "a|123|45|!"),
        ("llama-bpe qwen2 laguna", "WE'LL go", "WE|'LL| go"),
        ("gpt-2 smollm", "WE'LL go", "WE|'|LL| go"),
        ("gpt-4o tiny_aya kimi-k2 youtu", "WE'LL go", "WE'LL| go"),
        ("gpt-4o tekken", "parseHTML", "parse|HTML"),
        ("llama-bpe qwen2 deepseek-v3", "parseHTML", "parseHTML"),
        ("deepseek-v3 kimi-k2", "a\u6771\u4eac", "a|\u6771\u4eac"),
        ("kimi-k2", "\u6771\u30ab", "\u6771|\u30ab"),
        ("qwen35 deepseek-v3", "e\u0301a", "e\u0301a"),
        ("qwen2 ufakzeka", "e\u0301a", "e|\u0301a"),
        ("exaone-moe", "one two 3", "one two| |3"),
        ("viking", "one two, 3", "one| two|,| |3"),
        ("jais-2", "      x", "    | | x"),
    ],
)
def test_words_are_those_that_models_were_trained_on(names, text, cut):
    for name in names.split():
        assert words(name, text) == cut.split("|"), name


def test_a_name_that_is_not_known_is_refused_with_those_near_it():
    with pytest.raises(kvedge.UnsupportedModelError, match=r"'llama-bp' .*near it: llama-bpe"):
        text_split("llama-bp")
    with pytest.raises(kvedge.UnsupportedModelError, match="not byte-level"):
        text_split("gemma4")
    assert text_split("") is text_split("default")


def test_what_goes_with_a_name_is_llama_cpps():
    for name in ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2", "tekken"):
        assert text_split(name).ignore_merges and text_split(name).add_bos
    assert not text_split("smaug-bpe").ignore_merges and not text_split("qwen2").add_bos
