"""The search tries every legal layout, none that is not, and misses none that is fast."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import numpy as np
import pytest
from plan_questions import TINY, TINY_MOE, job, question

from meshwright.base.errors import ConfigError
from meshwright.catalog import cluster
from meshwright.models.spec import ModelSpec
from meshwright.plan.auto import best_layout, question_of
from meshwright.plan.combinations import check_job
from meshwright.plan.cost.candidates import Candidates
from meshwright.plan.cost.memory import memory
from meshwright.plan.cost.step import step_time
from meshwright.plan.layout import Layout
from meshwright.plan.prediction import layout_of, predict
from meshwright.plan.search import SLACK, chances, search
from meshwright.plan.search_front import front
from meshwright.plan.search_question import LARGEST_MICRO_BATCH, Question
from meshwright.plan.search_space import SHORTEST_SLICE, Space

NODES = {"tp": (1, 2, 4), "pp": (1, 2, 4), "cp": (1, 2, 4, 8), "ep": (1, 2, 4, 8)}


def _every(space: Space) -> Candidates:
    return space.expand(np.arange(len(space.rows())))


def _key(layout: Layout) -> tuple[object, ...]:
    keys = ("dp_replicate", "dp_shard", "tp", "cp", "cp_method", "pp", "vpp", "ep", "etp")
    more = (layout.zero_stage, layout.micro_batch, layout.schedule, layout.recompute)
    parts = tuple(layout.recompute_parts) if layout.recompute == "selective" else ()
    return (*(getattr(layout, key) for key in keys), *more, parts, layout.sp or layout.tp == 1)


@pytest.mark.parametrize("spec", [TINY, TINY_MOE], ids=["dense", "moe"])
def test_the_trainer_accepts_every_layout_of_the_space(spec: ModelSpec) -> None:
    asked = job(spec)
    c = _every(Space(question_of(asked)))
    assert len(c) > 500
    for index in range(len(c)):
        layout = c.layout(index)
        assert layout.world == 8
        check_job(asked.model_copy(update={"layout": layout}))


@pytest.mark.parametrize("spec", [TINY, TINY_MOE], ids=["dense", "moe"])
def test_no_layout_that_the_trainer_accepts_is_missing(spec: ModelSpec) -> None:
    """Of what the docstrings do not leave out: groups of replicas below ZeRO-3, gpipe, sequence
    parallelism off, interleaving that fills a rank more or breaks a round of micro-batches."""
    asked = job(spec)
    c = _every(Space(question_of(asked)))
    found = {_key(c.layout(index)) for index in range(len(c))}
    assert len(found) == len(c)
    tried = 0
    for tp, pp, cp, ep in itertools.product(*NODES.values()):
        if 8 % (tp * pp * cp) or asked.data.seq_len // (cp * tp) < SHORTEST_SLICE:
            continue
        dp = 8 // (tp * pp * cp)
        for shard, zero, micro, etp in itertools.product(
            (1, 2, 4, 8), (0, 1, 2, 3), (1, 2, 4), {1, tp}
        ):
            if dp % shard or (zero < 3 and 1 < shard < dp) or (zero and shard == 1 < dp):
                continue
            raw = {
                "dp_replicate": dp // shard, "dp_shard": shard, "tp": tp, "pp": pp, "cp": cp,
                "ep": ep, "etp": etp, "zero": zero, "micro_batch": micro,
            }  # fmt: skip
            try:
                layout = Layout.model_validate(raw)
                check_job(asked.model_copy(update={"layout": layout}))
            except (ValueError, ConfigError):
                continue
            if not spec.n_experts and etp > 1:
                continue
            tried += 1
            assert _key(layout) in found, layout.label
    assert tried > 50


def _priced_one_by_one(asked: Question) -> tuple[Candidates, np.ndarray, np.ndarray]:
    every = _every(Space(asked))
    risk = chances(asked, memory(asked.work, every))
    step = step_time(asked.work, asked.cluster, every, asked.constants).step_s
    return every, step, risk


@pytest.mark.parametrize(
    ("model", "where", "framework"),
    [
        ("llama3-70b", "p5:64", "meshwright"),
        ("llama3-8b", "p4d:16", "fsdp"),
        ("mixtral-8x7b", "h100:64", "megatron"),
        ("qwen3-30b-a3b", "p5:16", "torchtitan"),
    ],
)
def test_bounds_miss_nothing(model: str, where: str, framework: str) -> None:
    asked = question(model, where, framework=framework, seq_len=4096, global_batch=128)
    _, step, risk = _priced_one_by_one(asked)
    fits = risk <= asked.risk
    found = search(asked)
    assert found.legal == len(step)
    fastest = np.sort(step[fits])
    assert found.best.step_s[0] == pytest.approx(fastest[0], rel=1e-12)
    near = fastest[fastest <= SLACK * fastest[0]][:100]
    assert found.best.step_s[: len(near)] == pytest.approx(near, rel=1e-12)
    # Nothing within the slack beats what was found in both time and risk.
    close = fits & (step <= SLACK * fastest[0])
    safest = {round(float(r), 9) for r in risk[close][front(step[close], risk[close])]}
    assert safest <= {round(float(r), 9) for r in found.best.risk}


def test_what_is_found_fits_and_is_in_order() -> None:
    found = search(question("llama3-70b", "p5:128"))
    assert np.all(found.best.risk <= 0.1)
    assert np.all(np.diff(found.best.step_s) >= 0)
    one = predict(found.question, layout_of(found.question, found.best.candidates, 0))
    assert one.step_time_s == pytest.approx(found.best.step_s[0])
    assert one.oom_probability == pytest.approx(found.best.risk[0])


@pytest.mark.parametrize(
    ("model", "where", "framework", "limit_s"),
    [
        ("llama3-405b", "p5:1024", "megatron", 1.0),
        ("llama3-405b", "p5:1024", "meshwright", 1.0),
        ("deepseek-v3", "h800:16384", "megatron", 10.0),
    ],
)
def test_search_is_fast_enough(model: str, where: str, framework: str, limit_s: float) -> None:
    """Seconds of one core, so that a busy machine does not decide; twice the target, as a core of a
    busy machine is slower."""
    asked = question(model, where, framework=framework)
    search(question("llama3-8b", "p5:8"))  # reads the tables
    begun = time.process_time()
    found = search(asked)
    spent = time.process_time() - begun
    assert len(found.best)
    assert spent < 2 * limit_s
    assert found.legal / spent > 20_000


def test_pricing_alone_does_20_000_layouts_a_second() -> None:
    asked = question("llama3-405b", "p5:1024")
    rows = _every(Space(asked)).take(np.arange(10_000))
    begun = time.process_time()
    memory(asked.work, rows)
    step_time(asked.work, asked.cluster, rows, asked.constants)
    assert len(rows) / (time.process_time() - begun) > 20_000


def test_refusals_are_counted_by_reason() -> None:
    found = search(question("llama3-8b", "p5:64", global_batch=7))
    assert any("global batch of 7" in reason for reason in found.refused)


def test_slices_and_micro_batches_are_bounded() -> None:
    asked = question("llama3-8b", "p5:64", seq_len=8192)
    c = _every(Space(asked))
    assert np.max(c.micro_batch) <= LARGEST_MICRO_BATCH
    assert np.max(c.cp) <= asked.seq_len // SHORTEST_SLICE


@pytest.mark.parametrize("spec", [TINY, TINY_MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("chips", [1, 2, 3, 6, 8])
def test_auto_gives_what_the_trainer_accepts_at_once(spec: ModelSpec, chips: int) -> None:
    asked = job(spec, chips, batch=12 * chips)
    begun = time.process_time()
    layout = best_layout(asked)
    assert time.process_time() - begun < 2.0
    assert layout.world == chips and layout.precision == asked.layout.precision
    check_job(asked.model_copy(update={"layout": layout}))


def test_auto_goes_on_where_the_trainer_refuses() -> None:
    asked = job()
    first = best_layout(asked)

    def but_not_the_first(other: object) -> None:
        assert isinstance(other, type(asked))
        if _key(other.layout) == _key(first):
            raise ConfigError("layout", first.label, "not this one")

    assert _key(best_layout(asked, check=but_not_the_first)) != _key(first)


# Cases of ../shared/cases/planner.md on choosing a layout, as the search decides them. Their time
# figures are in cost/test_time_cases.py.


def test_case_2_mixtral_gets_its_experts_spread() -> None:
    found = search(question("mixtral-8x7b", "h100:16", seq_len=4096, global_batch=256))
    best = found.best.candidates
    assert best.ep[0] == 8 and best.tp[0] <= 2


def test_case_3_a_better_layout_than_full_recomputation_is_found() -> None:
    asked = question("llama2-70b", "h100:128", seq_len=4096, global_batch=128)
    given = Layout(tp=8, pp=8, dp_shard=2, zero=1, recompute="full")
    found = search(asked)
    best = layout_of(asked, found.best.candidates, 0)
    assert best.recompute != "full" and best.vpp > 1 and best.dp > 2
    assert found.best.step_s[0] < 0.8 * predict(asked, given).step_time_s


def test_case_7_no_rule_puts_tp_first() -> None:
    """With many micro-batches the search takes a pipeline inside the node, with few it does not."""
    spec = ModelSpec(
        family="gpt2", layers=48, hidden=4096, heads=32, vocab=30592, max_seq_len=512
    )  # fmt: skip
    asked = replace(question("gpt2", "a100:8", seq_len=512, framework="megatron"), spec=spec)
    slim = replace(asked, global_batch=1, seq_len=512)
    wide = replace(asked, global_batch=512, seq_len=512)
    assert search(wide).best.candidates.tp[0] < search(slim).best.candidates.tp[0]


def test_case_29_two_nodes_of_a_slow_network_do_not_share_all_weights() -> None:
    found = search(question("llama2-7b", "p4d:16", framework="fsdp", global_batch=64))
    best = found.best.candidates
    assert best.zero[0] < 3 or best.dp_replicate[0] > 1


def test_case_31_shards_of_many_nodes_are_cut_into_groups() -> None:
    asked = question("llama2-70b", "a100:640", framework="fsdp", seq_len=2048, global_batch=1280)
    best = search(asked).best.candidates
    assert best.zero[0] < 3 or best.dp_shard[0] < best.dp[0]


def test_case_32_a_small_model_on_slow_nodes_shares_no_weights_across_them() -> None:
    asked = question(
        "llama3.2-1b", "rtx4090:16", framework="deepspeed", seq_len=1024, global_batch=64
    )
    best = search(asked).best.candidates
    assert best.zero[0] < 3 or best.dp_shard[0] <= 8


def test_more_chips_never_raise_memory_at_equal_axes() -> None:
    need = []
    for chips in (64, 128, 256):
        asked = question("llama3-70b", "p5:64").on(cluster(f"p5:{chips}"))
        layout = Layout(tp=8, pp=2, dp_shard=chips // 16, zero=1)
        need.append(predict(asked, layout).memory_bytes)
    assert need == sorted(need, reverse=True)
