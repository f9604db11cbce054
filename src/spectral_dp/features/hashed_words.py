"""Hashed words as features of texts: which words and pairs of words a text has, without any vocabulary.

A vocabulary that was learnt from private texts would release words of theirs. A hash is fixed in advance, and needs no
weights: this is the front end for texts in any language, and the yardstick for encoders that were trained.
"""

from __future__ import annotations

import math
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spectral_dp.data.texts import decoded_texts
from spectral_dp.features.errors import FeatureError
from spectral_dp.features.extractor import FixedExtractor, Shape
from spectral_dp.features.registry import ImageFacts, register_extractor

_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class HashedWords(FixedExtractor):
    """An :class:`~spectral_dp.features.Extractor` from texts, rows of bytes ``(L,)``, to vectors of unit length.

    Every word, and every run of up to ``words`` words, has a place and a sign that its hash decides. A word that comes
    n times counts ``1 + log n``.

    Attributes:
        dimensions: Numbers of a vector. More dimensions have fewer words that share a place.
        words: The most words of a run: 1 for single words, 2 for pairs of neighbours, too.

    >>> HashedWords(dimensions=64).output_shape((4096,))
    (64,)
    """

    name = "hashed-words"

    dimensions: int = 2048
    words: int = 2

    def __post_init__(self) -> None:
        if self.dimensions < 1 or self.words < 1:
            raise FeatureError(f"dimensions and words must be at least 1, got {self.dimensions}, {self.words}")

    def output_shape(self, input_shape: Shape) -> Shape:
        """Returns ``(dimensions,)``."""
        if len(input_shape) != 1:
            raise FeatureError(f"hashed words are features of texts (L,), not of records of shape {input_shape}")
        return (self.dimensions,)

    def _module(self, input_shape: Shape) -> nn.Module:
        return _Hashing(self)


class _Hashing(nn.Module):
    def __init__(self, hashed: HashedWords) -> None:
        super().__init__()
        self.hashed = hashed

    def forward(self, rows: Tensor) -> Tensor:
        found = [self._vector(text) for text in decoded_texts(rows)]
        vectors = torch.stack(found) if found else torch.zeros(0, self.hashed.dimensions)
        return nn.functional.normalize(vectors, dim=1)

    def _vector(self, text: str) -> Tensor:
        counts = Counter(self._runs(text))
        numbers = [zlib.crc32(run.encode()) for run in counts]  # the same on every machine, unlike hash()
        places = torch.tensor([(number >> 1) % self.hashed.dimensions for number in numbers], dtype=torch.int64)
        weights = [
            (1 + math.log(n)) * (1 if number & 1 else -1) for number, n in zip(numbers, counts.values(), strict=True)
        ]
        return torch.zeros(self.hashed.dimensions).index_add_(0, places, torch.tensor(weights))

    def _runs(self, text: str) -> Iterator[str]:
        words = _WORD.findall(text.lower())
        for length in range(1, self.hashed.words + 1):
            for start in range(len(words) - length + 1):
                yield " ".join(words[start : start + length])


def hashed_words_of(texts: ImageFacts, *, dimensions: int = 2048, words: int = 2) -> HashedWords:
    """Returns the front end for some texts."""
    hashed = HashedWords(dimensions, words)
    hashed.output_shape(texts.shape)  # refuses images
    return hashed


register_extractor("hashed-words", hashed_words_of, assumption="a hash of words that is fixed by a formula")
