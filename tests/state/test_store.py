"""Checkpoints in object stores: in memory, in a folder, and on a server that speaks S3."""

import json
import shutil
import sys
from pathlib import Path

import pytest

import runs
from longer import longer
from superstep.cli.main import main
from superstep.errors import DamagedCheckpoint, Fault, StateError
from superstep.state.checkpoint_dirs import checkpoints
from superstep.state.object_store.store import CheckpointStore
from superstep.state.object_store.store_sync import Mirror, fetch_newest

fsspec = pytest.importorskip("fsspec")
FLAGS = ["train", "run.toml", "--state.save-every", "2", "--train.min-lr-ratio", "1", "--train.eval-every", "90"]


@pytest.fixture(scope="module")
def server():
    """An S3 server of moto's, on a free port."""
    threaded = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    threaded.start()
    host, port = threaded.get_host_and_port()
    yield f"http://{host}:{port}"
    threaded.stop()


STORES = ("memory", "file", "s3")


def on(*few):
    """On these stores in the short run, and on the others too in the long one."""
    return pytest.mark.parametrize("url", longer(STORES, lambda store: store not in few), indirect=True)


@pytest.fixture
def url(request, tmp_path, monkeypatch):
    """A folder of a store, empty."""
    name = f"{request.node.name.replace('[', '-').strip(']')}"
    if request.param != "s3":
        yield f"memory://{name}" if request.param == "memory" else f"file://{tmp_path}/store/{name}"
        return
    s3fs = pytest.importorskip("s3fs")
    for key, value in {
        "AWS_ENDPOINT_URL": request.getfixturevalue("server"),
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(key, value)
    s3fs.S3FileSystem.clear_instance_cache()
    if not s3fs.S3FileSystem().exists("bucket"):
        s3fs.S3FileSystem().mkdir("bucket")
    yield f"s3://bucket/{name.replace('_', '-')}"
    s3fs.S3FileSystem.clear_instance_cache()


def _objects(url):
    fs, root = fsspec.core.url_to_fs(url)
    fs.invalidate_cache()
    return sorted(str(path).rpartition(root.strip("/"))[2] for path in fs.find(root))


def _flip(url, name, at):
    fs, root = fsspec.core.url_to_fs(url)
    data = bytearray(fs.cat_file(f"{root}/{name}"))
    data[at] ^= 1
    fs.pipe_file(f"{root}/{name}", bytes(data))


def _train(*flags, status=0):
    assert main([*FLAGS, *flags]) == status


@pytest.fixture
def here(tmp_path, monkeypatch):
    runs.make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@on("memory", "s3")
def test_a_run_saves_to_a_store_and_goes_on_from_it_where_the_disk_is_new(here, url, capsys):
    _train("--state.store", url, "--train.steps", "6")
    store = CheckpointStore(url)
    assert store.steps() == [4, 6], "two are kept"
    disk = {p.name: (p / "manifest.json").read_bytes() for p in checkpoints(here / "run/checkpoints")}
    assert {path.split("/")[1] for path in _objects(url)} == set(disk)
    assert store.verify(6).position.step == 6
    assert main(["checkpoint", "verify", url]) == 0
    assert f"{store.url_of(6)}  whole  step 6" in capsys.readouterr().out
    assert main(["checkpoint", "export", url, "--out", "out", "--dtype", "bf16"]) == 0
    assert (here / "out/model.safetensors").is_file()

    assert main([*FLAGS, "--state.store", url, "--state.dir", "other"]) == 2
    assert "already holds a run, up to step 6" in capsys.readouterr().err
    shutil.rmtree(here / "run")
    _train("--state.store", url, "--state.existing", "resume", "--train.steps", "8")
    assert [line["step"] for line in runs.events(here / "run", "step")] == [7, 8]
    assert store.steps() == [6, 8]
    _train("--state.dir", "whole", "--train.steps", "8")
    one, other = (
        json.loads((here / run / "checkpoints/step-000008/manifest.json").read_text()) for run in ("run", "whole")
    )
    assert one["tensors"] == other["tensors"], "as if it had stayed on one disk"


@on("file")
def test_what_is_damaged_there_is_seen_and_passed_over(here, url, capsys):
    _train("--state.store", url, "--train.steps", "6")
    store = CheckpointStore(url)
    _flip(url, "step-000006/model.safetensors", 5000)
    assert main(["checkpoint", "list", url]) == 0
    assert main(["checkpoint", "verify", url]) == 1
    assert "has other bits than were written" in capsys.readouterr().out
    with pytest.raises(DamagedCheckpoint):
        store.prune(1)
    assert store.steps() == [4, 6], "nothing is removed while the newest is not whole"
    found = fetch_newest(store, here / "fetched")
    assert [path.name for path in checkpoints(here / "fetched")] == ["step-000004"]
    assert "step-000006 is passed over" in found[0]
    _flip(url, "step-000004/manifest.json", 40)
    with pytest.raises(DamagedCheckpoint):
        store.manifest(4)


@on("s3")
def test_without_its_manifest_there_is_no_checkpoint_and_what_a_crash_left_goes(here, url):
    _train("--train.steps", "6")
    root, store = here / "run/checkpoints", CheckpointStore(url)
    whole = checkpoints(root)
    for number, path in enumerate(whole):
        store.push(path)
        assert store.has(path)
        assert len(store.steps()) == number + 1
    store.remove(4)
    put, sent = store._fs.put_file, []

    def killed(source, target, **rest):
        sent.append(target)
        if len(sent) == 3:
            raise OSError("the connection is gone")
        put(source, target, **rest)

    store._fs.put_file = killed
    with pytest.raises(Fault, match="the connection is gone"):
        store.push(whole[0])
    store._fs.put_file = put
    assert any("step-000004" in path for path in _objects(url))
    assert store.steps() == [6], "what has come there is no checkpoint yet"
    store.prune(1)
    assert {path.split("/")[1] for path in _objects(url)} == {"step-000006"}
    store.push(whole[0])
    assert store.steps() == [4, 6]


@on("file")
def test_what_the_run_went_back_before_is_replaced_there_too(here, url):
    _train("--train.steps", "4")
    root, store = here / "run/checkpoints", CheckpointStore(url)
    mirror = Mirror(root, store, keep=9)
    mirror.end()
    assert store.steps() == [2, 4]
    (root / "step-000004").rename(root / "step-000004.rolled-back")
    mirror.catch_up()
    assert store.steps() == [2]
    mirror.catch_up()
    assert store.steps() == [2]


def _refuse(store, checkpoint):
    raise Fault("the store is full")


def test_a_store_that_cannot_be_used_is_one_clear_error(here, monkeypatch, capsys):
    with pytest.raises(StateError, match=r"state.store = 'nowhere://x': .*; use s3://bucket/folder"):
        CheckpointStore("nowhere://x")
    (here / "file").write_text("")
    store = CheckpointStore(f"file://{here}/file/below")
    _train("--train.steps", "2")
    with pytest.raises(Fault, match="cannot be written"):
        store.push(checkpoints(here / "run/checkpoints")[-1])
    assert main([*FLAGS, "--state.dir", "b", "--train.steps", "2", "--state.store", f"file://{here}/file/below"]) == 1
    assert "cannot be listed (NotADirectoryError" in capsys.readouterr().err
    assert not Path("b").exists(), "before anything is trained"
    with monkeypatch.context() as failing:
        failing.setattr(CheckpointStore, "push", _refuse)
        assert main([*FLAGS, "--state.dir", "b", "--train.steps", "2", "--state.store", "memory://failing"]) == 1
    assert "the store is full" in capsys.readouterr().err
    assert [path.name for path in checkpoints(Path("b/checkpoints"))] == ["step-000002"]
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    assert main([*FLAGS, "--state.dir", "c", "--state.store", "s3://bucket/run"]) == 2
    assert "pip install 'superstep[store]'" in capsys.readouterr().err
