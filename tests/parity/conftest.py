"""One warm launcher for the whole folder, and references traced once."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from parity_jobs import Tokens, layout, model_job, on_layout, write_tokens
from parity_table import Table

from meshwright.cli.check import CHECK_WORKER, Tracing, trace
from meshwright.conduct.local import LocalEngine
from meshwright.plan.layout import Layout
from meshwright.train.compare import Comparison, Limits, compare

STEPS = 6
ROWS_OF_A_CASE = 1  # by default; all of them where PARITY=all
HERE = Path(__file__).parent

Compare = Callable[..., Comparison]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """By default each test of the users' cases runs on its first few rows."""
    if os.environ.get("PARITY") == "all":
        return
    rows: Counter[str] = Counter()
    left_out = []
    for item in items:
        if "test_parity_cases" in item.nodeid:
            test = item.nodeid.partition("[")[0]
            rows[test] += 1
            if rows[test] > ROWS_OF_A_CASE:
                left_out.append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def engine() -> Iterator[LocalEngine]:
    """A launcher that can import this folder's entry points."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *([before] if before else [])])
    with LocalEngine.start("parity_workers") as warm:
        yield warm
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of the token store."""
    return write_tokens(tmp_path_factory.mktemp("tokens") / "train")


@pytest.fixture(scope="session")
def table() -> Iterator[Table]:
    """Results of the whole matrix; written to the file that PARITY_TABLE names, if any."""
    rows = Table()
    yield rows
    if path := os.environ.get("PARITY_TABLE"):
        rows.write(Path(path))


@pytest.fixture(scope="session")
def tracing(engine: LocalEngine, tokens: Path) -> Tracing:
    """What all traces of the matrix share."""
    return Tracing(engine, Tokens(tokens), STEPS, lambda: 0)


@pytest.fixture(scope="session")
def reference(tracing: Tracing, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of the one-process trace of a model, made at its first use."""
    made: dict[str, Path] = {}

    def of(model: str) -> Path:
        if model not in made:
            folder = tmp_path_factory.mktemp("reference") / model
            alone = layout({}, 1)
            trace(model_job(model), alone, tracing, folder)
            made[model] = folder
        return made[model]

    return of


@pytest.fixture
def against_one_process(
    tracing: Tracing, reference: Callable[[str], Path], tmp_path: Path
) -> Compare:
    """Trace a layout, maybe by a faulty entry point, and compare it with the reference."""

    def run(model: str, how: Layout, entry: str = f"{CHECK_WORKER}:main") -> Comparison:
        folder = tmp_path / "layout"
        checked = on_layout(model_job(model), how)
        trace(checked, how, tracing, folder, entry)
        return compare(reference(model), tmp_path / "layout", Limits())

    return run


@pytest.fixture
def on_ranks(engine: LocalEngine, tmp_path: Path) -> Callable[..., list[Any]]:
    """Run `parity_workers:NAME` on the ranks of a layout; each rank's JSON result."""
    from rank_results import run_on_ranks

    def run(
        name: str, how: Layout, model: str = "untied", eval_sequences: int = 64, **args: Any
    ) -> list[Any]:
        base = model_job(model, job={"steps": 10, "eval_sequences": eval_sequences})
        return run_on_ranks(engine, tmp_path, name, base, how, args)

    return run
