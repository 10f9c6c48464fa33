"""The kernels compiled for GPUs that need not be there: what the compiler refuses, or a chip has no room for."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed: pip install triton", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing is compiled by an interpreter", allow_module_level=True)

import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from longer import longer
from superstep.kernels.blocks.adamw import AdamWNumbers, BlockMoment
from superstep.kernels.gpu import attention, blocks, cross_entropy, delta_states, norm, packed, philox, rope, swiglu
from superstep.kernels.gpu.attention import VisibleKeys
from superstep.kernels.philox import Counter
from superstep.kernels.position_bias import alibi, t5

SHARED_BYTES = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""That a program may have, by compute capability (CUDA C++ programming guide, technical specifications)."""
H100 = 90
TENSOR_COLUMNS = 512
"""Of the memory that products of compute capability 10.0 are summed in."""
BF16, FP32 = torch.bfloat16, torch.float32
TYPES = {FP32: "*fp32", BF16: "*bf16", torch.int32: "*i32", torch.int64: "*i64", torch.uint8: "*u8"}
ALIGNED = [["tt.divisibility", 16]]


@dataclass(frozen=True)
class Compiled:
    """What became of a kernel."""

    name: str
    shared_bytes: int
    tensor_columns: int
    ptx: str


def described(value):
    """An argument's type, as Triton writes it."""
    match value:
        case torch.Tensor():
            return TYPES[value.dtype]
        case tuple():
            return tuple(map(described, value))
        case float():
            return "fp32"
        case _:
            return "i32"


def aligned(at, value):
    """What launches tell the compiler of the arguments: which of them 16 divides."""
    if isinstance(value, tuple):
        return {key: found for number, each in enumerate(value) for key, found in aligned((*at, number), each).items()}
    is_so = isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
    return {at: ALIGNED} if is_so else {}


def spilled(one, folder):
    """Bytes of registers that a kernel for an H100 keeps in memory."""
    source = folder / "kernel.ptx"
    source.write_text(one.ptx, encoding="utf-8")
    ptxas = Path(triton.backends.nvidia.__file__).parent / "bin" / "ptxas"
    command = [ptxas, "-v", "--gpu-name=sm_90a", source, "-o", os.devnull]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return int(said.split("bytes spill stores")[0].split(",")[-1])


@pytest.fixture
def launched(monkeypatch):
    """What launches on a chip come to: compiles the kernels for it, and says what became of them."""

    def on(chip, launch):
        found = []

        def compile_for(self, *args, grid, warmup, **kwargs):
            constants = {name: value for name, value in kwargs.items() if name in self.arg_names}
            options = {name: value for name, value in kwargs.items() if name not in self.arg_names}
            given = dict(zip(self.arg_names, args, strict=False))
            constants |= {name: value for name, value in given.items() if name.isupper()}
            signature = {name: "constexpr" if name in constants else described(given[name]) for name in self.arg_names}
            attributes = {}
            for at, name in enumerate(self.arg_names):
                attributes |= {} if name in constants else aligned((at,), given[name])
            source, target = ASTSource(self, signature, constants, attributes), GPUTarget("cuda", chip, 32)
            made = triton.compile(source, target=target, options=options)
            columns = getattr(made.metadata, "tmem_size", None) or 0
            found.append(Compiled(self.__name__.rpartition(".")[2], made.metadata.shared, columns, made.asm["ptx"]))

        monkeypatch.setattr(JITFunction, "run", compile_for)
        monkeypatch.setattr(attention, "read_shared_bytes", lambda device: SHARED_BYTES[chip])
        launch()
        assert [one for one in found if one.shared_bytes > SHARED_BYTES[chip]] == []
        assert max(one.tensor_columns for one in found) <= TENSOR_COLUMNS
        return found

    return on


def attended(width, dtype, sees):
    """Attention forward and backward of tensors without numbers of note."""
    q, k = (torch.empty(2, 64, heads, width, dtype=dtype).transpose(1, 2) for heads in (4, 2))
    out, lse = attention.attend(q, k, k, sees)
    attention.attend_backward(out, (q, k, k), out, lse, sees)


def passed_states(width, value):
    """States of linear attention, forward and backward, likewise."""
    shapes = (6, 4, 64, value), (6, 4, 64, width), (2, 4, width, value), (6, 4)
    u, w, state, end = map(torch.empty, shapes)
    steps = tuple(torch.zeros(size, dtype=torch.int32) for size in (3, 2))
    _, _, last = delta_states.pass_states(u, w, w, end, steps, state)
    delta_states.pass_gradients((u, torch.empty(6, 4, width, value)), w, w, end, steps, last)


def small_kernels(dtype):
    """The others, likewise."""
    x, weight, rows = (torch.empty(shape, dtype=dtype) for shape in ((32, 64), (64, 64), (32,)))
    norm.norm_backward(*norm.norm(x, weight[0], 1e-6)[:1], x, weight[0], rows.float())
    rope.rotate(x.view(2, 4, 4, 64), *(torch.empty(4, 1, 64) for _ in range(2)))
    targets = torch.zeros(32, dtype=torch.int64)
    lse, _ = cross_entropy.row_sums(x, targets, 60, 0.7)
    cross_entropy.row_gradients_(x, targets, 60, lse, rows.float(), 0.7)
    place = Counter(key=0xA4093822299F31D0, step=7, sample=3)
    philox.random_words(place, targets, 2, 64)
    philox.drop(x, place, targets[:16], (2, 16, 64), 1, 2**31, 2.0)
    philox.drop(x, place, targets[:1], (2, 1, 4), 256, 2**31, 2.0)
    param, grad = torch.empty(2, 512)
    first, second = (BlockMoment(torch.empty(512, dtype=torch.uint8), torch.empty(2)) for _ in range(2))
    blocks.update_blocks(param, grad, first, second, AdamWNumbers(**dict.fromkeys(AdamWNumbers.__slots__, 0.5)))


def test_unpacking_of_blocks_compiles(launched):
    bytes_OB, scales_G = torch.empty(4, 33, dtype=torch.uint8), torch.empty(1)
    found = launched(H100, lambda: packed.unpack_rows(bytes_OB, scales_G, torch.empty(4, 64, dtype=BF16), 0, 1, "nf4"))
    assert [one.name for one in found] == ["_unpack"]


def test_swiglu_compiles(launched):
    x = torch.empty(4, 64, dtype=BF16, requires_grad=True)
    found = launched(H100, lambda: swiglu.swiglu(x, x).sum().backward())
    assert [one.name for one in found] == ["_forward", "_backward"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chip", "dtype"),
    longer(
        [(chip, dtype) for chip in SHARED_BYTES for dtype in (BF16, FP32)],
        lambda case: case not in ((H100, BF16), (86, FP32)),
    ),
)
def test_small_kernels_compile(launched, chip, dtype):
    assert len(launched(chip, lambda: small_kernels(dtype))) == 9


@pytest.mark.slow
@pytest.mark.parametrize("width", [64, 80, 128])
def test_attention_keeps_its_registers(launched, width, tmp_path):
    found = launched(H100, lambda: attended(width, BF16, VisibleKeys()))
    assert len(found) == 4
    assert [one.name for one in found if spilled(one, tmp_path) > 0] == []


STATES = [(chip, *sizes) for chip in SHARED_BYTES for sizes in ((128, 128), (256, 512), (64, 64))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chip", "width", "value"), longer(STATES, lambda case: case in ((H100, 64, 64), (86, 256, 512)))
)
def test_every_chip_has_room_for_states_of_linear_attention(launched, chip, width, value, tmp_path):
    found = launched(chip, lambda: passed_states(width, value))
    assert [one.name for one in found] == ["_pass_states", "_pass_gradients"]
    if (chip, width) == (H100, 64):
        assert [one.name for one in found if spilled(one, tmp_path) > 0] == []


ATTENDED = [(chip, width, dtype) for chip in SHARED_BYTES for width in (64, 128, 256) for dtype in (BF16, FP32)]
FEW = [(86, 128, BF16), (80, 256, FP32), (100, 128, BF16)]
"""Where less shared memory than an H100's is the matter, and the chip whose products are other instructions."""


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "width", "dtype"), longer(ATTENDED, lambda case: case not in FEW))
def test_every_chip_has_room_for_attention(launched, chip, width, dtype):
    assert len(launched(chip, lambda: attended(width, dtype, VisibleKeys()))) == 4


@pytest.mark.parametrize("part", attention.HALF_SIDES)
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("width", [16, 80, 256])
def test_more_shared_memory_has_larger_tiles_or_more_of_them(part, dtype, width):
    rooms = sorted(set(SHARED_BYTES.values()))
    found = [attention.sides_of(part, width, dtype, room) for room in rooms]
    sizes = [(sides.rows * sides.columns, sides.stages) for sides in found]
    assert sizes == sorted(sizes)
    assert all(sides.needs_bytes <= room for sides, room in zip(found, rooms, strict=True))


BIASED = [(*case, bias) for case in ATTENDED for bias in ("alibi", "t5")]


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "width", "dtype", "bias"), longer(BIASED, lambda case: case != (86, 128, FP32, "t5")))
def test_attention_of_documents_in_windows_has_room(launched, chip, width, dtype, bias):
    sees = VisibleKeys(
        starts=torch.zeros(2, 64, dtype=torch.int64),
        window=100,
        bias={"alibi": alibi(4), "t5": t5(torch.zeros(4, 32))}[bias],
    )
    assert len(launched(chip, lambda: attended(width, dtype, sees))) == 4
