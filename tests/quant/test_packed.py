import math
from pathlib import Path

import hydra
import pytest
import torch
from omegaconf import OmegaConf
from torch.utils._python_dispatch import TorchDispatchMode

from qerl.quant import packed as packed_module
from qerl.quant.bf16 import BF16
from qerl.quant.mxfp4 import MXFP4
from qerl.quant.nf4 import NF4, dynamic_values
from qerl.quant.nibbles import pair_table
from qerl.quant.nvfp4 import NVFP4
from qerl.quant.packed import (
    Format,
    PackedWeight,
    block_amax,
    check_dtype,
    check_weights,
    row_chunks,
)

FORMATS = [
    BF16(),
    NVFP4(),
    NVFP4(power_of_two_scale=True),
    MXFP4(),
    NF4(),
    NF4(double_quant=False),
]
FOUR_BIT = FORMATS[1:]
CONF = Path(__file__).parents[2] / "conf" / "quant"

every_format = pytest.mark.parametrize("format", FORMATS, ids=str)
four_bit = pytest.mark.parametrize("format", FOUR_BIT, ids=str)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(
        a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)
    )


@pytest.mark.parametrize("name", ["bf16", "nf4", "mxfp4", "nvfp4"])
def test_every_option_builds_its_format(name: str) -> None:
    format = hydra.utils.instantiate(OmegaConf.load(CONF / f"{name}.yaml"))
    assert isinstance(format, Format)
    assert format.name == name


def test_an_unknown_option_is_refused() -> None:
    config = OmegaConf.load(CONF / "nvfp4.yaml")
    config.block = 32
    with pytest.raises(hydra.errors.InstantiationException):
        hydra.utils.instantiate(config)


@every_format
def test_bits_per_weight_is_what_the_tensors_take(format: Format) -> None:
    packed = format.quantize(torch.randn(512, 1024))
    # Beyond the promise: one fp32 per tensor (NVFP4's scale, NF4's offset).
    per_tensor = 8 * 4 if {"tensor_scale", "nested_offset"} & set(packed.tensors) else 0
    assert packed.nbytes * 8 == format.bits_per_weight * 512 * 1024 + per_tensor


@every_format
def test_layout_names_the_tensors_that_quantize_makes(format: Format) -> None:
    packed = format.quantize(torch.randn(3, 192))
    made = {name: (tuple(t.shape), t.dtype) for name, t in packed.tensors.items()}
    assert made == format.layout((3, 192))


# Relative Frobenius error and SQNR on i.i.d. Gaussian weights, a property of each format: measured
# on 1024 x 4096. MXFP4 depends on where sigma lies between powers of two, from 11.18 % to 11.31 %.
@pytest.mark.parametrize(
    ("format", "sigma", "percent", "sqnr_db"),
    [
        (NVFP4(), 0.02, 9.51, 20.43),
        (NVFP4(power_of_two_scale=True), 0.02, 9.51, 20.43),
        (MXFP4(), 1.0, 11.18, 19.03),
        (MXFP4(), 0.8, 11.31, 18.93),
        (NF4(), 0.02, 9.20, 20.73),
        (NF4(double_quant=False), 0.02, 9.20, 20.73),
        (BF16(), 0.02, 0.166, 55.6),
    ],
    ids=str,
)
def test_the_error_on_gaussian_weights_is_the_anchor(
    format: Format, sigma: float, percent: float, sqnr_db: float
) -> None:
    weight = torch.randn(512, 2048) * sigma
    error = format.quantize(weight).dequantize(torch.float32) - weight
    relative = float(error.norm() / weight.norm())
    assert 100 * relative == pytest.approx(percent, rel=0.004)
    assert -20 * math.log10(relative) == pytest.approx(sqnr_db, abs=0.04)


@every_format
def test_quantising_a_dequantised_gaussian_changes_nothing(format: Format) -> None:
    # NF4's second statistics are not a fixed point: dropping absmax to 8 bits moves its mean.
    once = format.quantize(torch.randn(65, 512)).dequantize(torch.float32)
    twice = format.quantize(once).dequantize(torch.float32)
    if format == NF4():
        assert torch.allclose(once, twice, rtol=0.02, atol=0)
    elif format == NVFP4():
        assert torch.allclose(once, twice, rtol=2**-22, atol=0)  # 1 / g rounds again
    else:
        assert torch.equal(once, twice)


@every_format
def test_an_all_zero_weight_dequantises_to_zeros(format: Format) -> None:
    packed = format.quantize(torch.zeros(5, 128))
    assert torch.equal(packed.dequantize(torch.float32), torch.zeros(5, 128))
    assert torch.equal(packed.dequantize(torch.bfloat16), torch.zeros(5, 128).bfloat16())


@every_format
def test_a_zero_block_among_others_stays_zero(format: Format) -> None:
    weight = torch.randn(5, 256)
    weight[2, 64:128] = 0
    weight[4] = 0
    back = format.quantize(weight).dequantize(torch.float32)
    assert (back[2, 64:128] == 0).all()
    assert (back[4] == 0).all()
    assert (back[2, :64] != 0).any()
    assert back.isfinite().all()


@every_format
@pytest.mark.parametrize("shape", [(1, 64), (3, 64), (7, 192), (33, 320)], ids=str)
def test_chunks_of_rows_meet_without_a_seam(
    format: Format, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(shape)
    whole = format.quantize(weight)
    dense = whole.dequantize(torch.bfloat16)
    monkeypatch.setitem(packed_module.CHUNK_WEIGHTS, "cpu", 2 * shape[1])
    parts = format.quantize(weight)
    for name, tensor in whole.tensors.items():
        assert same_bits(tensor, parts.tensors[name]), name
    assert torch.equal(dense, parts.dequantize(torch.bfloat16))


@pytest.mark.parametrize("shape", [(1, 5), (7, 64), (1000, 3), (2, 1 << 20)], ids=str)
def test_row_chunks_cover_every_row_once(shape: tuple[int, int]) -> None:
    rows = [
        row for chunk in row_chunks(shape, torch.device("cpu")) for row in range(shape[0])[chunk]
    ]
    assert rows == list(range(shape[0]))


class _Allocations(TorchDispatchMode):
    """The largest storage, in bytes, that an operation makes."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.seen = {t.untyped_storage().data_ptr() for t in known}
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.seen:
                    self.largest = max(self.largest, storage.nbytes())
        return out


@four_bit
def test_no_scratch_is_larger_than_one_chunk_in_fp32(
    format: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(packed_module.CHUNK_WEIGHTS, "cpu", 1 << 13)
    weight = torch.randn(64, 2048).bfloat16()  # 16 chunks; an fp32 copy would be 16 chunks large
    with _Allocations([weight]) as allocations:
        packed = format.quantize(weight)
    assert allocations.largest <= max(4 << 13, packed.tensors["codes"].nbytes)
    with _Allocations([]) as allocations:
        packed.dequantize(torch.bfloat16)
    assert allocations.largest <= max(4 << 13, weight.nbytes)


@every_format
def test_narrow_inputs_are_read_as_fp32(format: Format) -> None:
    weight = torch.randn(9, 128)
    for dtype in (torch.bfloat16, torch.float16):
        narrow, wide = format.quantize(weight.to(dtype)), format.quantize(weight.to(dtype).float())
        for name, tensor in wide.tensors.items():
            assert same_bits(tensor, narrow.tensors[name])


@every_format
def test_dequantising_to_a_narrow_dtype_rounds_the_fp32_values_once(format: Format) -> None:
    packed = format.quantize(torch.randn(9, 128))
    wide = packed.dequantize(torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        narrow = packed.dequantize(dtype)
        assert narrow.dtype == dtype
        assert torch.equal(narrow, wide.to(dtype))


@every_format
def test_the_input_is_left_alone(format: Format) -> None:
    weight = torch.randn(4, 128)
    before = weight.clone()
    format.quantize(weight).dequantize(torch.float32)
    assert torch.equal(weight, before)


@every_format
def test_a_parameter_packs_without_a_graph(format: Format) -> None:
    packed = format.quantize(torch.nn.Parameter(torch.randn(4, 128)))
    assert not packed.dequantize(torch.float32).requires_grad


@every_format
def test_dequantising_in_inference_mode_first_leaves_later_gradients_alone(format: Format) -> None:
    packed = format.quantize(torch.randn(4, 128))
    pair_table.cache_clear()
    dynamic_values.cache_clear()
    with torch.inference_mode():
        packed.dequantize(torch.float32)
    x = torch.randn(2, 128, requires_grad=True)
    (x @ packed.dequantize(torch.float32).T).sum().backward()
    assert x.grad is not None


@every_format
def test_fusing_keeps_the_order_and_the_shapes(format: Format) -> None:
    weights = [torch.randn(8, 128), torch.randn(2, 128) * 3, torch.randn(2, 128)]
    fused = format.quantize_fused(weights)
    assert [p.shape for p in fused] == [(8, 128), (2, 128), (2, 128)]
    for weight, packed in zip(weights, fused, strict=True):
        back = packed.dequantize(torch.float32)
        assert (back - weight).norm() < 0.15 * weight.norm()


def test_moving_to_the_same_device_copies_nothing() -> None:
    packed = NVFP4().quantize(torch.randn(4, 64))
    assert packed.to("cpu").data_ptrs() == packed.data_ptrs()
    assert packed.data_ptrs().keys() == {"codes", "block_scale", "tensor_scale"}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@every_format
def test_a_weight_that_is_not_finite_is_refused(format: Format, bad: float) -> None:
    weight = torch.randn(6, 128)
    weight[4, 77] = bad
    with pytest.raises(ValueError, match=r"check the checkpoint"):
        format.quantize(weight)


def test_the_refusal_names_the_first_bad_row() -> None:
    weight = torch.randn(6, 128)
    weight[2, 3] = weight[5, 0] = float("nan")
    with pytest.raises(ValueError, match=r"weight row 2 \(2 rows in all\) holds NaN or Inf"):
        block_amax(weight, 16, "nvfp4")


@four_bit
def test_a_width_that_does_not_divide_is_refused(format: Format) -> None:
    with pytest.raises(ValueError, match=rf"K=72: {format.name} needs a multiple of its block"):
        format.quantize(torch.randn(4, 72))


def test_the_door_names_value_constraint_and_cure() -> None:
    with pytest.raises(ValueError, match=r"weight shape \(4,\).*keep other parameters in bf16"):
        check_weights([torch.randn(4)], 16, "nvfp4")
    with pytest.raises(ValueError, match=r"weight shape \(0, 16\)"):
        check_weights([torch.randn(0, 16)], 16, "nvfp4")
    with pytest.raises(ValueError, match=r"dtype torch.int64: nvfp4 reads float32.*\.float\(\)"):
        check_weights([torch.ones(4, 16, dtype=torch.int64)], 16, "nvfp4")
    with pytest.raises(ValueError, match=r"dtype torch.float64"):
        check_weights([torch.ones(4, 16, dtype=torch.float64)], 16, "nvfp4")
    with pytest.raises(ValueError, match=r"K=\[16, 32\].*fuse only q/k/v"):
        check_weights([torch.randn(4, 16), torch.randn(4, 32)], 16, "nvfp4")
    with pytest.raises(ValueError, match=r"0 weights"):
        check_weights([], 16, "nvfp4")
    with pytest.raises(ValueError, match=r"dtype=torch.int8: weights are dequantised to"):
        check_dtype(torch.int8)


def test_a_packed_weight_refuses_tensors_that_are_not_its_formats() -> None:
    good = NVFP4().quantize(torch.randn(4, 64))

    def build(**changes: torch.Tensor) -> PackedWeight:
        return PackedWeight(format=NVFP4(), shape=(4, 64), tensors={**good.tensors, **changes})

    assert torch.equal(build().dequantize(torch.float32), good.dequantize(torch.float32))
    codes = good.tensors["codes"]
    with pytest.raises(ValueError, match=r"exactly \['block_scale', 'codes', 'tensor_scale'\]"):
        build(weight_packed=codes)
    with pytest.raises(ValueError, match=r"codes \(128,\) torch.uint8: a weight \(4, 64\) stores"):
        build(codes=codes.flatten())
    with pytest.raises(ValueError, match=r"block_scale \(4, 4\) torch.float32"):
        build(block_scale=good.tensors["block_scale"].float())
    with pytest.raises(ValueError, match=r"strides \(1, 4\).*\.contiguous\(\)"):
        build(codes=codes.T.contiguous().T)
    with pytest.raises(ValueError, match=r"on \['cpu', 'meta'\]"):
        build(codes=codes.to("meta"))
    with pytest.raises(ValueError, match=r"K=40: nvfp4 needs a multiple"):
        PackedWeight(format=NVFP4(), shape=(4, 40), tensors=good.tensors)


def test_bf16_keeps_bf16_weights_without_a_copy() -> None:
    weight = torch.randn(4, 8).bfloat16()
    packed = BF16().quantize(weight)
    assert packed.data_ptrs()["weight"] == weight.data_ptr()
    assert packed.dequantize(torch.bfloat16).data_ptr() == weight.data_ptr()


def test_bf16_refuses_what_overflows_it() -> None:
    with pytest.raises(ValueError, match=r"inf\]: bf16 packs finite weights below 3.4e38"):
        BF16().quantize(torch.tensor([[3.4e38, 0.0]]))


@pytest.mark.gpu
@every_format
def test_the_gpu_makes_and_reads_the_same_bytes(format: Format) -> None:
    weight = torch.randn(577, 1536) * 0.02
    weight[3] *= 1e-20
    weight[7, :64] = 0
    here, there = format.quantize(weight), format.quantize(weight.cuda())
    if format != NF4():  # the mean of absmax depends on the order of summation
        for name, tensor in here.tensors.items():
            assert same_bits(tensor, there.tensors[name].cpu()), name
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(here.to("cuda").dequantize(dtype).cpu(), here.dequantize(dtype))
