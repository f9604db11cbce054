"""Word pieces are those of BERT's tokenizer."""

import hashlib
import random

import pytest

from spectral_dp.pretrained import WeightsError, WordPiece

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
PIECES = [*SPECIAL, *"abcdefghij", *(f"##{c}" for c in "abcdefghij"), "the", "##the", "é", "!", "中", "$", "be", "##be"]


def test_longest_pieces_first():
    tokenizer = WordPiece(PIECES)
    numbers = tokenizer.encode(["The bathe!"], length=8)[0].tolist()
    assert [PIECES[n] for n in numbers] == ["[CLS]", "the", "b", "##a", "##the", "!", "[SEP]", "[PAD]"]


def test_unknown_words_and_long_words():
    tokenizer = WordPiece(PIECES)
    numbers = tokenizer.encode(["xyz a", "a" * 101, "a" * 100], length=4).tolist()
    assert numbers[0] == [2, 1, 4, 3]
    assert numbers[1] == [2, 1, 3, 0]
    assert 1 not in numbers[2]


def test_texts_are_cut_off():
    assert WordPiece(PIECES).encode(["a a a a a a"], length=4).tolist() == [[2, 4, 4, 3]]
    assert WordPiece(PIECES).encode([], length=4).shape == (0, 4)
    with pytest.raises(ValueError, match="length=1"):
        WordPiece(PIECES).encode(["a"], length=1)


def test_equals_the_tokenizers_package():
    tokenizers = pytest.importorskip("tokenizers")
    theirs = tokenizers.BertWordPieceTokenizer({piece: n for n, piece in enumerate(PIECES)}, lowercase=True)
    parts = [*"abcÀéÉ !$.中国\t\n\0\u200b\u0301xß-_İ", "the ", "be", "1", "…", "\ufffd"]
    draw = random.Random(0)
    for _ in range(500):
        text = "".join(draw.choices(parts, k=draw.randrange(30)))
        expected = theirs.encode(text).ids
        found = WordPiece(PIECES).encode([text], length=100)[0].tolist()
        assert found == expected + [0] * (100 - len(expected)), repr(text)


@pytest.mark.parametrize("pieces", [PIECES[1:], ["[UNK]", *SPECIAL], [*PIECES, "a"], ["[PAD]"]])
def test_vocabularies_that_are_none(pieces):
    with pytest.raises(WeightsError, match=r"no vocabulary of BERT.*vocab\.txt"):
        WordPiece(pieces)


def test_read(tmp_path):
    (tmp_path / "vocab.txt").write_text("".join(f"{piece}\n" for piece in PIECES), encoding="utf-8")
    assert len(WordPiece.read(tmp_path / "vocab.txt")) == len(PIECES)
    published = hashlib.sha256((tmp_path / "vocab.txt").read_bytes()).hexdigest()
    assert WordPiece.read(tmp_path / "vocab.txt").sha256 == published
    with pytest.raises(WeightsError, match="cannot read the vocabulary"):
        WordPiece.read(tmp_path / "absent.txt")
    (tmp_path / "vocab.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(WeightsError, match="cannot read the vocabulary"):
        WordPiece.read(tmp_path / "vocab.txt")
