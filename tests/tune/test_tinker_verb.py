"""Who may come to the server of Tinker's verbs, and how it is started."""

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import numpy as np
import pytest

from superstep.cli.tune.serve import key_of
from superstep.errors import ConfigError
from superstep.tune.tinker.config import TinkerConfig

tinker = pytest.importorskip("tinker", reason="the official client is not installed")

from tinker import types  # noqa: E402

from tinkered import TOKENS, WAIT_S, datum, learn, logprobs, quietly, running, write_base  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("tinker") / "base")


@pytest.fixture(scope="module")
def quiet():
    with quietly() as patch:
        yield patch


def test_a_key_is_asked_for_where_there_is_one(folder, tmp_path, quiet):
    config = TinkerConfig(folder=folder, name="base", root=tmp_path, compute="fp32", context_tokens=64)
    with running(config, key="tml-secret") as (_, url):
        with pytest.raises(tinker.AuthenticationError, match="set TINKER_API_KEY"):
            tinker.ServiceClient(base_url=url, api_key="tml-wrong").create_lora_training_client("base", rank=2).result(
                60
            )
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{url}/api/v1/healthz")
        client = tinker.ServiceClient(base_url=url, api_key="tml-secret")
        rest = tinker.RestClient(base_url=url, api_key="tml-secret")
        names = [one.model_name for one in rest.get_server_capabilities().result(timeout=WAIT_S).supported_models]
        assert names == ["base", str(folder)]
        model = client.create_lora_training_client(str(folder), rank=2).result(timeout=WAIT_S)
        # Fast mode: the sampler is the trainer but for rounding.
        for _ in range(3):
            learn(model, [datum()])
        sampler = model.save_weights_and_get_sampling_client()
        sampler = sampler.result(timeout=WAIT_S) if hasattr(sampler, "result") else sampler
        said = sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result(timeout=WAIT_S)
        assert np.allclose(np.float32(said[1:]), logprobs(model, [datum()])[0], atol=1e-4)
        client.close("success").result(timeout=WAIT_S)


def test_the_verb_serves_until_it_is_told_to_end(folder, tmp_path, quiet):
    """By the command line, in a process of its own, found by the variable that it tells."""
    line = [sys.executable, "-m", "superstep", "tune", "serve", str(folder), "--port", "0", "--kernels", "off"]
    line += ["--numerics.compute", "fp32", "--state", str(tmp_path), "--context-tokens", "64"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TINKER_API_KEY")
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=environment) as process:
        told = next(one for one in process.stdout if one.startswith("TINKER_BASE_URL="))
        url, key = (word.partition("=")[2] for word in told.split())
        client = tinker.ServiceClient(base_url=url, api_key=key)
        model = client.create_lora_training_client(folder.name, rank=2, seed=1).result(timeout=WAIT_S)
        first, second = (learn(model, [datum()])[0].metrics["loss:sum"] for _ in range(2))
        assert second < first
        assert model.save_state("a").result(timeout=WAIT_S).path.startswith("tinker://")
        client.close("success").result(timeout=WAIT_S)
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    assert len(list(tmp_path.glob("*/weights/a/tinker.json"))) == 1


def test_a_key_is_one_that_the_client_sends(tmp_path):
    (tmp_path / "key").write_text("tml-of-a-file\n")
    assert key_of(f"@{tmp_path / 'key'}", None) == "tml-of-a-file"
    assert key_of(None, "tml-x") == "tml-x"
    assert key_of(None, None) is None
    with pytest.raises(ConfigError, match="--key must be one word that begins with tml-"):
        key_of("secret", None)
