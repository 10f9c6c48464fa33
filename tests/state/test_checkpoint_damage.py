"""Checkpoints: no byte of one changes unseen, and none is read that lies elsewhere."""

import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import saved
from longer import longer
from superstep.errors import StateError
from superstep.state.checkpoint import load, read_position
from superstep.state.manifest import MANIFEST, read_manifest, seal

FILES = ["manifest.json", "model.safetensors", "optimizer.safetensors", "config.json"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A checkpoint to be damaged and mended again."""
    return saved.write(tmp_path_factory.mktemp("whole"))


def _is_refused(place):
    target = saved.pieces(saved.zeros)
    try:
        load(place, target, saved.Alone())
    except StateError as error:
        return "\n" not in str(error) and all(not piece.values.any() for piece in target)  # not half loaded either
    return False


def _with(place, name, damage):
    """Whether the checkpoint is refused while one of its files is otherwise."""
    data = (place / name).read_bytes()
    try:
        (place / name).write_bytes(damage(data))
        return _is_refused(place)
    finally:
        (place / name).write_bytes(data)


def _flip(data, at, mask):
    return data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]


@pytest.mark.parametrize("name", longer(FILES, lambda name: name != "model.safetensors"))
def test_a_flip_in_every_byte_of_every_file_is_refused(whole, name):
    assert not _is_refused(whole)
    size = (whole / name).stat().st_size
    taken = [at for at in range(size) if not _with(whole, name, _flipper(at, 1 << at % 8))]
    assert not taken, f"{len(taken)} of {size} flips were not seen, the first at byte {taken[0]}"
    assert not _is_refused(whole)


def _flipper(at, mask):
    return lambda data: _flip(data, at, mask)


@given(st.data())
@settings(max_examples=200)
def test_another_byte_anywhere_in_manifest_or_header_is_refused(whole, data):
    name = data.draw(st.sampled_from([MANIFEST, "model.safetensors"]))
    size = (whole / name).stat().st_size if name == MANIFEST else read_manifest(whole).files[name].header_bytes
    at, mask = data.draw(st.integers(0, size - 1)), data.draw(st.integers(1, 255))
    assert _with(whole, name, _flipper(at, mask))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (MANIFEST, lambda data: data.replace(b'"samples": 28', b'"samples": 29')),
        (MANIFEST, lambda data: data.replace(b'"samples": 28', b'"samples": 28.0')),
        (MANIFEST, lambda data: data + b" "),
        (MANIFEST, lambda data: data.replace(b"\n", b"\r\n")),
        (MANIFEST, lambda data: data.replace(b'"step": 7,', b'"step": 7, "step": 7,')),
        (MANIFEST, lambda data: data[:-1]),
        (MANIFEST, lambda data: b""),
        (MANIFEST, lambda data: b"[" * 100_000),
        (MANIFEST, lambda data: b"\xff\xfe"),
        ("model.safetensors", lambda data: data.replace(b"a.weight", b"c.weight")),
        ("model.safetensors", lambda data: data + b"\0"),
        ("model.safetensors", lambda data: data[:-1]),
        ("model.safetensors", lambda data: b""),
    ],
)
def test_what_is_not_what_was_written_is_refused(whole, name, damage):
    assert damage((whole / name).read_bytes()) != (whole / name).read_bytes()
    assert _with(whole, name, damage)


def test_one_flipped_bit_of_a_tensor_is_named(whole):
    at = read_manifest(whole).tensors["exp_avg.a.weight"].offset + 5
    data = (whole / "optimizer.safetensors").read_bytes()
    (whole / "optimizer.safetensors").write_bytes(_flip(data, at, 1))
    with pytest.raises(StateError, match=r"exp_avg\.a\.weight in optimizer\.safetensors has other bits"):
        load(whole, saved.pieces(saved.zeros), saved.Alone())
    (whole / "optimizer.safetensors").write_bytes(data)


def _resealed(place, change):
    """A manifest with a change, and the hash that belongs to it: what a hand would make, not a broken disk."""
    content = json.loads((place / MANIFEST).read_text())
    del content["blake2b"]
    change(content)
    (place / MANIFEST).write_text(seal(content))


def _renamed(content, name):
    content["files"][name] = content["files"].pop("model.safetensors")
    for tensor in content["tensors"].values():
        if tensor["file"] == "model.safetensors":
            tensor["file"] = name


OUTSIDE = ["../secret", "/etc/passwd", "sub/model.safetensors", "..", ".", "", "linked", "a\0b"]


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("part", ["files", "beside"])
def test_a_file_outside_the_folder_is_refused_by_name(tmp_path, name, part):
    place = saved.write(tmp_path / "c")
    secret = tmp_path / "c" / "secret"
    secret.write_bytes((place / "model.safetensors").read_bytes())
    (place / "linked").symlink_to(secret)
    (place / "sub").mkdir()
    (place / "sub" / "model.safetensors").write_bytes(secret.read_bytes())
    if part == "files":
        _resealed(place, lambda content: _renamed(content, name))
    else:
        _resealed(place, lambda content: content["beside"].update({name: "0" * 32}))
    with pytest.raises(StateError) as refusal:
        load(place, saved.pieces(saved.zeros), saved.Alone())
    assert f"names '{name}', which lies outside the checkpoint" in str(refusal.value)


def test_what_is_no_file_is_refused(tmp_path):
    place = saved.write(tmp_path / "c")
    (place / "config.json").unlink()
    os.mkfifo(place / "config.json")
    with pytest.raises(StateError, match=r"'config\.json' is no regular file"):
        load(place, saved.pieces(saved.zeros), saved.Alone())
    (place / "config.json").unlink()
    (place / "config.json").symlink_to("config.json")
    with pytest.raises(StateError, match=r"config\.json"):
        load(place, saved.pieces(saved.zeros), saved.Alone())


@pytest.mark.parametrize("key", ["step", "samples", "tokens"])
@pytest.mark.parametrize("value", [-1, 1.0, True, "1", None])
def test_a_position_that_is_no_count_is_refused(tmp_path, key, value):
    place = saved.write(tmp_path / "c")
    _resealed(place, lambda content: content["position"].update({key: value}))
    with pytest.raises(StateError, match=rf"is damaged: .*{key} = .*is no count"):
        read_position(place)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["position"].pop("samples"),
        lambda content: content.pop("beside"),
        lambda content: content.update(tensors=[]),
        lambda content: content["tensors"]["b.weight"].update(offset=10**9),
        lambda content: content["tensors"]["b.weight"].update(file="config.json"),
        lambda content: content["tensors"]["b.weight"].update(shape=[-5]),
    ],
)
def test_a_manifest_that_cannot_be_is_refused(tmp_path, change):
    place = saved.write(tmp_path / "c")
    _resealed(place, change)
    with pytest.raises(StateError, match=r"manifest\.json is not what was written"):
        read_position(place)


def test_the_older_format_is_refused_by_name(tmp_path):
    place = saved.write(tmp_path / "c")
    content = json.loads((place / MANIFEST).read_text())
    (place / MANIFEST).write_text(json.dumps({**content, "format": 1}))
    with pytest.raises(StateError, match=r"of the older format 1.*this version reads format 2"):
        read_position(place)
    (place / MANIFEST).write_text(json.dumps({**content, "format": 3}))
    with pytest.raises(StateError, match=r"of another format; this version reads format 2"):
        read_position(place)


def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path):
    place = saved.write(tmp_path / "c")
    (place / MANIFEST).unlink()
    with pytest.raises(StateError, match=r"no checkpoint"):
        load(place, saved.pieces(saved.zeros), saved.Alone())
