"""Radiology reports: which are read, their text, and their label."""

import gzip
import io
import tarfile

import pytest
import torch

from spectral_dp.data import DataError
from spectral_dp.data.reports import parse_reports
from spectral_dp.data.texts import decoded_texts

REPORT = """<?xml version="1.0" encoding="utf-8"?><eCitation><MedlineCitation><Article><Abstract>
<AbstractText Label="INDICATION">Cough</AbstractText>
<AbstractText Label="FINDINGS">{findings}</AbstractText>
<AbstractText Label="IMPRESSION">{impression}</AbstractText>
</Abstract></Article></MedlineCitation><MeSH>{topics}</MeSH></eCitation>"""


def report(findings="Clear lungs.", impression="Nothing acute.", topics=("normal",)):
    listed = "".join(f"<major>{topic}</major>" for topic in topics)
    return REPORT.format(findings=findings, impression=impression, topics=listed).encode()


def archive(reports):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for number, content in reports.items():
            member = tarfile.TarInfo(f"ecgen-radiology/{number}.xml")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return gzip.compress(file.getvalue())


def read(reports):
    rows, labels = parse_reports([archive(reports)])
    return decoded_texts(torch.from_numpy(rows)), labels.tolist()


def test_findings_and_impression_are_the_text_and_topics_the_label():
    abnormal = report("A nodule.", "Follow up.", ("Nodule/lung", "normal"))
    texts, labels = read({"10": abnormal, "2": report()})
    assert texts == ["Clear lungs.\nNothing acute.", "A nodule.\nFollow up."]  # in the order of their numbers
    assert labels == [0, 1]


def test_reports_without_text_or_topics_are_left_out():
    left_out = {
        "1": report("", ""),
        "2": report(topics=()),
        "3": report(topics=("No Indexing",)),
    }
    texts, labels = read(left_out | {"4": report(findings="")})
    assert texts == ["Nothing acute."]
    assert labels == [0]
    with pytest.raises(DataError, match="has no report"):
        read(left_out)


def test_what_is_no_report_is_named():
    with pytest.raises(DataError, match=r"ecgen-radiology/7\.xml in NLMCXR_reports\.tgz is no report"):
        read({"7": b"<eCitation>"})
    with pytest.raises(DataError, match="not a tar archive"):
        parse_reports([gzip.compress(b"nothing of the kind" * 100)])
