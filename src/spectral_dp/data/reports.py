"""Radiology reports of chest x-rays (Demner-Fushman et al. 2016), de-identified, out of the archive they come in.

The reports are under CC BY-NC-ND 4.0: the cache holds the archive as it was published, and it is read where it lies.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence

import numpy as np

from spectral_dp.data.archives import read_members
from spectral_dp.data.errors import DataError
from spectral_dp.data.formats import Samples
from spectral_dp.data.texts import MOST_BYTES, encoded_texts

PACKAGED = "NLMCXR_reports.tgz"

_MEMBERS = tuple(f"ecgen-radiology/{number}.xml" for number in range(1, 4000))
_SECTIONS = ("FINDINGS", "IMPRESSION")
_NOT_INDEXED = "no indexing"


def parse_reports(files: Sequence[bytes]) -> Samples:
    """Reads the reports in the order of their numbers: texts ``(N, MOST_BYTES)`` and labels, 1 for an abnormal finding.

    The text has the sections of findings and impression. The label is that of the people who indexed the reports: 0
    where they wrote "normal" and nothing else. Reports that they left out, or that have neither section, are left out.
    """
    (archive,) = files
    found = read_members(archive, _MEMBERS)
    texts, labels = [], []
    for name in _MEMBERS:
        if name not in found:
            continue
        text, topics = _report(name, found[name])
        if text and topics and not any(_NOT_INDEXED in topic.lower() for topic in topics):
            texts.append(text)
            labels.append(topics != ["normal"])
    if not texts:
        raise DataError(f"{PACKAGED} has no report")
    return encoded_texts(texts, MOST_BYTES), np.array(labels, np.uint8)


def _report(name: str, content: bytes) -> tuple[str, list[str]]:
    """Returns the text of a report and the topics that it was indexed with."""
    try:
        root = ElementTree.fromstring(content)  # of a file whose checksum was compared
    except ElementTree.ParseError as error:
        raise DataError(f"{name} in {PACKAGED} is no report: {error}") from error
    sections = {part.get("Label"): part.text or "" for part in root.iter("AbstractText")}
    text = "\n".join(sections[label].strip() for label in _SECTIONS if sections.get(label))
    return text, [topic.text or "" for topic in root.iterfind(".//MeSH/major")]
