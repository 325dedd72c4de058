"""Compressed data files: read as a stream, bounded, and never under a name that an archive gives."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import zipfile

import pyarrow as pa
import pytest

from automodel.config.errors import UserError
from automodel.data import packed
from automodel.data.config import DatasetConfig
from automodel.data.sources import load_rows

ROWS = [{"text": f"review number {i}", "label": str(i % 2)} for i in range(20)]


def zipped(content: bytes, *names: str, **more: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, inside in {**dict.fromkeys(names, content), **more}.items():
            archive.writestr(name, inside)
    return out.getvalue()


def zstd(content: bytes) -> bytes:
    out = pa.BufferOutputStream()
    with pa.CompressedOutputStream(out, "zstd") as stream:
        stream.write(content)
    return out.getvalue().to_pybytes()


PACK = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstd, "zip": lambda c: zipped(c, "any")}


def table(separator: str) -> bytes:
    lines = [separator.join(["text", "label"]), *(separator.join(row.values()) for row in ROWS)]
    return "".join(f"{line}\n" for line in lines).encode()


def as_parquet() -> bytes:
    import pyarrow.parquet as pq

    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(ROWS), out)
    return out.getvalue()


WRITTEN = {
    "csv": table(","),
    "tsv": table("\t"),
    "jsonl": "".join(json.dumps(row) + "\n" for row in ROWS).encode(),
    "json": json.dumps({"rows": ROWS}, indent=1).encode(),
    "parquet": as_parquet(),
}


@pytest.fixture
def load(tmp_path):
    def load_file(name, content, **settings):
        (tmp_path / name).write_bytes(content)
        return load_rows(DatasetConfig(path=str(tmp_path / name), cache_dir=str(tmp_path / "cache"), **settings))

    return load_file


@pytest.mark.parametrize("packing", PACK)
@pytest.mark.parametrize("format", WRITTEN)
def test_every_format_in_every_packing(load, format, packing):
    assert load(f"a.{format}.{packing}", PACK[packing](WRITTEN[format])).to_list() == ROWS


@pytest.mark.parametrize("packing", PACK)
def test_texts_in_every_packing(load, packing):
    assert load(f"a.txt.{packing}", PACK[packing](b"one\ntwo\n"))["text"][:] == ["one", "two"]


def test_an_archive_is_what_its_only_member_is(load):
    content = zipped(WRITTEN["jsonl"], "data/reviews.jsonl", **{"README.md": b"x", "__MACOSX/._reviews.jsonl": b"x"})
    assert load("reviews.zip", content).to_list() == ROWS


def test_several_packed_files_are_joined(tmp_path):
    for number in range(2):
        (tmp_path / "d").mkdir(exist_ok=True)
        (tmp_path / "d" / f"part{number}.csv.zst").write_bytes(zstd(WRITTEN["csv"]))
    rows = load_rows(DatasetConfig(path=str(tmp_path / "d"), cache_dir=str(tmp_path / "cache")))
    assert rows.to_list() == ROWS * 2


def test_two_streams_in_one_file_are_both_read(load):
    half = len(WRITTEN["csv"]) // 2
    for packing in ("gz", "bz2", "xz", "zst"):
        pack = PACK[packing]
        both = pack(WRITTEN["csv"][:half]) + pack(WRITTEN["csv"][half:])
        assert load(f"a.csv.{packing}", both).to_list() == ROWS


def test_a_path_of_an_archive_is_not_followed(load, tmp_path):
    outside = tmp_path / "outside.csv"
    for name in ("../outside.csv", str(outside)):
        assert load("a.zip", zipped(WRITTEN["csv"], name)).to_list() == ROWS
    assert not outside.exists()
    assert not (tmp_path.parent / "outside.csv").exists()


def test_a_link_in_an_archive_is_no_way_out(load, tmp_path):
    (tmp_path / "secret.csv").write_bytes(WRITTEN["csv"])
    link = zipfile.ZipInfo("a.csv")
    link.external_attr = 0o120777 << 16
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(link, str(tmp_path / "secret.csv"))
    with pytest.raises(UserError):  # its content is the path, which is no table of rows
        load("a.zip", out.getvalue())


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        pytest.param(
            "a.zip", zipped(WRITTEN["csv"], "train.csv", "test.csv"), r"2 files \('train.csv', 'test.csv'\).*unzip",
            id="two splits",
        ),
        pytest.param("a.csv.zip", zipped(WRITTEN["csv"], "a.csv", "b.csv"), "it holds 2 files", id="two files"),
        pytest.param("a.zip", zipped(b"", "README.md"), "there is no data file in it", id="no data"),
        pytest.param("a.zip", zipped(b"x", "a.png"), "of a format that cannot be read", id="a picture"),
        ("a.zip", b"PK\x03\x04 no archive", "File is not a zip file. Copy it again"),
        ("a.csv.zip", b"no archive", "File is not a zip file. Copy it again"),
        ("a.parquet.gz", b"no archive", "Not a gzipped file.*Copy it again"),
        *[(f"a.csv.{p}", b"no archive, a text", "Copy it again") for p in PACK],
        # Packed bytes hold the time, so the processes of pytest-xdist would name such tests differently.
        *[pytest.param(f"a.csv.{p}", PACK[p](WRITTEN["csv"])[:-9], "Copy it again", id=f"cut.{p}") for p in PACK],
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_said(load, name, content, words):
    with pytest.raises(UserError, match=rf"dataset.path: '.*{name}'.*{words}"):
        load(name, content)


def test_an_archive_with_a_password(load):
    content = bytearray(zipped(WRITTEN["csv"], "a.csv"))
    for signature, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(signature) + flags] |= 1
    with pytest.raises(UserError, match="it needs a password. Unpack it"):
        load("a.zip", bytes(content))


@pytest.mark.parametrize("packing", PACK)
def test_a_file_of_far_too_many_bytes_is_refused_before_they_are_written(load, tmp_path, packing, monkeypatch):
    monkeypatch.setattr(packed, "ALWAYS_ALLOWED", 2**20)
    bomb = PACK[packing](bytes(2**25) if packing != "bz2" else bytes(2**27))
    with pytest.raises(UserError, match="more than 250 times the file's own size"):
        load(f"a.csv.{packing}", bomb)
    with pytest.raises(UserError, match="more than 250 times the file's own size"):
        load(f"a.parquet.{packing}", bomb)
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.stat().st_size > 2**20] == []


def test_another_encoding_in_a_packed_file_names_the_command(load):
    with pytest.raises(UserError, match=r"is UTF-16.*`zstdcat .*a.csv.zst \| iconv -f UTF-16LE -t UTF-8 > utf8-a.csv`"):
        load("a.csv.zst", zstd(WRITTEN["csv"].decode().encode("utf-16-le")))
