"""The shipped figures make sense, have a source and a date, and are dense."""

from __future__ import annotations

import csv
from datetime import date
from pathlib import Path

import pytest

from meshwright.base.errors import ConfigError
from meshwright.catalog import Cluster, chip, chip_names, cluster, names

ISSUE_CHIPS = [
    "a100-40",
    "a100",
    "h100",
    "h200",
    "h800",
    "b200",
    "gb200",
    "b300",
    "gb300",
    "mi300x",
    "mi325x",
    "mi355x",
    "tpu-v4",
    "tpu-v5e",
    "tpu-v5p",
    "tpu-v6e",
    "trainium1",
    "trainium2",
    "trainium3",
    "gaudi2",
    "gaudi3",
    "l40s",
    "rtx4090",
]
ISSUE_INSTANCES = [
    "p4d",
    "p4de",
    "p5",
    "p5e",
    "p5en",
    "p6-b200",
    "p6e-gb200",
    "trn1",
    "trn1n",
    "trn2",
    "trn2u",
    "h100",
    "gb200-nvl72",
    "local",
]
MADE_UP = {"cpu"}
CSV = Path(__file__).parents[4] / "shared" / "data" / "hardware_catalogue.csv"


def full(name: str) -> Cluster:
    """The smallest cluster of the instance that has all its levels."""
    sizes = {"tpu-v4": 8192, "tpu-v5p": 17920, "tpu-v5e": 512, "tpu-v6e": 512}
    return cluster(f"{name}:{sizes.get(name, 1152)}")


def test_what_the_issue_names_is_there() -> None:
    assert set(ISSUE_CHIPS) <= set(chip_names())
    assert set(ISSUE_INSTANCES) <= set(names())


@pytest.mark.parametrize("name", sorted(set(chip_names()) - MADE_UP))
def test_chips_are_in_si_units_and_of_this_decade(name: str) -> None:
    found = chip(name)
    assert 1e10 < found.memory_bytes < 1e12
    assert 5e11 < found.memory_bandwidth_bytes_s < 2e13
    assert 1e14 < found.peak("bf16") < 1e16
    assert found.peak("fp16") == found.peak("bf16")
    # Reading all of the memory takes 5 to 60 ms on everything sold for training.
    assert 5e-3 < found.memory_bytes / found.memory_bandwidth_bytes_s < 60e-3
    # Between those of an 80 GB A100 and of a TPU v6e.
    assert 100 < found.peak("bf16") / found.memory_bandwidth_bytes_s < 600


@pytest.mark.parametrize("name", sorted(set(chip_names()) - MADE_UP))
def test_fp8_is_at_most_twice_as_fast_as_bf16_unless_the_maker_documents_more(name: str) -> None:
    peaks = chip(name).peak_flops
    if "fp8" in peaks and name != "trainium3":  # 671 and 2,517 TFLOPS, in AWS's own table
        assert 1 <= peaks["fp8"] / peaks["bf16"] < 2.05
    if "fp4" in peaks:
        assert 1 <= peaks["fp4"] / peaks["fp8"] <= 3


@pytest.mark.parametrize(
    "name, precision, dense, sparse",
    [
        ("a100", "bf16", 312e12, 624e12),
        ("h100", "bf16", 989.4e12, 1979e12),
        ("h100", "fp8", 1978.9e12, 3958e12),
        ("b200", "fp8", 4500e12, 9000e12),
        ("b200", "fp4", 9000e12, 18000e12),
        ("gb200", "bf16", 2500e12, 5000e12),
        ("l40s", "fp8", 733e12, 1466e12),
        ("trainium2", "bf16", 667e12, 2563e12),
        ("trainium2", "fp8", 1299e12, 2563e12),
        ("trainium3", "bf16", 671e12, 2517e12),
        ("mi300x", "bf16", 1300e12, 2610e12),
    ],
)
def test_peaks_are_the_dense_ones(name: str, precision: str, dense: float, sparse: float) -> None:
    assert chip(name).peak(precision) == pytest.approx(dense)
    assert chip(name).peak(precision) < 0.6 * sparse


def test_tpu_v5e_is_not_planned_with_its_int8_figure() -> None:
    assert chip("tpu-v5e").peak("bf16") == 197e12
    with pytest.raises(ConfigError, match="no such peak in the catalogue"):
        chip("tpu-v5e").peak("fp8")


@pytest.mark.parametrize("name", names())
def test_every_figure_says_where_it_is_from_and_of_when(name: str) -> None:
    figures = full(name).all_figures
    assert {"chip.memory_bytes", "chip.peak_flops.bf16"} <= figures.keys()
    for key, figure in figures.items():
        assert figure.source and figure.unit and figure.value > 0, key
        year = figure.date.split()[-1][:4]
        assert year.isdigit() and 2020 <= int(year) <= date.today().year + 1, key


@pytest.mark.parametrize("name", names())
def test_the_values_are_those_of_their_figures(name: str) -> None:
    found = full(name)
    for level in found.levels:
        assert level.bandwidth_bytes_s == level.figures["bandwidth_bytes_s"].value
        assert level.latency_s == level.figures["latency_s"].value
    assert found.chip.memory_bytes == found.chip.figures["memory_bytes"].value
    price = found.figures.get("price_per_chip_hour")
    assert found.price_per_chip_hour == (price.value if price else None)


@pytest.mark.parametrize("name", names())
def test_levels_grow_outwards_and_get_no_faster(name: str) -> None:
    found = full(name)
    sizes = [level.size for level in found.levels]
    bandwidths = [level.bandwidth_bytes_s for level in found.levels]
    latencies = [level.latency_s for level in found.levels]
    assert sizes == sorted(set(sizes)) and sizes[-1] == found.chips
    assert bandwidths == sorted(bandwidths, reverse=True)
    assert latencies == sorted(latencies)
    assert all(1e9 < bandwidth < 2e12 for bandwidth in bandwidths)
    assert all(1e-7 < latency < 1e-3 for latency in latencies)


@pytest.mark.parametrize("name", names())
def test_the_network_is_slower_than_the_memory(name: str) -> None:
    found = full(name)
    assert found.levels[0].bandwidth_bytes_s < found.chip.memory_bandwidth_bytes_s


def test_prices_lie_between_a_tenth_and_thirty_dollars_a_chip_hour() -> None:
    prices = {name: full(name).price_per_chip_hour for name in names()}
    assert sum(price is not None for price in prices.values()) > 12
    assert all(price is None or 0.1 < price < 30 for price in prices.values())
    assert prices["p5"] == pytest.approx(55.04 / 8)
    assert prices["h100"] == 2.99


@pytest.mark.skipif(not CSV.exists(), reason="the sourced table is not here")
def test_figures_agree_with_the_sourced_table() -> None:
    named = {
        "A100-80GB SXM": "a100",
        "H100 SXM": "h100",
        "H200 SXM": "h200",
        "B200 SXM": "b200",
        "GB200 (per GPU)": "gb200",
        "MI300X": "mi300x",
        "MI355X": "mi355x",
        "TPU v4": "tpu-v4",
        "TPU v5e": "tpu-v5e",
        "TPU v5p": "tpu-v5p",
        "TPU v6e (Trillium)": "tpu-v6e",
        "Trainium1": "trainium1",
        "Trainium2": "trainium2",
        "Trainium3": "trainium3",
        "Gaudi2": "gaudi2",
        "Gaudi3": "gaudi3",
        "L40S": "l40s",
        "RTX 4090": "rtx4090",
    }
    with CSV.open(encoding="utf-8") as file:
        rows = {row["chip_or_instance"]: row for row in csv.DictReader(file)}
    for theirs, ours in named.items():
        row, found = rows[theirs], chip(ours)
        assert found.peak("bf16") == pytest.approx(float(row["bf16_dense_tflops"]) * 1e12, 0.001)
        bandwidth = float(row["hbm_bw_tb_s"]) * 1e12
        assert found.memory_bandwidth_bytes_s == pytest.approx(bandwidth, rel=0.03)
        if "fp8" in found.peak_flops:
            assert found.peak("fp8") == pytest.approx(float(row["fp8_dense_tflops"]) * 1e12, 0.001)
