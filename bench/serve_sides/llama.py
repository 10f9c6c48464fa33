"""llama.cpp through llama-cpp-python, in an environment that has it and the ``gguf`` package."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
from gguf import GGMLQuantizationType

from bench.serve_sides.asked import Answers, Side, answer_jobs

KINDS = {"bf16": GGMLQuantizationType.BF16, "q8_0": GGMLQuantizationType.Q8_0}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTSIDE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}


def load(asked: dict) -> tuple[Side, dict]:
    """One text at a time: its Python face has no batch of several texts."""
    path = Path(asked["folder"]) / f"{asked['kind']}.gguf"
    convert(Path(asked["folder"]), path, KINDS[asked["kind"]])
    threads = asked["threads"]
    model = llama_cpp.Llama(
        str(path), n_ctx=1024, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False
    )

    def side(prompts: list[list[int]], tokens: list[int]) -> Answers:
        return [list(_one(model, prompt, count)) for prompt, count in zip(prompts, tokens, strict=True)]

    versions = {name: version(name) for name in ("llama-cpp-python", "gguf")}
    return side, versions | {"features": llama_cpp.llama_print_system_info().decode()}


def _one(model: llama_cpp.Llama, prompt: list[int], count: int) -> Iterator[int]:
    drawn = model.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0, reset=True)
    for _, token in zip(range(count), drawn, strict=False):
        yield int(token)


def convert(folder: Path, path: Path, kind: GGMLQuantizationType) -> None:
    """Write a Hugging Face folder's Llama as GGUF: its matrices as ``kind``, its norms in fp32."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    out = gguf.GGUFWriter(path, "llama")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_block_count(config["num_hidden_layers"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(heads)
    out.add_head_count_kv(kv_heads)
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    out.add_rope_dimension_count(config["head_dim"])
    out.add_vocab_size(config["vocab_size"])
    out.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    _add_tokens(out, config["vocab_size"])
    for name, values in _tensors(folder / "model.safetensors"):
        for part, count in (("q_proj", heads), ("k_proj", kv_heads)):
            if part in name:  # llama.cpp turns neighbouring numbers, Hugging Face those half a head apart
                values = values.reshape(count, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        to = kind if values.ndim == 2 else GGMLQuantizationType.F32
        out.add_tensor(_name(name), gguf.quants.quantize(np.ascontiguousarray(values), to), raw_dtype=to)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def _add_tokens(out: gguf.GGUFWriter, vocab: int) -> None:
    out.add_tokenizer_model("llama")
    out.add_token_list([b"<unk>", b"<s>", b"</s>", *(f"t{n}".encode() for n in range(3, vocab))])
    out.add_token_scores([0.0] * vocab)
    out.add_token_types([2, 3, 3, *([1] * (vocab - 3))])
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)


def _name(name: str) -> str:
    if name in OUTSIDE or name == "lm_head.weight":
        return OUTSIDE.get(name, "output.weight")
    layer, rest = name.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def _tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a safetensors file of bf16 numbers, fp32."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    for name, about in json.loads(data[8 : 8 + size]).items():
        if name != "__metadata__":
            begin, end = (8 + size + at for at in about["data_offsets"])
            assert about["dtype"] == "BF16", about
            halves = np.frombuffer(data[begin:end], np.uint16).astype(np.uint32) << 16
            yield name, halves.view(np.float32).reshape(about["shape"])


if __name__ == "__main__":
    answer_jobs(load)
