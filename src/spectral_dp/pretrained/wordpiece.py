"""From texts to numbers of word pieces, as BERT's uncased vocabulary has them (Devlin et al. 2019).

text -> without control characters and accents, in lower case
     -> words and single punctuation marks
     -> the longest pieces of the vocabulary, from the left; a piece inside a word begins with ``##``
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from spectral_dp.pretrained.errors import WeightsError

_LONGEST_WORD = 100  # characters; longer ones are unknown
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


class WordPiece:
    """A tokenizer for texts in English.

    Args:
        vocabulary: The word pieces in the order of their numbers. ``[PAD]`` must be the first of them.

    >>> pieces = WordPiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "pri", "##vate", "!"])
    >>> pieces.encode(["Private!", "?"], length=6).tolist()
    [[2, 4, 5, 6, 3, 0], [2, 1, 3, 0, 0, 0]]
    """

    def __init__(self, vocabulary: Sequence[str]) -> None:
        self._numbers = {piece: number for number, piece in enumerate(vocabulary)}
        missing = [piece for piece in _SPECIAL if piece not in self._numbers]
        if missing or self._numbers["[PAD]"] != 0 or len(self._numbers) != len(vocabulary):
            raise WeightsError(
                f"this is no vocabulary of BERT: of {len(vocabulary)} lines {len(self._numbers)} differ, "
                f"{', '.join(missing) or 'nothing'} is missing, and [PAD] must be the first; use the vocab.txt that "
                "was published with the weights"
            )
        self._pieces_of: dict[str, list[int]] = {}  # words come again and again

    @classmethod
    def read(cls, path: Path) -> WordPiece:
        """Reads a vocabulary from a file with one word piece a line."""
        try:
            return cls(path.read_text(encoding="utf-8").split("\n")[:-1])
        except (OSError, UnicodeDecodeError) as error:
            raise WeightsError(f"cannot read the vocabulary {path}: {error}") from error

    @property
    def sha256(self) -> str:
        """A checksum of the vocabulary."""
        return hashlib.sha256("".join(f"{piece}\n" for piece in self._numbers).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._numbers)

    def encode(self, texts: Iterable[str], *, length: int) -> Tensor:
        """Returns the word pieces of each text, cut off or padded with zeros: ``(N, length)``, int32.

        Args:
            texts: The texts.
            length: Number of word pieces, with ``[CLS]`` before and ``[SEP]`` after the text; at least 2.
        """
        if length < 2:
            raise ValueError(f"a text has at least two word pieces, [CLS] and [SEP], got length={length}")
        first, last = self._numbers["[CLS]"], self._numbers["[SEP]"]
        rows = []
        for text in texts:
            numbers = [first, *self._numbers_of(text, length - 2), last]
            rows.append(numbers + [0] * (length - len(numbers)))
        return torch.tensor(rows, dtype=torch.int32).reshape(-1, length)

    def _numbers_of(self, text: str, limit: int) -> list[int]:
        numbers: list[int] = []
        for word in _words(text):
            if len(numbers) >= limit:
                break
            if word not in self._pieces_of:
                self._pieces_of[word] = self._split(word)
            numbers += self._pieces_of[word]
        return numbers[:limit]

    def _split(self, word: str) -> list[int]:
        """Returns the longest pieces from the left, or the one for unknown words if some part is in none."""
        unknown, numbers, start = [self._numbers["[UNK]"]], list[int](), 0
        if len(word) > _LONGEST_WORD:
            return unknown
        while start < len(word):
            inside = "##" if start else ""
            for end in range(len(word), start, -1):
                if (number := self._numbers.get(inside + word[start:end])) is not None:
                    numbers.append(number)
                    start = end
                    break
            else:
                return unknown
        return numbers


def _words(text: str) -> list[str]:
    characters = []
    for character in text:
        if character in "\0\ufffd" or _is_control(character):
            continue
        # Chinese is written without spaces: each character is a word of its own.
        characters.append(f" {character} " if _is_chinese(character) else character)
    words = []
    for word in "".join(characters).lower().split():
        plain = "".join(c for c in unicodedata.normalize("NFD", word) if unicodedata.category(c) != "Mn")
        spaced = (f" {c} " if _is_punctuation(c) else c for c in plain)
        words += "".join(spaced).split()
    return words


def _is_control(character: str) -> bool:
    return character not in "\t\n\r" and unicodedata.category(character) in ("Cc", "Cf", "Cn", "Co", "Cs")


def _is_punctuation(character: str) -> bool:
    # All of ASCII that is no letter, digit or space counts, such as $ and ^.
    code = ord(character)
    is_ascii = 33 <= code <= 47 or 58 <= code <= 64 or 91 <= code <= 96 or 123 <= code <= 126
    return is_ascii or unicodedata.category(character).startswith("P")


def _is_chinese(character: str) -> bool:
    code = ord(character)
    return (
        0x3400 <= code <= 0x9FFF or 0xF900 <= code <= 0xFAFF or 0x20000 <= code <= 0x2CEAF or 0x2F800 <= code <= 0x2FA1F
    )
