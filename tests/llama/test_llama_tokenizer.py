"""Tokenizers: the tokens of llama2.c's own algorithm, text that comes back, damaged files."""

import struct

import numpy as np
import pytest

import kvedge
from kvedge.data import STORIES_TOKENIZER
from kvedge.llama import ScoredBpeTokenizer, load_llama2c_tokenizer
from kvedge.llama.tokenizer import text_decoder

TEXTS = [
    "",
    " ",
    "Once upon a time, there was a little girl named Lily.",
    'She said, "I\'m sorry!"\nThen   she\tleft.',
    "aaaaaaaaaaaaaaaaa",
    "naïve café — 東京 🙂 \u200a",
    "\0 <s> </s> <0x41>",
]


@pytest.fixture(scope="module")
def tokenizer():
    return load_llama2c_tokenizer(STORIES_TOKENIZER, 512)


def file_entries():
    """(piece, score) of each token in the file."""
    data, position, entries = STORIES_TOKENIZER.read_bytes(), 4, []
    while position < len(data):
        score, length = struct.unpack_from("<fi", data, position)
        entries.append((data[position + 8 : position + 8 + length], score))
        position += 8 + length
    return entries


def encode_as_run_c_does(text, entries):
    """run.c's encode(): characters, else their bytes + 3; then the best pair, time after time."""
    ids = {piece: token for token, (piece, _) in reversed(list(enumerate(entries)))}
    tokens = [ids[b" "]] if text else []
    for character in text:
        utf8 = character.encode()
        tokens += [ids[utf8]] if utf8 in ids else [byte + 3 for byte in utf8]
    while True:
        best = None
        for i in range(len(tokens) - 1):
            joined = ids.get(entries[tokens[i]][0] + entries[tokens[i + 1]][0])
            if joined is not None and (best is None or entries[joined][1] > best[0]):
                best = (entries[joined][1], joined, i)
        if best is None:
            return [1, *tokens]
        tokens[best[2] : best[2] + 2] = [best[1]]


@pytest.mark.parametrize("text", TEXTS, ids=repr)
def test_tokens_are_those_of_run_c(tokenizer, text):
    assert tokenizer.encode(text) == encode_as_run_c_does(text, file_entries())


def test_tokens_of_random_texts_are_those_of_run_c(tokenizer, rng):
    entries = file_entries()
    letters = [*"aehinorst dlu.,'\"\nTLé", "the", "and", " was"]
    for _ in range(150):
        text = "".join(rng.choice(letters, rng.integers(1, 60)))
        assert tokenizer.encode(text) == encode_as_run_c_does(text, entries)


@pytest.mark.parametrize("text", TEXTS, ids=repr)
def test_text_comes_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_pieces_join_to_the_text(tokenizer):
    """Streaming: characters of several byte tokens appear when they are complete."""
    decoder, text, previous = text_decoder(), "", 1
    for token in tokenizer.encode(TEXTS[5])[1:]:
        text += decoder.decode(tokenizer.piece(token, previous))
        assert "\ufffd" not in text
        previous = token
    assert text == TEXTS[5]


def test_only_the_space_after_bos_is_dropped(tokenizer):
    once = tokenizer.encode("Once", bos=False)
    assert tokenizer.decode([1, *once]) == "Once"
    assert tokenizer.decode(once) == " Once"


SPACED = ["", " ", "x", " x", "    four", "a  <turn>  b", "<turn> x", "<turn>", "  \n  y", "é z"]


def spaced_tokenizer(**options):
    """One with tokens of several spaces, and a mark that texts spell out."""
    bytes_ = [b"<0x%02X>" % byte for byte in range(256)]
    words = [b" ", b"  ", b"   ", b"    ", b"x", b" x", b"four", b"y", b"a", b"b", b"z"]
    pieces = [b"<unk>", b"<s>", b"</s>", b"<turn>", *bytes_, *words]
    scores = [0.0] * 260 + [-float(i) for i in range(len(words))]
    return ScoredBpeTokenizer(pieces, scores, spelled_ids=[1, 2, 3], **options)


@pytest.mark.parametrize("text", SPACED, ids=repr)
@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("add_space_prefix", [False, True])
def test_the_spaces_of_a_text_come_back(add_space_prefix, add_bos, text):
    """Decoding drops a space only where encoding adds one: whole, and piece by piece."""
    tokenizer = spaced_tokenizer(add_space_prefix=add_space_prefix, add_bos=add_bos)
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    if add_bos:
        pairs = zip(tokens, [None, *tokens], strict=False)
        streamed = b"".join(tokenizer.piece(token, previous) for token, previous in pairs)
        assert streamed.decode() == text


@pytest.mark.parametrize("text", [*SPACED, "  two"], ids=repr)
@pytest.mark.parametrize("add_space_prefix", [False, True])
def test_sentencepieces_sign_for_a_space_is_a_space(add_space_prefix, text):
    tokenizer = spaced_tokenizer(add_space_prefix=add_space_prefix)
    assert tokenizer.encode(text.replace(" ", "\u2581")) == tokenizer.encode(text)


def test_bos_and_the_space_in_front_can_be_chosen(tokenizer):
    assert tokenizer.encode("", bos=False) == []
    assert tokenizer.encode("") == [1]
    plain = tokenizer.encode("x", bos=False, space_prefix=False)
    assert tokenizer.decode(plain) == "x"


def test_a_byte_of_the_command_line_that_is_not_utf8_is_kept(tokenizer):
    tokens = tokenizer.encode("\udcff", bos=False, space_prefix=False)
    assert tokens == [0xFF + 3]
    assert tokenizer.decode(tokens) == "\ufffd"


def test_what_is_not_text_is_refused(tokenizer):
    with pytest.raises(kvedge.InvalidArgumentError, match="lone surrogate"):
        tokenizer.encode("a\ud800")
    with pytest.raises(kvedge.InvalidArgumentError, match="got bytes"):
        tokenizer.encode(b"abc")
    for token in (-1, 512):
        with pytest.raises(kvedge.InvalidArgumentError, match="vocabulary of 512"):
            tokenizer.decode([token])


def test_a_long_text_does_not_take_quadratic_time(tokenizer):
    tokens = tokenizer.encode(TEXTS[2] * 4000)  # 200,000 characters: hours at n squared
    assert tokenizer.decode(tokens) == TEXTS[2] * 4000


def test_a_tokenizer_cut_anywhere_is_refused(tmp_path):
    data, path = STORIES_TOKENIZER.read_bytes(), tmp_path / "cut.bin"
    for size in [*range(0, 64), *range(64, len(data), 61), len(data) - 1]:
        path.write_bytes(data[:size])
        with pytest.raises(kvedge.CorruptFileError, match=r"cut\.bin"):
            load_llama2c_tokenizer(path, 512)


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, struct.pack("<i", 3), "expected 0 to 3"),
        (4, struct.pack("<f", np.nan), "token 0 has the score nan"),
        (8, struct.pack("<i", -1), "length of -1"),
        (8, struct.pack("<i", 2**31 - 1), "length of 2147483647"),
    ],
)
def test_a_damaged_tokenizer_is_refused(tmp_path, offset, value, message):
    data = bytearray(STORIES_TOKENIZER.read_bytes())
    data[offset : offset + 4] = value
    path = tmp_path / "tok.bin"
    path.write_bytes(data)
    with pytest.raises(kvedge.CorruptFileError, match=message):
        load_llama2c_tokenizer(path)


def test_another_models_tokenizer_is_refused():
    with pytest.raises(kvedge.InvalidArgumentError, match="512 tokens, the model has 500"):
        load_llama2c_tokenizer(STORIES_TOKENIZER, 500)
    with pytest.raises(kvedge.CorruptFileError, match="512 tokens, the model has 2048"):
        load_llama2c_tokenizer(STORIES_TOKENIZER, 2048)


def test_a_vocabulary_that_makes_no_sense_is_refused():
    with pytest.raises(kvedge.InvalidArgumentError, match="2 scores"):
        ScoredBpeTokenizer([b"a", b"b", b"c"], [0, 0])
    with pytest.raises(kvedge.InvalidArgumentError, match="NaN"):
        ScoredBpeTokenizer([b"a", b"b", b"c"], [0, 0, np.nan])
    with pytest.raises(kvedge.InvalidArgumentError, match="vocabulary of 3"):
        ScoredBpeTokenizer([b"a", b"b", b"c"], [0, 0, 0], bos_id=3)


def test_a_character_without_a_token_or_bytes_is_unknown():
    tokenizer = ScoredBpeTokenizer([b"<unk>", b"<s>", b"</s>", b"a", b" "], [0.0] * 5)
    assert tokenizer.encode("aé") == [1, 4, 3, 0, 0]
