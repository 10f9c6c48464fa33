"""Readers of pictures: idx files, CIFAR's binaries, folders of classes."""

import gzip

import numpy as np
import pytest
import torch

from superstep.data.samples.cifar import read_cifar
from superstep.data.samples.class_folder import list_pictures, read_picture
from superstep.data.samples.idx import read_idx, write_idx
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
