"""Readers of samples: idx files, CIFAR's binaries, folders of classes, parquet, tars, and lists of sounds."""

import builtins
import gzip
import io
import json
import math
import tarfile
import wave

import numpy as np
import pytest
import torch

from superstep.data.samples.cifar import read_cifar
from superstep.data.samples.class_folder import list_pictures
from superstep.data.samples.idx import read_idx, write_idx
from superstep.data.samples.parquet import ParquetRows, picture_bytes
from superstep.data.samples.pictures import read_picture
from superstep.data.samples.sounds import list_sounds, read_sound, sound_seconds
from superstep.data.samples.web_dataset import TarSamples
from superstep.errors import DataError


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.float32, torch.float64])
def test_idx_files_are_read_as_they_were_written(tmp_path, dtype):
    values = (torch.arange(24).view(2, 3, 4) * 3 - 20).to(dtype)
    write_idx(tmp_path / "plain", values)
    (tmp_path / "small.gz").write_bytes(gzip.compress((tmp_path / "plain").read_bytes()))
    assert torch.equal(read_idx(tmp_path / "plain"), values)
    assert torch.equal(read_idx(tmp_path / "small.gz"), values)


def test_an_idx_file_is_that_of_mnist(tmp_path):
    """The header of MNIST's labels by its page: magic number 2049, the number of items, bytes."""
    (tmp_path / "labels").write_bytes(bytes.fromhex("0000080100000003050004"))
    assert read_idx(tmp_path / "labels").tolist() == [5, 0, 4]


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "is no idx file: it begins with nothing"),
        (b"PK\x03\x04 a zip file", "is no idx file: it begins with 504b0304"),
        (bytes.fromhex("00000801000000030500"), "is cut off or damaged: it has 10 bytes, and dims [3] need 11"),
        (gzip.compress(b"00000000", mtime=0)[:-3], "cannot be read"),
    ],
)
def test_another_file_is_refused(tmp_path, raw, says):
    (tmp_path / "file").write_bytes(raw)
    with pytest.raises(DataError) as refused:
        read_idx(tmp_path / "file")
    assert says in str(refused.value)


@pytest.mark.parametrize("labels", [1, 2])
def test_cifar_files_are_read_in_order(tmp_path, labels):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (5, 3, 32, 32), np.uint8)
    numbers = rng.integers(0, 10, (5, labels), np.uint8)
    whole = np.concatenate([numbers, pixels.reshape(5, -1)], axis=1)
    whole[:3].tofile(tmp_path / "one.bin")
    whole[3:].tofile(tmp_path / "two.bin")
    found, classes = read_cifar([tmp_path / "one.bin", tmp_path / "two.bin"], labels=labels)
    assert torch.equal(found, torch.from_numpy(pixels))
    assert classes.tolist() == numbers.tolist()


def test_a_cut_cifar_file_is_refused(tmp_path):
    (tmp_path / "one.bin").write_bytes(bytes(3074))
    with pytest.raises(DataError, match="has 3074 bytes, which are no pictures of 3073 with 1 label"):
        read_cifar([tmp_path / "one.bin"])
    with pytest.raises(DataError, match="cannot be read"):
        read_cifar([tmp_path / "two.bin"])
    with pytest.raises(DataError, match="there are no files"):
        read_cifar([])


def test_pictures_of_class_folders_are_in_one_order(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for name, level in (("dogs", 200), ("cats", 50)):
        (tmp_path / name).mkdir()
        for number in (2, 1):
            image.new("RGB", (8, 4), (level, number, 0)).save(tmp_path / name / f"{number}.png")
    (tmp_path / "cats" / "notes.txt").write_text("no picture")
    found = list_pictures(tmp_path)
    assert found.classes == ("cats", "dogs")
    assert [(path.parent.name, path.name, number) for path, number in found.pictures] == [
        ("cats", "1.png", 0),
        ("cats", "2.png", 0),
        ("dogs", "1.png", 1),
        ("dogs", "2.png", 1),
    ]
    picture = read_picture(found.pictures[2][0], (2, 6))
    assert picture.shape == (3, 2, 6)
    assert picture[:, 0, 0].tolist() == [200, 1, 0]
    assert read_picture(found.pictures[2][0], (2, 6), channels=1).shape == (1, 2, 6)
    (tmp_path / "cats" / "3.png").write_text("no picture")
    with pytest.raises(DataError, match=r"3.png' is no picture"):
        read_picture(tmp_path / "cats" / "3.png", (2, 6))


def test_a_folder_without_pictures_is_refused(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(DataError, match="has no folders with pictures; make one for each class"):
            list_pictures(folder)


def png(level):
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.new("RGB", (6, 4), (level, 0, 255)).save(file, "png")
    return file.getvalue()


def test_parquet_files_hold_pictures_and_labels(tmp_path):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for part, levels in enumerate([(10, 20), (30,)]):
        pictures = [{"bytes": png(level), "path": None} for level in levels]
        table = pa.table({"image": pictures, "label": list(levels), "other": ["x"] * len(levels)})
        parquet.write_table(table, tmp_path / f"{part}.parquet")
    rows = ParquetRows(sorted(tmp_path.glob("*.parquet")), ["image", "label"])
    assert len(rows) == 3
    assert [rows[index]["label"] for index in (2, 0, 1)] == [30, 10, 20]
    assert set(rows[0]) == {"image", "label"}
    pixels = read_picture(picture_bytes(rows[1]["image"]))
    assert pixels.shape == (3, 4, 6)
    assert pixels[:, 0, 0].tolist() == [20, 0, 255]
    assert picture_bytes(b"raw") == b"raw"
    with pytest.raises(DataError, match="has no column 'labels'; its columns are image, label, other"):
        ParquetRows([tmp_path / "0.parquet"], ["labels"])
    with pytest.raises(DataError, match="holds a struct of bytes, path without bytes"):
        picture_bytes({"bytes": None, "path": "a.png"})
    (tmp_path / "2.parquet").write_bytes(b"no parquet")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        ParquetRows([tmp_path / "2.parquet"])
    with pytest.raises(DataError, match="there are no parquet files"):
        ParquetRows([])


def write_tar(path, files, mode="w"):
    with tarfile.open(path, mode) as tar:
        for name, raw in files:
            entry = tarfile.TarInfo(name)
            entry.size = len(raw)
            tar.addfile(entry, io.BytesIO(raw))


def test_samples_of_a_tar_are_files_of_one_name(tmp_path):
    write_tar(tmp_path / "0.tar", [("a/000.JPG", b"p0"), ("a/000.seg.png", b"s0"), ("a/000.cls", b"7")])
    write_tar(tmp_path / "1.tar", [("000.jpg", b"p1"), ("b.d/000.jpg", b"p2"), ("000.cls", b"8"), ("notes", b"")])
    samples = TarSamples([tmp_path / "0.tar", tmp_path / "1.tar"])
    assert len(samples) == 3
    assert samples[2] == {"jpg": b"p2"}
    assert samples[0] == {"jpg": b"p0", "seg.png": b"s0", "cls": b"7"}
    assert samples[1] == {"jpg": b"p1", "cls": b"8"}


def test_another_tar_is_refused(tmp_path):
    write_tar(tmp_path / "small.tar", [("0.jpg", b"")], "w:gz")
    write_tar(tmp_path / "empty.tar", [("notes", b"")])
    write_tar(tmp_path / "twice.tar", [("0.jpg", b"a"), ("0.jpg", b"b")])
    for name, says in (
        ("small", "cannot be read as a tar without compression"),
        ("none", "cannot be read as a tar without compression"),
        ("empty", "has no samples: files such as 000.jpg and 000.cls"),
        ("twice", "has '0.jpg' twice"),
    ):
        with pytest.raises(DataError, match=says):
            TarSamples([tmp_path / f"{name}.tar"])


def write_wav(path, values, *, rate=8000, width=2, channels=1):
    whole = (np.asarray(values) * (2 ** (8 * width - 1) - 1)).round().astype(np.int64) + (128 if width == 1 else 0)
    raw = whole.repeat(channels).astype("<i8").view(np.uint8).reshape(-1, 8)[:, :width].tobytes()
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, width, rate, len(values), "NONE", ""))
        file.writeframes(raw)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_wav_files_are_read_at_any_rate(tmp_path, width):
    values = np.sin(2 * math.pi * 440 * np.arange(4000) / 8000) / 2
    write_wav(tmp_path / "one.wav", values, width=width, channels=2)
    assert sound_seconds(tmp_path / "one.wav") == 0.5
    step = 2.0 ** (1 - 8 * width)
    torch.testing.assert_close(
        read_sound(tmp_path / "one.wav", 8000).double(), torch.from_numpy(values), atol=2 * step + 1e-7, rtol=0
    )
    fine = read_sound(tmp_path / "one.wav")
    wanted = torch.sin(2 * math.pi * 440 * torch.arange(8000) / 16000) / 2
    assert fine.shape == (8000,)
    torch.testing.assert_close(fine[200:-200], wanted[200:-200], atol=2e-3 + 2 * step, rtol=0)


def test_sounds_are_listed_in_json_lines(tmp_path):
    (tmp_path / "wav").mkdir()
    write_wav(tmp_path / "wav" / "one.wav", [0.0, 0.5])
    lines = [{"audio": "wav/one.wav", "text": "one"}, {"audio": "wav/two.ogg", "text": "two"}]
    path = tmp_path / "list.jsonl"
    path.write_text("\n\n".join(map(json.dumps, lines)), encoding="utf-8")
    found = list_sounds(path)
    assert [entry["text"] for entry in found] == ["one", "two"]
    assert len(read_sound(found[0]["audio"], 8000)) == 2
    path.write_text('{"audio": "a.wav"}\n{"sound": "b.wav"}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"list.jsonl:2 is no object with the field 'audio'"):
        list_sounds(path)
    path.write_text("", encoding="utf-8")
    with pytest.raises(DataError, match="has no lines"):
        list_sounds(path)
    (tmp_path / "wav" / "one.wav").write_bytes(b"RIFF")
    with pytest.raises(DataError, match="is no uncompressed wav file"):
        read_sound(found[0]["audio"])


def test_ogg_files_are_read(tmp_path):
    soundfile = pytest.importorskip("soundfile")
    values = np.sin(2 * math.pi * 440 * np.arange(16000) / 16000) / 2
    soundfile.write(tmp_path / "one.ogg", values, 16000)
    assert sound_seconds(tmp_path / "one.ogg") == 1.0
    sound = read_sound(tmp_path / "one.ogg")
    assert sound.shape == (16000,)
    assert abs(float(sound.square().mean()) - 0.125) < 0.01
    (tmp_path / "two.ogg").write_bytes(b"OggS")
    with pytest.raises(DataError, match="is no sound"):
        read_sound(tmp_path / "two.ogg")


@pytest.mark.parametrize(
    ("package", "extra", "read"),
    [
        ("PIL", "pictures", lambda: read_picture(b"")),
        ("pyarrow", "parquet", lambda: ParquetRows(["0.parquet"])),
        ("soundfile", "sounds", lambda: read_sound("one.ogg")),
    ],
)
def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch, package, extra, read):
    original = builtins.__import__

    def without(name, *args, **kwargs):
        if name.partition(".")[0] == package:
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError) as refused:
        read()
    assert f'pip install "superstep[{extra}]"' in str(refused.value)
    assert "\n" not in str(refused.value)
