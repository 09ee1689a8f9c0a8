"""Users' bug reports as tests: trainer cases 16, 20, 23 and 24, and sizes that do not divide."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from parity_gates import Gate, ratios, wrong
from parity_jobs import EXPERTS, GPT2, LLAMA, SEQ_LEN, job, layout, on_layout
from rank_results import run_on_ranks

from meshwright.base.errors import ConfigError
from meshwright.conduct.local import LocalEngine
from meshwright.plan.layout import Layout

OnRanks = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def gate(engine: LocalEngine, tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Gate:
    """The check, with references shared by the tests of this file."""
    return Gate(engine, tokens, tmp_path_factory.mktemp("context"))


# Case 16: attention never crosses documents.

HALF = SEQ_LEN // 2
FIRST, OTHER, SECOND = (
    [*(start + 3 * i for i in range(HALF - 1)), 0] for start in (1, 2, 5)
)  # each ends with the token that ends a text
WAYS: dict[str, dict[str, Any]] = {
    "alone": {},
    "ring of 2": {"cp": 2},
    "ring of 4": {"cp": 4},
    "ulysses of 2": {"cp": 2, "cp_method": "ulysses"},
}


@pytest.fixture
def outputs(engine: LocalEngine, tmp_path: Path) -> Callable[..., dict[int, str]]:
    """Digests of the logits of one sequence, by place."""

    def of(
        model: dict[str, Any], axes: dict[str, Any], sequence: list[int], **args: Any
    ) -> dict[int, str]:
        base = job(model, "documents", job={"steps": 1})
        name, how = "parity_case_workers:outputs_by_place", Layout(**axes)
        given = {"sequence": [*sequence, 1], **args}
        ranks = run_on_ranks(engine, tmp_path, name, base, how, given)
        found = {int(place): digest for rank in ranks for place, digest in rank.items()}
        assert sorted(found) == list(range(SEQ_LEN))
        return found

    return of


def _changed(before: dict[int, str], after: dict[int, str]) -> list[int]:
    return [place for place in range(SEQ_LEN) if before[place] != after[place]]


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("model", [{**LLAMA, "layers": 2}, {**GPT2, "layers": 2}])
def test_another_document_changes_exactly_its_own_half(
    outputs: Callable[..., dict[int, str]], model: dict[str, Any], name: str
) -> None:
    before = outputs(model, WAYS[name], FIRST + SECOND)
    # The token that ends the first document stays, but not what it sees.
    assert _changed(before, outputs(model, WAYS[name], OTHER + SECOND)) == [*range(HALF)]
    assert _changed(before, outputs(model, WAYS[name], FIRST + OTHER)) == [*range(HALF, SEQ_LEN)]


def test_attention_across_documents_is_seen(outputs: Callable[..., dict[int, str]]) -> None:
    model = {**LLAMA, "layers": 2}
    one, two = (
        outputs(model, WAYS["ring of 2"], first + SECOND, blind=True) for first in (FIRST, OTHER)
    )
    assert _changed(one, two) == [*range(SEQ_LEN)]


@pytest.mark.parametrize(("method", "longer"), [("ring", 3000), ("ulysses", 3000)])
def test_2999_tokens_on_4_ranks_are_refused(method: str, longer: int) -> None:
    with pytest.raises(ConfigError, match=rf"seq_len = 2999.*cp = 4.*use {longer}"):
        job(
            {**LLAMA, "max_seq_len": 4096},
            data={"seq_len": 2999, "global_batch": 4},
            layout={"cp": 4, "cp_method": method},
            cluster={"ref": "local:4"},
        )


@pytest.mark.parametrize("axes", [{"cp": 2}, {"cp": 2, "tp": 2}, {"cp": 2, "cp_method": "ulysses"}])
def test_places_counted_from_zero_on_each_rank_are_seen(gate: Gate, axes: dict[str, Any]) -> None:
    entry = "parity_faults:places_counted_from_zero_on_each_rank"
    found = gate.against_one_process(job({**LLAMA, "layers": 2}), layout(axes, 1), entry)
    # The first weights attend almost evenly, so that the loss hardly tells.
    assert {f"layers.0.attn.{name}.weight" for name in ("wq", "wk")} <= set(wrong(found))


# Each reduction over cp: as replicas of the weights, and as shards of them.


@pytest.mark.parametrize(
    ("fault", "axes"),
    [
        ("replicas_not_summed", {"cp": 2}),
        ("replicas_not_summed", {"cp": 2, "cp_method": "ulysses"}),
        ("shards_averaged", {"cp": 2, "dp_shard": 2}),
        ("shards_averaged", {"dp_shard": 2, "zero": 1}),
        ("shards_averaged", {"dp_shard": 2, "zero": 2}),
        ("replicas_not_summed", {"dp_replicate": 2, "dp_shard": 2}),
    ],
)
def test_a_wrong_reduction_of_gradients_is_seen(
    gate: Gate, fault: str, axes: dict[str, Any]
) -> None:
    found = gate.against_one_process(
        job({**LLAMA, "layers": 2}), layout(axes, 2), f"parity_faults:{fault}"
    )
    assert len(wrong(found)) == len(ratios(found))


def test_heads_norms_not_summed_over_tp_are_seen(gate: Gate) -> None:
    """Norms of queries and keys: each rank has its own heads, with and without sp."""
    found = gate.against_one_process(
        job({**LLAMA, "layers": 2, "family": "qwen3"}),
        layout({"tp": 2, "sp": False}, 1),
        "parity_faults:norms_not_summed_over_tp",
    )
    expected = {f"layers.{i}.attn.{name}_norm.weight" for i in range(2) for name in "qk"}
    assert set(wrong(found)) == expected


# Case 20: a tied table where ranks have several stages; nobody waits for another for ever.


@contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


TIED = {**LLAMA, "layers": 8, "tie_embeddings": True}


@pytest.mark.parametrize(
    "axes",
    [
        {"pp": 4, "vpp": 2, "schedule": "interleaved"},
        {"pp": 4, "schedule": "zbv"},
        {"pp": 2, "dp_shard": 2, "schedule": "dualpipev"},
    ],
)
def test_a_tied_table_on_virtual_stages(gate: Gate, axes: dict[str, Any]) -> None:
    with _at_most(180):
        found = gate.against_one_process(job(TIED), layout(axes, 4))
    assert found.equal, found.worst
    assert ratios(found)["embed.weight"] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(
    ("fault", "axes"),
    [
        ("tied_ends_not_summed", {"pp": 2, "vpp": 2, "schedule": "interleaved"}),
        ("tied_ends_of_one_rank_not_summed", {"pp": 2, "schedule": "zbv"}),
    ],
)
def test_ends_not_summed_are_seen(gate: Gate, fault: str, axes: dict[str, Any]) -> None:
    with _at_most(180):
        found = gate.against_one_process(job(TIED), layout(axes, 4), f"parity_faults:{fault}")
    assert set(wrong(found)) == {"embed.weight"}


# Case 23: what does not fit is refused before anything starts.


def test_tp_that_does_not_divide_kv_heads_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"layout.tp = 4: does not divide model.kv_heads = 2"):
        on_layout(job(LLAMA), Layout(tp=4))


# Case 24: five axes on 8 processes without a GPU, clipped by one norm.

FIVE = {
    "tp2xcp2xpp2xep4": {"tp": 2, "cp": 2, "pp": 2, "ep": 4},
    "dp2xtp2xpp2xep2": {"dp_shard": 2, "tp": 2, "pp": 2, "etp": 2, "ep": 2},
}


@pytest.mark.parametrize("name", FIVE)
def test_the_clip_is_over_all_axes(
    engine: LocalEngine, tokens: Path, tmp_path: Path, name: str
) -> None:
    """After the first step moments are (1 - beta1) x the clipped gradient: their norm over all
    ranks is (1 - beta1) x the bound."""
    base = job({**EXPERTS, "layers": 2}, optimizer={"lr": 1e-3, "grad_clip": 0.01})
    worker, args = "parity_case_workers:clipped_moments", {"tokens": str(tokens)}
    alone = run_on_ranks(engine, tmp_path, worker, base, layout({}, 1), args)[0]
    for found in run_on_ranks(engine, tmp_path, worker, base, layout(FIVE[name], 1), args):
        assert found == pytest.approx(alone, rel=1e-5)
        assert found[2] == pytest.approx(0.1 * 0.01, rel=1e-5)


# Sizes that divide into nothing: flat buffers are padded, not tensors.

ODD = {
    "family": "llama",
    "layers": 3,
    "hidden": 30,
    "heads": 3,
    "kv_heads": 1,
    "ffn_hidden": 37,
    "vocab": 97,
}


@pytest.mark.parametrize(
    "axes",
    [{"dp_shard": 3}, {"dp_shard": 3, "zero": 1}, {"dp_shard": 3, "zero": 2}, {"pp": 3}],
)
def test_odd_sizes_train_the_same(gate: Gate, axes: dict[str, Any]) -> None:
    base = job(ODD, data={"seq_len": 31, "global_batch": 12}, layout={"micro_batch": 4})
    found = gate.against_one_process(base, Layout(**axes, micro_batch=2))
    assert found.equal, found.worst
