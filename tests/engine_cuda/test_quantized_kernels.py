"""Products with packed weights are those of the unpacked ones: over shapes, formats, norms, gates and residuals."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tritandem.engine.model.quantized.packing import PackedLinear, PackedWeight, merge, pack
from tritandem.engine.model.quantized.weight import QuantizedWeight, quantize_fp8, quantize_int4

pytest.importorskip("triton")
from tritandem.engine.model.linear import fp8_rows, quantized
from tritandem.engine.model.linear.fp8_rows import FEW_TO_SCALE, Fp8Rows, rows_fp8
from tritandem.engine.model.linear.interface import How, Norm, Rounding, Unfusable
from tritandem.engine.model.linear.parts import MOST_ROWS, Parts, parts_linear, split
from tritandem.engine.model.linear.quantized import QuantizedNormed, QuantizedResidual
from tritandem.engine.model.linear.unpacked import unpack, unpacked_linear

FORMS = ("fp8 rows", "fp8 blocks", "fp8 order", "int4 g128", "int4 g64", "int4 g32 zeros", "int4 row", "int4 order")


def packed(form: str, rows: int, inner: int, device: torch.device, seed: int = 0) -> PackedWeight:
    weight = torch.randn(rows, inner, generator=torch.Generator().manual_seed(seed)) / inner**0.5
    if form.startswith("fp8"):
        quantized = quantize_fp8(weight, None if form == "fp8 rows" else (128, 64))
    else:
        group = {"int4 g128": 128, "int4 g64": 64, "int4 row": inner}.get(form, 32)
        quantized = quantize_int4(weight, group, symmetric=form != "int4 g32 zeros")
    if form.endswith("order"):
        order = (torch.arange(inner) // quantized.group)[
            torch.randperm(inner, generator=torch.Generator().manual_seed(9))
        ]
        quantized = QuantizedWeight(quantized.values, quantized.scales, quantized.group, quantized.zeros, order)
    return pack(quantized.to(device))


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


def inner_of(form: str) -> int:
    """384 inputs are no power of two, and no multiple of what the one-row kernel reads at once."""
    return 768 if form == "int4 g128" else 384


@pytest.mark.parametrize("form", FORMS)
def test_what_is_packed_is_unpacked_again(form: str, kernel_device: torch.device) -> None:
    weight = packed(form, 40, inner_of(form), kernel_device)
    assert torch.equal(unpack(weight, torch.float32), weight.dense(torch.float32))
    assert error(unpack(weight, torch.bfloat16), weight.dense(torch.float32)) < 5e-3


@pytest.mark.parametrize("form", [*FORMS, "fp8 rows 336"])
@pytest.mark.parametrize("rows", [1, 5, 20, 70])
def test_products_of_two_parts_are_as_exact_as_the_rows_type(form: str, rows: int, kernel_device: torch.device) -> None:
    """336 inputs are no multiple of what is read at once, 72 columns none of a tile."""
    dtype, columns = half_of(kernel_device), 72
    form, inner = ("fp8 rows", 336) if form.endswith("336") else (form, inner_of(form))
    generator = torch.Generator().manual_seed(rows)
    for normed, gated, biased in ((False, False, False), (True, True, False), (True, False, True)):
        weight = packed(form, 2 * columns if gated else columns, inner, kernel_device)
        x = torch.randn(rows, inner, generator=generator).to(kernel_device, dtype)
        x[0, 7] = 300.0  # beside it everything else is small
        given = torch.randn(rows, inner, generator=generator).to(kernel_device, dtype)
        norm = Norm(torch.rand(inner, generator=generator).to(kernel_device, dtype) + 0.5, 1e-5)
        bias = torch.randn(columns, generator=generator).to(kernel_device, dtype) if biased else None
        residual = None if normed else torch.randn(rows, columns, generator=generator).to(kernel_device, dtype)
        before = residual.float() if residual is not None else 0.0
        summed = (x.float() + given.float()).to(dtype)
        wide = x.float()
        if normed:
            wide = (
                summed.float() * torch.rsqrt(summed.float().square().mean(1, keepdim=True) + 1e-5) * norm.weight.float()
            )
        want = F.linear(wide, weight.dense(torch.float32), bias.float() if bias is not None else None)
        want = F.silu(want[:, :columns]) * want[:, columns:] if gated else want + before
        parts = split(given, weight, x, norm) if normed else split(x, weight)
        assert not normed or torch.equal(x, summed)
        got = parts_linear(parts, weight, dtype, bias=bias, residual=residual, gated=gated)
        assert got is residual or residual is None
        assert error(got, want) < 6e-3, (normed, gated)


def test_parts_hold_what_is_large_and_what_is_small(kernel_device: torch.device) -> None:
    weight = packed("fp8 rows", 16, 64, kernel_device)
    x = torch.zeros(3, 64)
    x[1] = torch.logspace(-6, 2.4, 64)
    x[2] = 60000.0
    made = split(x.to(kernel_device, half_of(kernel_device)), weight)
    back = (made.values[:, 0].float() + made.values[:, 1].float() / 16) * made.scales[:, None]
    assert not made.values[0].float().any()
    kept = x.to(kernel_device, half_of(kernel_device)).float()
    assert ((back - kept).abs() <= kept.abs() * 2.0**-8 + kept.amax(1, keepdim=True) * 2.0**-20).all()


def test_many_rows_are_multiplied_by_the_unpacked_weight(kernel_device: torch.device) -> None:
    weight = packed("int4 g32 zeros", 48, 128, kernel_device)
    x = torch.randn(MOST_ROWS + 1, 128).to(kernel_device)
    bias = torch.randn(48).to(kernel_device)
    assert error(unpacked_linear(x, weight, bias), F.linear(x, weight.dense(torch.float32), bias)) < 2e-6


@pytest.mark.parametrize("form", FORMS)
def test_weights_side_by_side_are_merged_and_stay_usable_as_parts(form: str, kernel_device: torch.device) -> None:
    parts = (
        [packed(form, rows, 384, kernel_device, seed) for seed, rows in enumerate((16, 8, 8))]
        if form != "int4 g128"
        else [packed(form, rows, 768, kernel_device, seed) for seed, rows in enumerate((16, 8, 8))]
    )
    whole = merge(parts)
    dense = torch.cat([part.dense(torch.float32) for part in parts])
    assert torch.equal(whole.dense(torch.float32), dense)
    assert torch.equal(whole.part(16, 24).dense(torch.float32), dense[16:24])
    assert whole.part(16, 24).values.data_ptr() != parts[1].values.data_ptr()


def test_weights_of_different_forms_are_not_merged(kernel_device: torch.device) -> None:
    for left, right in itertools.combinations(
        ("fp8 rows", "fp8 blocks", "int4 g64", "int4 g32 zeros", "int4 order"), 2
    ):
        with pytest.raises(ValueError, match="quantized in different ways"):
            merge([packed(left, 16, 384, kernel_device), packed(right, 16, 384, kernel_device)])


@pytest.mark.parametrize(("inner", "group"), [(24, 24), (160, 20), (192, 48)])
def test_shapes_without_tiles_are_named(inner: int, group: int) -> None:
    with pytest.raises(ValueError, match=f"{inner} inputs in groups of {group}"):
        pack(quantize_int4(torch.randn(8, inner), group))


# -- FP8 times FP8, and the products as a decoder calls them ----------------------------------------------


# The interpreter halves a value that rounding to FP8 lifts to the next power of two: one in forty.
INTERPRETED = 0.08


def rounded(x: torch.Tensor) -> torch.Tensor:
    """What FP8 with a scale a row leaves of rows."""
    return quantize_fp8(x.float().cpu()).dense(torch.float32).to(x.device)


def half_of(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float16  # the interpreter's products know no bfloat16


@pytest.mark.parametrize("rows", [33, FEW_TO_SCALE + 1])
def test_a_gated_product_feeds_the_next_in_fp8(rows: int, kernel_device: torch.device) -> None:
    """norm, gate and up, gate, down, residual: activations are rounded behind the norm and behind the gate."""
    dtype, inner, columns = half_of(kernel_device), 64, 96
    generator = torch.Generator().manual_seed(rows)
    norm = Norm((torch.rand(inner, generator=generator) + 0.5).to(kernel_device, dtype), 1e-5)
    gate, up = (PackedLinear(packed("fp8 rows", columns, inner, kernel_device, seed), None) for seed in (1, 2))
    down = PackedLinear(packed("fp8 rows", inner, columns, kernel_device, 3), None)
    x = torch.randn(rows, inner, generator=generator).to(kernel_device, dtype)
    delta = torch.randn(rows, inner, generator=generator).to(kernel_device, dtype)
    residual = x.clone()
    following = QuantizedResidual(down)
    first = QuantizedNormed([gate, up], norm, gated=True)
    first.feed(following)
    made = first(residual, delta, How())
    assert isinstance(made, Fp8Rows)
    left = following(made, residual, How())
    got = residual if left is None else residual + left
    summed = (x.float() + delta.float()).to(dtype).float()
    wide = summed * torch.rsqrt(summed.square().mean(1, keepdim=True) + norm.eps) * norm.weight.float()
    wide = rounded(wide)
    gated = F.silu(wide @ gate.packed.dense(torch.float32).T) * (wide @ up.packed.dense(torch.float32).T)
    want = summed + rounded(gated) @ down.packed.dense(torch.float32).T
    # A value that lies between two FP8 values may be rounded to either, by digits that 16 bits have not.
    assert error(got, want) < (2e-2 if kernel_device.type == "cuda" else INTERPRETED)
    assert error(got, summed) > 0.1


@pytest.mark.parametrize("form", ["fp8 rows", "fp8 blocks", "int4 g64", "int4 order"])
@pytest.mark.parametrize("rows", [1, 9, 33, 129, FEW_TO_SCALE + 1])
def test_products_behind_a_norm_and_to_the_residual_agree_with_whole_weights(
    form: str, rows: int, kernel_device: torch.device
) -> None:
    dtype, inner = half_of(kernel_device), 128
    generator = torch.Generator().manual_seed(rows)
    norm = Norm((torch.rand(inner, generator=generator) + 0.5).to(kernel_device, dtype), 1e-5)
    biases = [torch.randn(columns, generator=generator).to(kernel_device, dtype) for columns in (64, 32, 32)]
    parts = [PackedLinear(packed(form, len(bias), inner, kernel_device, i), bias) for i, bias in enumerate(biases)]
    product = QuantizedNormed(parts, norm)
    assert product.columns == 128
    x = torch.randn(rows, inner, generator=generator).to(kernel_device, dtype)
    delta = torch.randn(rows, inner, generator=generator).to(kernel_device, dtype)
    for given in (None, delta):
        residual = x.clone()
        got = product(residual, given, How(fuse=True))
        summed = x if given is None else (x.float() + given.float()).to(dtype)
        assert torch.equal(residual, summed)
        wide = summed.float()
        wide = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + norm.eps) * norm.weight.float()
        want = torch.cat([F.linear(wide, part.packed.dense(torch.float32), part.bias.float()) for part in parts], 1)
        assert error(got, want) < (INTERPRETED if form == "fp8 rows" else 5e-3)
        assert error(torch.cat([part(wide.to(dtype)) for part in parts], 1), want) < 5e-3  # the modules go on working
    last = PackedLinear(packed(form, 64, inner, kernel_device, 7), None)
    residual = torch.randn(rows, 64, generator=generator).to(kernel_device, dtype)
    before = residual.clone()
    left = QuantizedResidual(last)(x, residual, How(fuse=True))
    got = residual if left is None else residual + left
    want = before.float() + F.linear(x.float(), last.packed.dense(torch.float32))
    assert error(got, want) < (INTERPRETED if form == "fp8 rows" else 5e-3)


def test_a_product_that_is_wrong_is_told(kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibrated scales, which random values do not fit, have no part in it."""
    norm = Norm(torch.ones(128, device=kernel_device, dtype=half_of(kernel_device)), 1e-5)
    gate, up, down = (
        PackedLinear(replace(packed("fp8 rows", rows, inner, kernel_device, rows), input_scale=1e-4), None)
        for rows, inner in ((64, 128), (64, 128), (128, 64))
    )
    following, first = QuantizedResidual(down), QuantizedNormed([gate, up], norm, gated=True)
    first.feed(following)
    for product in (following, first, QuantizedNormed([gate], norm)):
        assert isinstance(product, Rounding)
        wrong = product.misses()  # the interpreter rounds some values to half of what they are
        assert wrong is None or (kernel_device.type == "cpu" and "rounded to FP8" in wrong)
    codes = QuantizedNormed([PackedLinear(packed("int4 g64", 64, 128, kernel_device), None)], norm)
    assert codes.misses() is None

    def without_scales(x: torch.Tensor, scale: float | None = None) -> Fp8Rows:
        made = rows_fp8(x, scale)
        return Fp8Rows(made.values, torch.ones_like(made.scales))

    def doubled(*given: Any, **more: Any) -> Parts:
        made = split(*given, **more)
        return replace(made, scales=2 * made.scales)

    monkeypatch.setattr(fp8_rows, "rows_fp8", without_scales)
    assert "24 rows rounded to FP8 by 128 x 64 differs by" in (following.misses() or "")
    monkeypatch.setattr(quantized, "split", doubled)
    assert "1 rows in parts of FP8 by 64 x 128 differs by 1.0e+00" in (codes.misses() or "")


def test_a_calibrated_scale_of_inputs_is_every_rows(kernel_device: torch.device) -> None:
    """Of weights side by side the largest holds; what lies beyond it is cut."""
    dtype, rows = half_of(kernel_device), 40
    x = torch.randn(rows, 128, generator=torch.Generator().manual_seed(1)).to(kernel_device, dtype)
    x[3, 5] = 100.0
    parts = [
        PackedLinear(replace(packed("fp8 rows", 32, 128, kernel_device, seed), input_scale=scale), None)
        for seed, scale in ((1, 0.01), (2, 0.02))
    ]
    made = rows_fp8(x, 0.02)
    assert made.scales.tolist() == pytest.approx([0.02] * rows)
    assert float(made.values[3, 5].float()) == 448
    norm = Norm(torch.ones(128, device=kernel_device, dtype=dtype), 0.0)
    wide = x.float() * torch.rsqrt(x.float().square().mean(1, keepdim=True))
    cut = (wide / 0.02).clamp(-448, 448).to(torch.float8_e4m3fn).float() * 0.02
    got = QuantizedNormed(parts, norm)(x.clone(), None, How())
    want = cut @ torch.cat([part.packed.dense(torch.float32) for part in parts]).T
    assert error(got, want) < (5e-3 if kernel_device.type == "cuda" else 0.12)
    residual = torch.zeros(rows, 32, device=kernel_device, dtype=dtype)
    left = QuantizedResidual(parts[1])(x, residual, How())
    want = (
        (x.float() / 0.02).clamp(-448, 448).to(torch.float8_e4m3fn).float()
        * 0.02
        @ parts[1].packed.dense(torch.float32).T
    )
    assert error(residual if left is None else left, want) < (5e-3 if kernel_device.type == "cuda" else 0.12)
    exact = x.float() @ parts[1].packed.dense(torch.float32).T
    assert error(want, exact) > 0.2, "the value that is cut counts"


def test_zeros_and_the_largest_values_survive_fp8(kernel_device: torch.device) -> None:
    x = torch.tensor([[0.0] * 16, [60000.0, -60000.0] * 8, [1e-6] * 16]).to(kernel_device, half_of(kernel_device))
    made = rows_fp8(x)
    assert made.values.float().abs().max() == 448
    assert not made.values[0].float().any()
    assert error(made.values.float() * made.scales[:, None], x) < 1e-2


@pytest.mark.parametrize(
    ("biases", "reason"), [((True, False), "only some projections have a bias"), ((True, True), "its MLP has a bias")]
)
def test_a_bias_where_none_can_be_is_refused(
    biases: tuple[bool, bool], reason: str, kernel_device: torch.device
) -> None:
    norm = Norm(torch.ones(64, device=kernel_device), 1e-5)
    parts = [
        PackedLinear(packed("fp8 rows", 16, 64, kernel_device), torch.zeros(16).to(kernel_device) if bias else None)
        for bias in biases
    ]
    with pytest.raises(Unfusable, match=reason):
        QuantizedNormed(parts, norm, gated=True)
