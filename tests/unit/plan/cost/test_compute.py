"""Layers and products: no faster than the roofline, slow where they are small."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.catalog.load import cluster
from meshwright.models.presets import preset
from meshwright.plan.cost.candidates import FULL, NONE, Candidates
from meshwright.plan.cost.compute import beside_host, layer_times, product
from meshwright.plan.cost.constants import Constants
from meshwright.plan.cost.framework import framework
from meshwright.plan.cost.rates import Machine, Rates, Software, rates
from meshwright.plan.cost.shapes import Shapes
from meshwright.plan.cost.workload import Workload

SIZES = st.sampled_from([128, 512, 1024, 4096, 16384])


def shipped(ref: str = "h100:8", precision: str = "bf16") -> Rates:
    known = Constants.shipped()
    machine = Machine.of(cluster(ref))
    return rates(known.values, known.like, machine, Software("te"), precision)


def work(name: str = "llama3-8b", seq_len: int = 4096) -> Workload:
    return Workload(preset(name), seq_len, 64, "bf16", framework("megatron"))


@settings(deadline=None)
@given(SIZES, SIZES, SIZES)
def test_products_stay_below_peak(m: int, n: int, k: int) -> None:
    chip = cluster("h100:8").chip
    seconds = product(shipped(), m, n, k).forward_s
    assert seconds >= 2 * m * n * k / chip.peak("bf16")


def test_thin_products_reach_less_of_the_peak() -> None:
    """Case 10 (marin#6532): tiny kernels, not bubbles, are what slows an 8-way pipeline down."""
    known = shipped()

    def reached(rows: int, width: int) -> float:
        return float(2 * rows * width * 2048 / product(known, rows, width, 2048).forward_s)

    assert reached(256, 256) < 0.15 * reached(8192, 8192)
    assert reached(256, 2048) < reached(2048, 2048) < reached(16384, 2048)


def test_absent_products_cost_nothing() -> None:
    assert product(shipped(), 1024, 0, 4096).forward_s == 0.0


def test_a_layer_takes_what_its_flops_take_at_least() -> None:
    spec, chip = preset("llama3-8b"), cluster("h100:8").chip
    times = layer_times(Shapes.of(work()), shipped(), Candidates.of(1)).passes
    least = 4096 * spec.layer_flops(0, 4096) / chip.peak("bf16")
    assert least < times.forward_s + times.backward_s < 4 * least


@settings(deadline=None)
@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]))
def test_a_slice_is_no_faster_than_its_share(tp: int, micro_batch: int) -> None:
    """tp ranks never do a layer in less than 1 / tp of the time of one."""
    shapes, known = Shapes.of(work()), shipped()
    one, many = (
        layer_times(shapes, known, Candidates.of(1, tp=size, micro_batch=micro_batch)).passes
        for size in (1, tp)
    )
    assert many.forward_s >= one.forward_s / tp * (1 - 1e-9)


def test_recomputation_costs_a_forward() -> None:
    shapes, known = Shapes.of(work()), shipped()
    none, full, half = (
        layer_times(shapes, known, Candidates.of(1, recompute=code, recompute_share=share))
        for code, share in ((NONE, 1.0), (FULL, 1.0), (FULL, 0.5))
    )
    assert none.again_s == 0.0
    assert full.again_s == pytest.approx(full.passes.forward_s)
    assert half.again_s == pytest.approx(0.5 * full.again_s)


@settings(deadline=None)
@given(st.floats(1e-6, 1.0), st.floats(1e-6, 1.0), st.floats(2.0, 6.0))
def test_a_pass_takes_at_least_as_long_as_chip_and_host(
    chip_s: float, host_s: float, norm: float
) -> None:
    both = float(beside_host(np.array(chip_s), np.array(host_s), norm))
    assert max(chip_s, host_s) * (1 - 1e-9) <= both <= (chip_s + host_s) * (1 + 1e-9)


def test_fp8_is_faster_than_bf16_and_fp4_than_fp8_for_large_layers() -> None:
    spec = preset("llama3-405b")
    seconds = []
    for precision in ("bf16", "fp8", "fp4"):
        job = Workload(spec, 8192, 64, precision, framework("megatron"))
        passes = layer_times(
            Shapes.of(job), shipped("gb200-nvl72:72", precision), Candidates.of(1)
        ).passes
        seconds.append((passes.forward_s + passes.backward_s).item())
    assert seconds == sorted(seconds, reverse=True)
