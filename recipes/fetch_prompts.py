"""Spoken prompts of a telephone system in five languages, out of Debian's packages (CC-BY-SA 3.0; 8 kHz wav).

    apt-get download asterisk-core-sounds-en asterisk-core-sounds-{en,es,fr,it,ru}-wav
    python recipes/fetch_prompts.py . runs/prompts

Writes runs/prompts/LANGUAGE/*.wav, and train.jsonl and validation.jsonl that list them, the English ones with their
words. Every fifth name is held out, in all languages.
"""

import gzip
import hashlib
import io
import json
import re
import sys
import tarfile
from pathlib import Path

from superstep.data.samples.sounds import sound_seconds

NAME = "asterisk-core-sounds-{}-wav_1.6.1-1_all.deb"
HASHES = {
    "en": "2be3ea287d83299d143815fa804f11179a75b7affd4a758b98b55f5afc18a35d",
    "es": "9283a09a6d56fccdcc2bcfe86c48f0f844289cfbd46a3184d8785a6f7f569903",
    "fr": "8d4e1bc32ed5ba7fbda40841ca1825ed20cc6232724a473c90f8bb0e53e6073e",
    "it": "5a26638089e134b8ac39363fe249c5c93c50cd8bfdc9b2499ae61ec4a35e2fcb",
    "ru": "ccbfaebfa450b7a9ddf644ae0f3d1e9017d5df7c0aebe816e946345589d38201",
}
"""SHA-256 of each language's package."""
TEXTS = "asterisk-core-sounds-en_1.6.1-1_all.deb"
TEXTS_HASH = "973e797d28e37fa6ca3c0a9d6fa717e77cf1268ae916bf09fd3503113cdffa50"
"""The package with what the English prompts say, and its SHA-256."""
SIGNS = {
    "0": "zero", "1": "one", "2": "two", "3": "three", "4": "four", "5": "five", "6": "six", "7": "seven",
    "8": "eight", "9": "nine", "#": "pound", "*": "star",
}  # fmt: skip
"""What is said for a sign."""
EVERY = 5
"""Of so many names the last is held out."""
LEAST_S = 0.3
"""Seconds of the shortest prompt that is kept."""


def read_archive(package: bytes) -> bytes:
    """The data archive of a Debian package: an ar file of parts behind headers of 60 bytes (ar(5))."""
    place = 8
    while place < len(package):
        name, size = package[place : place + 16].decode().strip(), int(package[place + 48 : place + 58])
        if name.startswith("data.tar"):
            return package[place + 60 : place + 60 + size]
        place += 60 + size + size % 2
    raise ValueError("the package has no data")


def open_package(package: Path, sha256: str) -> tarfile.TarFile:
    """The files of a package."""
    raw = package.read_bytes()
    if (found := hashlib.sha256(raw).hexdigest()) != sha256:
        sys.exit(f"{package} has the SHA-256 {found}, not {sha256}; download this version of it.")
    return tarfile.open(fileobj=io.BytesIO(read_archive(raw)))


def write_out(text: str) -> str:
    """What is said, in small letters: "Press 1." is "press one"; empty for notes such as [beep], and for numbers."""
    if re.search(r"[\[(<]|\d[\d.]", text):
        return ""
    said = re.sub(r"[\d#*]", lambda sign: f" {SIGNS[sign[0]]} ", text.lower())
    return " ".join(re.sub("[^a-z']", " ", said).split())


def read_texts(package: Path) -> dict[str, str]:
    """What each English prompt says, by its name, where the package tells that well."""
    with open_package(package, TEXTS_HASH) as files:
        (member,) = (each for each in files if each.name.endswith("core-sounds-en.txt.gz"))
        lines = gzip.decompress(files.extractfile(member).read()).decode().splitlines()
    named = (line.split(":", 1) for line in lines if ":" in line and not line.startswith(";"))
    return {name.replace("/", "-") + ".wav": write_out(text) for name, text in named}


def unpack(package: Path, folder: Path, sha256: str) -> list[str]:
    """Write the prompts of a package; returns their names, without those of silence."""
    names = []
    with open_package(package, sha256) as files:
        for member in files:
            parts = member.name.split("/sounds/")[-1].split("/")[1:]
            if not (member.isfile() and member.name.endswith(".wav")) or "silence" in parts:
                continue
            name = "-".join(parts)
            (folder / name).write_bytes(files.extractfile(member).read())
            if sound_seconds(folder / name) >= LEAST_S:
                names.append(name)
    return names


def main(packages: Path, folder: Path) -> None:
    """Write the prompts and the two lists."""
    prompts = {}
    for language, sha256 in HASHES.items():
        (folder / language).mkdir(parents=True, exist_ok=True)
        prompts[language] = unpack(packages / NAME.format(language), folder / language, sha256)
    texts = {f"en/{name}": text for name, text in read_texts(packages / TEXTS).items() if text}
    names = sorted({name for each in prompts.values() for name in each})
    held_out = set(names[EVERY - 1 :: EVERY])
    for split, is_chosen in (("train", False), ("validation", True)):
        lines = [
            {"audio": (audio := f"{language}/{name}"), "language": language, "seconds": sound_seconds(folder / audio)}
            | ({"text": texts[audio]} if audio in texts else {})
            for language, each in prompts.items()
            for name in sorted(each)
            if (name in held_out) == is_chosen
        ]
        (folder / f"{split}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
        hours = sum(line["seconds"] for line in lines) / 3600
        sys.stdout.write(f"{len(lines):,} prompts, {hours:.1f} hours, in {folder}/{split}.jsonl\n")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python recipes/fetch_prompts.py FOLDER_OF_PACKAGES FOLDER")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
