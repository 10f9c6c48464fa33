"""Exact mode in the compiled decoder has the bits of torch, or leaves torch in its place."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from superstep.comm.device import Device
from superstep.kernels.amx_weight_grad import has_tiles
from superstep.model.files.hf import open_weights
from superstep.serve.compute.compiled import compiled_exact
from superstep.serve.compute.compiled.compiled_decoder import CompiledDecoder
from superstep.serve.compute.flat_batch import RequestRows, Rows
from superstep.serve.compute.kernels.build import build
from superstep.serve.compute.torch_forward import TorchForward
from superstep.serve.config import ServeConfig
from superstep.serve.load_rank import load_rank

SIZES = {
    "vocab_size": 200,
    "hidden_size": 384,  # two pieces of a sum
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 640,
    "initializer_range": 0.15,
}
MODELS = {
    "llama": LlamaConfig(**SIZES, head_dim=32, tie_word_embeddings=True),
    "biases": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "normed heads": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False),
    "a window": MistralConfig(**SIZES, head_dim=48, sliding_window=300, tie_word_embeddings=False),
}
TOKENS = [(37 * n + 11 * (n // 7)) % 200 for n in range(560)]


@pytest.fixture(autouse=True)
def one_thread():
    """Exact mode sets torch to one; the tests behind this one have theirs again."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, compiled):
    """Models of random weights as Hugging Face writes them."""
    library = build(compiled).library
    if library is None or compiled_exact.functions() is None:
        pytest.skip("there is no compiled decoder here, or no MKL")
    if not compiled_exact.sums_as_torch(library):
        assert has_tiles(), "only AMX sums in another order"
        pytest.skip("torch sums by AMX here")
    found = {}
    for name, config in MODELS.items():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config)
        for key, values in model.named_parameters():
            if "norm" in key or "bias" in key:
                torch.nn.init.normal_(values, 1.0 if "norm" in key else 0.0, 0.3)
        found[name] = tmp_path_factory.mktemp("model")
        model.to(torch.bfloat16).save_pretrained(found[name])
    return found


def opened(folder, kernels=None):
    serve = ServeConfig(compute="bf16", exact=True, kernels=kernels, pages=80)
    return load_rank(folder, serve, 0, None, Device("cpu")).forward


def logits(forward, cuts, page=0):
    """Of all tokens, computed in pieces that end at the cuts."""
    found, pages = [], tuple(range(page, page + 40))
    for begin, end in zip((0, *cuts), cuts, strict=False):
        part = RequestRows(first=begin, count=end - begin, pages=pages[: -(-end // 16)])
        found.append(forward(Rows(tokens=tuple(TOKENS[begin:end]), parts=(part,), wanted=tuple(range(end - begin)))))
    return torch.cat(found)


@pytest.mark.parametrize("name", MODELS)
def test_all_bits_are_those_of_torch(name, folders, compiled):
    fast, plain = opened(folders[name], compiled), opened(folders[name])
    assert isinstance(fast, CompiledDecoder)
    assert isinstance(plain, TorchForward)
    whole = logits(plain, [560])
    assert torch.equal(logits(fast, [560]), whole)
    assert torch.equal(logits(fast, [1, 2, 19, 255, 256, 257, 258, 500, 511, 514, 560], page=40), whole)


def test_new_weights_have_the_bits_of_torch(folders, compiled, tmp_path):
    torch.manual_seed(2)
    AutoModelForCausalLM.from_config(MODELS["biases"]).to(torch.bfloat16).save_pretrained(tmp_path)
    rank = load_rank(
        folders["biases"], ServeConfig(compute="bf16", exact=True, kernels=compiled), 0, None, Device("cpu")
    )
    logits(rank.forward, [560])
    memory = rank.party.memory
    memory.switch(memory.read(open_weights(tmp_path)))
    assert isinstance(rank.forward, CompiledDecoder)
    assert torch.equal(logits(rank.forward, [300, 560]), logits(opened(tmp_path), [560]))


@pytest.mark.parametrize("which", [0, 1])
def test_other_bits_leave_torch_in_its_place(which, folders, compiled, monkeypatch):
    """Functions that are no exponential and no root stand for a torch that has others than these."""
    both = compiled_exact.functions()
    monkeypatch.setattr(compiled_exact, "functions", lambda: (both[which], both[which], both[2]))
    assert isinstance(opened(folders["llama"], compiled), TorchForward)
    monkeypatch.setattr(compiled_exact, "functions", lambda: None)
    assert isinstance(opened(folders["llama"], compiled), TorchForward)


def test_other_dtypes_are_torchs(folders, compiled):
    serve = ServeConfig(compute="fp32", exact=True, kernels=compiled)
    assert isinstance(load_rank(folders["llama"], serve, 0, None, Device("cpu")).forward, TorchForward)
    assert isinstance(
        load_rank(folders["llama"], replace(serve, compute="bf16", page_tokens=8), 0, None, Device("cpu")).forward,
        TorchForward,
    )
