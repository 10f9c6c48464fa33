"""DeepSeek's and Kimi's weights in FP8, and their layer for further tokens: read as transformers reads them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from superstep.errors import StateError
from superstep.model.axes import units
from superstep.model.decoder import Decoder
from superstep.model.files.fp8 import BLOCK, SCALE
from superstep.model.files.hf import FILE, load_weights, open_weights
from superstep.model.unit import global_tensors
from superstep.plan.model.hf_config import from_hf_config, to_hf_config
from superstep.plan.model.sizes.named_sizes import SHAPES

transformers = pytest.importorskip("transformers")

KIMI = SHAPES["kimi-k2"]
SHAPE = replace(
    KIMI, layers=2, width=160, heads=4, kv_heads=4, head_dim=40, ffn=144, vocab=512, dense_ffn=200,
    moe=replace(KIMI.moe, experts=4, experts_per_token=2),
    latent=replace(KIMI.latent, query_rank=136, key_rank=72, rotated=8),
)  # fmt: skip
QUANTIZED = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [BLOCK, BLOCK],
}


def quantized(x):
    """A matrix as numbers and scales of its blocks, and what they stand for."""
    rows, columns = (-(-size // BLOCK) for size in x.shape)
    padded = torch.nn.functional.pad(x, (0, columns * BLOCK - x.shape[1], 0, rows * BLOCK - x.shape[0]))
    blocks = padded.view(rows, BLOCK, columns, BLOCK)
    scales = blocks.abs().amax((1, 3)) / 448
    numbers = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    meant = (numbers.float() * scales[:, None, :, None]).reshape(padded.shape)[: x.shape[0], : x.shape[1]]
    whole = numbers.reshape(padded.shape)[: x.shape[0], : x.shape[1]].contiguous()
    return whole, scales, meant.contiguous()


@pytest.fixture
def folder(tmp_path):
    """A folder as Kimi's is, and what its tensors stand for."""
    torch.manual_seed(0)
    tensors = {name: x.detach().contiguous() for name, x in global_tensors(Decoder(SHAPE), units(SHAPE)).items()}
    stored, meant = {}, {}
    for name, x in tensors.items():
        if x.dim() == 2 and ".layers." in name and "mlp.gate." not in name:
            stored[name], stored[name + SCALE], meant[name] = quantized(torch.randn_like(x) * x.shape[1] ** -0.5)
        else:
            stored[name] = meant[name] = x.clone()
    save_file(stored, tmp_path / FILE, {"format": "pt"})
    config = to_hf_config(SHAPE) | {"model_type": "kimi_k2", "quantization_config": QUANTIZED, "auto_map": {"a": "b"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path, meant


def test_each_matrix_is_the_product_of_numbers_and_scales(folder):
    path, meant = folder
    weights = open_weights(path)
    assert set(weights) == set(meant)
    for name, x in meant.items():
        assert weights[name].get_shape() == list(x.shape)
        assert torch.equal(weights[name][:], x)
        if x.dim() == 2:
            for part in ((slice(5, 131), slice(100, 129)), (slice(128, 140), slice(0, 7)), slice(130, 131)):
                assert torch.equal(weights[name][part], x[part])
            assert weights[name][slice(0, 0), slice(0, 0)].shape == (0, 0)


def test_a_folder_in_fp8_gives_the_logits_of_transformers(folder):
    path, meant = folder
    shape = from_hf_config(path / "config.json")
    assert shape == SHAPE
    decoder = Decoder(shape).eval()
    load_weights(path, global_tensors(decoder, units(shape)))
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**to_hf_config(shape)), dtype=torch.float32
    ).eval()
    missing = theirs.load_state_dict({name: x for name, x in meant.items() if ".experts." not in name}, strict=False)
    assert not missing.unexpected_keys
    for layer, block in enumerate(theirs.model.layers[1:], 1):  # theirs has the experts of a layer in one tensor
        each = [f"model.layers.{layer}.mlp.experts.{k}" for k in range(4)]
        gates = [torch.cat((meant[f"{e}.gate_proj.weight"], meant[f"{e}.up_proj.weight"])) for e in each]
        block.mlp.experts.gate_up_proj.data = torch.stack(gates)
        block.mlp.experts.down_proj.data = torch.stack([meant[f"{e}.down_proj.weight"] for e in each])
    tokens = torch.arange(64).view(1, 64) * 7 % shape.vocab
    with torch.no_grad():
        ours, expected = decoder(tokens), theirs(tokens).logits
    torch.testing.assert_close(ours, expected, rtol=0, atol=2e-5)


def test_a_layer_for_further_tokens_is_left_alone_and_any_other_is_refused(folder):
    path, meant = folder
    further = {f"model.layers.2.{name}": torch.zeros(2, 2) for name in ("enorm.weight", "mlp.gate.weight")}
    save_file(meant | further, path / FILE, {"format": "pt"})
    decoder = Decoder(SHAPE)
    with pytest.raises(StateError, match=r"not of this model: model\.layers\.2\.enorm\.weight"):
        load_weights(path, global_tensors(decoder, units(SHAPE)))
    save_file(meant | further | {"model.layers.2.eh_proj.weight": torch.zeros(2, 2)}, path / FILE, {"format": "pt"})
    load_weights(path, global_tensors(decoder, units(SHAPE)))
