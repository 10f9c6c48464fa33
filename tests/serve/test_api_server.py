"""A server as a process: it says where it is, is seen by this machine alone, and ends when it is told to."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from superstep.errors import ConfigError
from superstep.http.server import LOOPBACK, listen

PROGRAM = """
from plain_words import PlainWords, small_tokenizer
from scripted import Scripted
from superstep.serve.app import make_app
from superstep.http.guard import Entrance
from superstep.http.server import LOOPBACK, listen, serve
from superstep.serve.scheduling.request import ModelInfo

tokenizer = small_tokenizer()
end = (tokenizer.end_of_text,)
info = ModelInfo(name="small", vocab=tokenizer.vocab, context_tokens=64, version="v1", end_of_text=end)
entrance = Entrance()
app = make_app(Scripted(info, lambda request: [65] * 30), PlainWords(tokenizer), entrance=entrance)
listening = listen(LOOPBACK, 0)
print(*listening.getsockname(), flush=True)
sys.exit(serve(app, listening, drain=entrance.drain, grace_s=25.0))
"""


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGINT])
def test_a_server_says_where_it_is_and_ends_when_told(told):
    support = str(Path(__file__).parents[1] / "support")
    process = subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {support!r})\n{PROGRAM}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job, as this suite may be, has its children ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        host, port = process.stdout.readline().split()
        assert host == LOOPBACK
        url = f"http://{host}:{port}"
        assert httpx.get(f"{url}/health", timeout=30).json()["status"] == "ready"
        body = {"prompt": [1], "stream": True, "sampling": {"max_tokens": 5}}
        lines = httpx.post(f"{url}/generate", json=body, timeout=30).text.splitlines()
        assert [json.loads(line).get("finish") for line in lines] == [None] * 4 + ["length", None]
        process.send_signal(told)
        assert process.wait(60) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(url)
    finally:
        process.kill()
        process.communicate()


def test_a_port_that_is_taken_is_named():
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port = {port} cannot be listened on.*or 0 for any free one"):
            listen(LOOPBACK, port)
    with pytest.raises(ConfigError, match="port = 70000"):
        listen(LOOPBACK, 70000)
    with pytest.raises(ConfigError, match=r"host = '192\.0\.2\.1'"):
        listen("192.0.2.1", 0)
