"""gpt-oss's weights in MXFP4: read as transformers reads them, whole or a part alone, and written as plain numbers."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from superstep.model.axes import units
from superstep.model.decoder import Decoder
from superstep.model.files.hf import FILE, load_weights, open_weights, save_weights
from superstep.model.files.mxfp4 import unpack
from superstep.model.unit import global_tensors
from superstep.plan.model.hf_config import from_hf_config, to_hf_config
from superstep.plan.model.shape import dropless
from superstep.plan.model.sizes.named_sizes import SHAPES
from superstep.plan.model.style import GPT_OSS

theirs = pytest.importorskip("transformers.integrations.mxfp4")

SHAPE = replace(
    SHAPES["tiny"], family="qwen3", tied=False, ffn=96, qkv_bias=True, window=40, full_layers=(1,),
    moe=dropless(4, 2, 0.01), style=GPT_OSS,
)  # fmt: skip
NAMES = ("gate_up_proj", "down_proj")


def packed(generator, experts, inputs, outputs):
    blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(112, 128, blocks.shape[:-1], generator=generator, dtype=torch.uint8)


@pytest.fixture
def folder(tmp_path):
    """A folder whose experts are packed, as OpenAI's are, and the packed tensors."""
    torch.manual_seed(0)
    decoder = Decoder(SHAPE).bfloat16()
    tensors = {name: x.detach().contiguous() for name, x in global_tensors(decoder, units(SHAPE)).items()}
    generator, pairs = torch.Generator().manual_seed(1), {}
    for name in [name for name in tensors if name.endswith(NAMES)]:
        experts, inputs, outputs = tensors.pop(name).shape
        pairs[name] = packed(generator, experts, inputs, outputs)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = pairs[name]
    save_file(tensors, tmp_path / FILE, {"format": "pt"})
    config = to_hf_config(SHAPE) | {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path, pairs


def test_packed_experts_are_what_transformers_makes_of_them(folder):
    path, pairs = folder
    assert len(pairs) == 2 * SHAPE.layers
    weights = open_weights(path)
    assert not any(name.endswith(("_blocks", "_scales")) for name in weights)
    for name, (blocks, scales) in pairs.items():
        expected = theirs.convert_moe_packed_tensors(blocks, scales)
        assert weights[name].get_shape() == list(expected.shape)
        assert torch.equal(weights[name][:], expected)
        assert weights[name][:].dtype == torch.bfloat16
        for part in ((slice(1, 3), slice(5, 70), slice(8, 20)), (slice(2, 3), slice(32, 64)), slice(3, 4)):
            assert torch.equal(weights[name][part], expected[part])
        assert weights[name][slice(0, 0), slice(0, 0), slice(0, 0)].shape == (0, 0, 0)


def test_every_number_of_four_bits_has_its_value():
    blocks = torch.arange(0, 256, dtype=torch.uint8).view(16, 1, 16)
    found = unpack(blocks, torch.full((16, 1), 128, dtype=torch.uint8))
    positive = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    assert torch.equal(found[0, ::2].float(), 2 * torch.cat((positive, -positive)))
    assert torch.equal(found[:, 1].float(), 2 * torch.cat((positive, -positive)))


def test_a_packed_folder_trains_and_is_written_unpacked(folder, tmp_path):
    path, pairs = folder
    shape = from_hf_config(path / "config.json")
    assert shape == SHAPE
    decoder = Decoder(shape).bfloat16()
    load_weights(path, global_tensors(decoder, units(shape)))
    save_weights(tmp_path / "out", global_tensors(decoder, units(shape)), shape)
    written = open_weights(tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    for name, (blocks, scales) in pairs.items():
        assert torch.equal(written[name][:], theirs.convert_moe_packed_tensors(blocks, scales))
