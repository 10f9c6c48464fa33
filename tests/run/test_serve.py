"""A model served from Python: it answers over HTTP, leaves nothing behind, and mistakes are errors."""

import dataclasses
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import psutil
import pytest

import model_folder
import superstep
from superstep.errors import ConfigError, StateError, UserError
from superstep.plan.config import DataConfig, NumericsConfig, RunConfig
from superstep.run.api.serve import HttpConfig
from superstep.run.console import Silent
from superstep.serve.config import ServeConfig, usual_config

pytestmark = pytest.mark.multiproc

SMALL = ServeConfig(context_tokens=128, compute="fp32")
PAGE = Path(__file__).parents[2] / "docs" / "howto" / "use-from-python.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder.write_folder(tmp_path_factory.mktemp("served") / "tiny")


@dataclasses.dataclass(frozen=True)
class Lines(Silent):
    """A console that keeps what it shows."""

    said: list = dataclasses.field(default_factory=list)
    warned: list = dataclasses.field(default_factory=list)

    def say(self, text):
        self.said.append(text)

    def warn(self, text):
        self.warned.append(text)


def answer(server, **more):
    body = {"prompt": [1, 2, 3], "sampling": {"max_tokens": 4, "ignore_eos": True}} | more
    return httpx.post(f"{server.url}/generate", json=body, timeout=60)


@pytest.fixture(autouse=True, scope="module")
def others():
    """Processes of earlier tests, such as ranks that tests share."""
    return frozenset(children())


@pytest.fixture
def ranks(others):
    """Lists the processes that compute for this test."""
    return lambda: [one for one in children() if one not in others]


def children():
    """Processes that compute for this one; the one that they are forked from stays."""
    servers = [one for one in psutil.Process().children() if "forkserver" in " ".join(one.cmdline())]
    return [one for server in servers for one in server.children(recursive=True)]


def test_it_answers_and_leaves_nothing(folder, capfd, ranks):
    threads = set(threading.enumerate())
    console = Lines()
    with superstep.serve(folder, SMALL, http=HttpConfig(name="mine"), console=console) as server:
        assert answer(server).json()["usage"]["completion_tokens"] == 4
        assert (server.info.name, server.info.context_tokens) == ("mine", 128)
        models = httpx.get(f"{server.url}/v1/models", timeout=60).json()
        assert [model["id"] for model in models["data"]] == ["mine"]
        assert len(ranks()) == 1
        files = len(os.listdir("/proc/self/fd"))
    assert ranks() == []
    assert set(threading.enumerate()) == threads
    assert len(os.listdir("/proc/self/fd")) < files
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url)
    server.stop()
    server.wait()
    assert [line.split()[0] for line in console.said] == ["Loading", "mine:"]
    assert console.warned == []
    assert capfd.readouterr() == ("", "")


def test_a_thread_stops_it_and_requests_under_way_are_answered(folder):
    with superstep.serve(str(folder), SMALL) as server:
        streamed = []

        def ask():
            body = {"prompt": [1], "stream": True, "sampling": {"max_tokens": 100, "ignore_eos": True}}
            with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=60) as got:
                for line in got.iter_lines():
                    streamed.append(line)
                    if len(streamed) == 1:
                        threading.Thread(target=server.stop).start()

        client = threading.Thread(target=ask)
        client.start()
        server.wait()
        client.join(60)
    assert '"completion_tokens":100' in streamed[-1].replace(" ", "")


@pytest.fixture
def interrupts():
    """Ctrl-C raises, as in a terminal: a shell's background job has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_ctrl_c_ends_the_wait_and_the_server(folder, ranks):
    main = threading.main_thread().ident
    with pytest.raises(KeyboardInterrupt), superstep.serve(folder, SMALL) as server:  # noqa: PT012
        threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT)).start()
        server.wait()
    assert ranks() == []


@pytest.mark.parametrize(
    ("config", "http", "why"),
    [
        ({"requests": 0}, {}, "serve.requests = 0 must be at least 1"),
        ({"page_tokens": -1}, {}, "serve.page_tokens = -1 must be at least 1"),
        ({"read_timeout_s": 0}, {}, "serve.read_timeout_s = 0 must be above 0, and at most 240"),
        ({"quantize": "int3"}, {}, "serve.quantize = 'int3' is not known; did you mean 'int"),
        ({"context_tokens": 4096}, {}, "set serve.context_tokens to 1024 or less"),
        ({"adapters": (("tiny", Path("tone")),)}, {}, "adapter 'tiny' has the name of the model"),
        ({}, {"admin_key": "two words"}, "serve.admin_key must be one word"),
        ({}, {"port": 70000}, "port = 70000 cannot be listened on.*or 0 for any free one"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_is_loaded(config, http, why, folder):
    console = Lines()
    with pytest.raises(ConfigError, match=why):
        superstep.serve(folder, dataclasses.replace(SMALL, **config), http=HttpConfig(**http), console=console)
    assert console.said == []


def test_a_model_that_is_not_there_and_a_port_that_is_taken(folder, tmp_path):
    with pytest.raises(StateError, match="is not there; name a run, a checkpoint or a Hugging Face folder"):
        superstep.serve(tmp_path / "none")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port = {port} cannot be listened on"):
            superstep.serve(folder, http=HttpConfig(port=port))


def test_damaged_weights_are_an_error_of_the_call(folder, tmp_path, ranks):
    torn = shutil.copytree(folder, tmp_path / "torn")
    (torn / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(UserError, match=r"is damaged.*fetch or save it again"):
        superstep.serve(torn, SMALL)
    assert ranks() == []


def test_an_engine_that_is_lost_comes_back_and_one_that_cannot_ends_the_server(folder, tmp_path, ranks):
    model = shutil.copytree(folder, tmp_path / "tiny")
    console = Lines()
    with pytest.raises(UserError) as caught, superstep.serve(model, SMALL, console=console) as server:  # noqa: PT012
        for rank in ranks():
            rank.kill()
        while answer(server).status_code != 200:
            pass
        assert [line.split()[0] for line in console.warned] == ["fault:", "the"]
        shutil.rmtree(model)
        for rank in ranks():
            rank.kill()
        server.wait()
    assert str(model) in str(caught.value)
    assert console.warned[-1].endswith("The engine is not started again.")
    assert ranks() == []


def test_a_model_is_served_as_it_was_trained():
    assert usual_config(None) == ServeConfig()
    run = RunConfig(data=DataConfig(sequence_tokens=48), numerics=NumericsConfig(compute="fp32", exact=True))
    assert usual_config(run) == ServeConfig(context_tokens=48, compute="fp32", exact=True)


def test_an_extra_that_is_missing_is_named():
    code = "import sys; sys.modules['uvicorn'] = None; import superstep; superstep.serve('x')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert f"{UserError.__name__}: superstep.serve needs uvicorn" in done.stderr
    assert "pip install 'superstep[serve]'" in done.stderr


def test_the_example_of_the_page_serves_a_model(folder, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (example,) = [block for block in blocks if "superstep.serve" in block]
    shutil.copytree(folder, tmp_path / "runs" / "demo")
    (tmp_path / "script.py").write_text(example)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    assert "'finish_reason': 'length'" in done.stdout


@pytest.mark.long
def test_a_script_without_a_guard_is_told_of_it(folder, tmp_path):
    (tmp_path / "script.py").write_text(f"import superstep\nsuperstep.serve({str(folder)!r})\n")
    done = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    assert "does so below if __name__ == '__main__'" in done.stderr.splitlines()[-1]
