"""A lab of Slurm, made once, and a cluster on it for each test."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from lab import Lab, lab, missing, no_namespaces
from slurm_bench import Bench

from meshwright.conduct.hosts import HOSTS_VARIABLE

WORDS = ("alpha", "beta", "gamma", "value", "index", "count", "total", "result", "items", "path")
# Those that take less than 20 s on a quiet machine; all where CHAOS=all (`make test-all`).
SHORT = (
    "test_a_job_on_two_nodes_runs_to_its_end",
    "test_without_a_spare_it_runs_again_on_another_node",
    "test_nobody_resumes_what_somebody_else_has_drained",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without Slurm, all are skipped; by default, the long ones are left out."""
    here = [item for item in items if "tests/slurm" in item.nodeid]
    if reason := missing():
        for item in here:
            item.add_marker(pytest.mark.skip(reason=reason))
    elif os.environ.get("CHAOS") != "all":
        left_out = [item for item in here if item.name not in SHORT]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(1).choice
    for number in range(24):
        lines = (
            f"def {draw(WORDS)}_{draw(WORDS)}({draw(WORDS)}):\n    return {draw(WORDS)} + {n}\n\n"
            for n in range(70)
        )
        (folder / f"module_{number}.py").write_text("".join(lines))
    return folder


@pytest.fixture(scope="session", autouse=True)
def _prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The corpus is prepared once."""
    patch = pytest.MonkeyPatch()
    patch.setenv("MESHWRIGHT_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with lab(tmp_path_factory.mktemp("slurm"), nodes=4) as made:
        yield made


@pytest.fixture
def bench(slurm: Lab, tmp_path: Path, corpus: Path) -> Iterator[Bench]:
    """A cluster of the lab; what a test has done to its nodes is undone."""
    made = Bench(slurm, tmp_path, corpus)
    try:
        yield made
    finally:
        made.close()
        slurm.mend()


@pytest.fixture
def apart(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """A cluster whose nodes have networks of their own."""
    if reason := no_namespaces():
        pytest.skip(reason)
    with lab(tmp_path / "slurm", nodes=3, network=True, timeout_s=3) as made:
        monkeypatch.setenv(HOSTS_VARIABLE, made.address)  # others reach this machine there
        bench = Bench(made, tmp_path, corpus)
        try:
            yield bench
        finally:
            bench.close()


@pytest.fixture
def seconds(record_property: Callable[[str, object], None]) -> Callable[[str, float], None]:
    """Keep a figure that was measured: it is shown with -s, and in a report of JUnit's."""

    def keep(name: str, value: float) -> None:
        record_property(name, round(value, 2))
        sys.stderr.write(f"\n{name}: {value:.2f} s\n")

    return keep
