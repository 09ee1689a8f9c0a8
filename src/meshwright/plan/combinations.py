"""The one place that refuses combinations that cannot run, or of which one half would do nothing.

Each refusal names both options and the way out. Rules about experts are in `expert_rules.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.base.errors import ConfigError
from meshwright.plan.activations import recompute_plan
from meshwright.plan.expert_rules import check_experts, divisor_words
from meshwright.plan.layout import V_SCHEDULES, Layout, expert_grid
from meshwright.plan.resilience import check_kept, check_survivable

if TYPE_CHECKING:
    from meshwright.plan.job import Job


def check_job(job: Job) -> None:
    """Refuse what cannot run, naming both options and the way out. Raises ConfigError."""
    _check_axes(job)
    _check_domain(job.layout)
    _check_compression(job)
    _check_tensor(job)
    _check_sequence(job)
    _check_context(job)
    check_schedule(job.layout)
    _check_stages(job)
    check_experts(job)
    _check_batch(job)
    _check_precision(job.layout)
    _check_recompute(job)
    if job.resilience.recheck_every and not job.resilience.survives:
        fix = "only ranks that can be replaced are checked; set resilience.redundancy = 'auto'"
        raise ConfigError("resilience.recheck_every", job.resilience.recheck_every, fix)
    if job.resilience.survives:
        check_survivable(job.layout)
        check_kept(job)


def _check_axes(job: Job) -> None:
    layout, ranks = job.layout, job.cluster.ranks
    if layout.world != ranks:
        raise ConfigError(
            "layout",
            layout.label,
            f"its axes multiply to {layout.world} ranks but cluster.ref = {job.cluster.ref!r} has "
            f"{ranks}; change an axis or set cluster.ref = 'local:{layout.world}'",
        )


def _check_domain(layout: Layout) -> None:
    if not layout.domain:
        return
    replicas = layout.dp_replicate * (1 if layout.zero_stage else layout.cp)
    if replicas % layout.domain:
        what = f"layout.dp_replicate = {layout.dp_replicate}"
        if replicas != layout.dp_replicate:
            what += f" x layout.cp = {layout.cp}"
        raise ConfigError(
            "layout.domain",
            layout.domain,
            f"does not divide the number of replicas, {replicas} ({what}); "
            f"set {divisor_words(replicas)}, or 0",
        )
    if layout.grad_compression != "none":
        raise ConfigError(
            "layout.domain",
            layout.domain,
            f"is passed over by layout.grad_compression = {layout.grad_compression!r}, which adds "
            "up over all replicas at once; set domain = 0 or grad_compression = 'none'",
        )


def _check_compression(job: Job) -> None:
    layout = job.layout
    if layout.grad_compression == "none":
        return
    grid = expert_grid(layout)
    expert_copies = grid.replicas * grid.shards if job.model.n_experts else 1
    if layout.dp * layout.cp * expert_copies == 1:
        raise ConfigError(
            "layout.grad_compression",
            layout.grad_compression,
            "has no gradients to send: layout.dp_replicate, dp_shard and cp are 1; "
            "raise one of them or set grad_compression = 'none'",
        )


def _check_tensor(job: Job) -> None:
    model, layout = job.model, job.layout
    sizes = {"heads": model.heads, "vocab": model.vocab}
    if not model.latent_attention:
        sizes["kv_heads"] = model.kv_heads
    if not model.n_experts or model.first_dense_layers:
        sizes["ffn_hidden"] = model.ffn_hidden
    if model.n_shared_experts:
        shared = model.n_shared_experts * model.expert_ffn_hidden
        sizes["n_shared_experts x expert_ffn_hidden"] = shared
    for name, size in sizes.items():
        if size % layout.tp:
            raise ConfigError(
                "layout.tp",
                layout.tp,
                f"does not divide model.{name} = {size}; it takes {divisor_words(size)}",
            )


def _check_sequence(job: Job) -> None:
    layout, seq_len = job.layout, job.data.seq_len
    if rest := seq_len % layout.sequence_split:
        axes = [f"layout.cp = {layout.cp} ({layout.cp_method})"] if layout.cp > 1 else []
        if layout.sequence_parallel:
            axes.append(f"layout.tp = {layout.tp} with sp = true")
        longer = seq_len - rest + layout.sequence_split
        raise ConfigError(
            "data.seq_len",
            seq_len,
            f"is not a multiple of {layout.sequence_split}, into which {' and '.join(axes)} cut "
            f"it; use {longer} or change the axes"
            + ("" if layout.cp > 1 else ", or set layout.sp = false"),
        )
    if seq_len > job.model.max_seq_len:
        raise ConfigError(
            "data.seq_len",
            seq_len,
            f"is longer than model.max_seq_len = {job.model.max_seq_len}; "
            f"shorten it or set model.max_seq_len = {seq_len}",
        )


def _check_context(job: Job) -> None:
    layout, heads = job.layout, job.model.heads // job.layout.tp
    if layout.cp_method == "ulysses" and heads % layout.cp:
        raise ConfigError(
            "layout.cp",
            layout.cp,
            f"does not divide the {heads} heads of a rank (model.heads / layout.tp), which "
            f"cp_method = 'ulysses' shares out; it takes {divisor_words(heads)}, or set "
            "cp_method = 'ring'",
        )


def check_schedule(layout: Layout) -> None:
    """Refuse stages that `layout.schedule` cannot have. Raises ConfigError."""
    schedule, vpp = layout.schedule, layout.vpp
    if layout.pp == 1 and schedule not in ("gpipe", "1f1b"):
        raise ConfigError(
            "layout.schedule",
            schedule,
            "needs stages, but layout.pp = 1; raise pp or set schedule = '1f1b'",
        )
    if schedule == "interleaved" and vpp == 1:
        raise ConfigError(
            "layout.vpp",
            vpp,
            "is one stage a rank, but layout.schedule = 'interleaved' runs several; set vpp = 2 or "
            "more, or schedule = '1f1b'",
        )
    own_chunks = 2 if schedule in V_SCHEDULES else 1
    if schedule != "interleaved" and vpp not in (1, own_chunks):
        raise ConfigError(
            "layout.vpp",
            vpp,
            f"contradicts layout.schedule = {schedule!r}, which puts {own_chunks} on a rank; "
            "leave vpp out or set schedule = 'interleaved'",
        )


def _check_stages(job: Job) -> None:
    layout, layers = job.layout, job.model.layers
    count, stages = layout.virtual_stages, layout.stages
    if layers < count:
        fewer = layers // layout.chunks
        one_each = layout.chunks > 1 and fewer < 2
        raise ConfigError(
            "layout.pp",
            layout.pp,
            f"makes {count} stages under layout.schedule = {layout.schedule!r}, more than "
            f"model.layers = {layers}; use "
            + ("schedule = '1f1b', one a rank" if one_each else f"pp <= {fewer}"),
        )
    if stages and (len(stages) != count or sum(stages) != layers):
        raise ConfigError(
            "layout.stages",
            stages,
            f"must be {count} numbers (layout.pp x chunks) that add up to model.layers = {layers}; "
            "mend it, or leave stages out to have layers assigned by cost",
        )
    for stage, held in enumerate(stages):
        inner = 0 < stage < count - 1
        if held < inner:
            raise ConfigError(
                "layout.stages",
                stages,
                f"gives {held} layers to stage {stage} of {count} (layout.pp = {layout.pp}); only "
                "the first and the last may have none: give it one, or leave stages out",
            )


def _check_batch(job: Job) -> None:
    layout, batch = job.layout, job.data.global_batch
    unit = layout.dp * layout.micro_batch
    if batch % unit:
        below, above = batch // unit * unit, (batch // unit + 1) * unit
        raise ConfigError(
            "data.global_batch",
            batch,
            f"is not a multiple of dp x micro_batch = {layout.dp} x {layout.micro_batch} = {unit}; "
            f"use {f'{below} or ' if below else ''}{above}",
        )


def _check_precision(layout: Layout) -> None:
    if layout.fp8_scaling != "row" and layout.precision != "fp8":
        raise ConfigError(
            "layout.fp8_scaling",
            layout.fp8_scaling,
            f"scales nothing under layout.precision = {layout.precision!r}; "
            "set precision = 'fp8' or leave fp8_scaling out",
        )


def _check_recompute(job: Job) -> None:
    layout = job.layout
    if layout.recompute == "budget" and not layout.activation_gib:
        raise ConfigError(
            "layout.recompute",
            layout.recompute,
            "needs a budget, but layout.activation_gib = 0; set activation_gib to what a rank may "
            "keep, or recompute = 'full'",
        )
    if layout.recompute != "budget" and layout.activation_gib != 0:
        raise ConfigError(
            "layout.activation_gib",
            layout.activation_gib,
            f"bounds nothing under layout.recompute = {layout.recompute!r}; "
            "set recompute = 'budget' or leave activation_gib out",
        )
    if layout.recompute != "selective" and layout.recompute_parts != ["attention"]:
        raise ConfigError(
            "layout.recompute_parts",
            layout.recompute_parts,
            f"chooses nothing under layout.recompute = {layout.recompute!r}; "
            "set recompute = 'selective' or leave recompute_parts out",
        )
    if layout.recompute == "selective" and not layout.recompute_parts:
        raise ConfigError(
            "layout.recompute_parts",
            layout.recompute_parts,
            "is empty, but layout.recompute = 'selective' recomputes what it lists; "
            "name 'attention' or 'mlp', or set recompute = 'none'",
        )
    recompute_plan(job)
