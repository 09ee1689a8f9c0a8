"""What the ranks of a layout send in a step, by group, for the placement of ranks on chips."""

from __future__ import annotations

from meshwright.plan.layout import Layout
from meshwright.plan.mapping import RankMap, map_ranks
from meshwright.plan.mapping_cost import Traffic
from meshwright.plan.search_question import Question

ELEMENT_BYTES = 2.0
GRADIENT_BYTES = 4.0


def traffic(question: Question, layout: Layout) -> dict[str, Traffic]:
    """Bytes that each rank sends in a step (facts/planning.md 6.4), recomputation not counted.

    tp: four gathers or scatters of the activations of a layer, forward and backward. cp: keys and
    values around the ring, and their gradients. dp: gradients down, weights up; under ZeRO-3 three
    passes over the weights for each micro-batch. ep: dispatch and combine, both ways. pp: the
    activation of each chunk there and its gradient back.
    """
    spec, count = question.spec, question.global_batch // (layout.dp * layout.micro_batch)
    layers = -(-spec.layers // layout.pp)
    tokens = layout.micro_batch * question.seq_len / layout.cp
    activation = tokens * spec.hidden * ELEMENT_BYTES
    found: dict[str, Traffic] = {}
    if layout.tp > 1:
        sent = activation * (layout.tp - 1) / layout.tp
        times = 8 * layers * count
        found["tp"] = Traffic(times * sent, "ring", times * (layout.tp - 1))
    if layout.cp > 1:
        keys = tokens * 2 * spec.kv_dim / layout.tp * ELEMENT_BYTES * (layout.cp - 1)
        times = layers * count
        found["cp"] = Traffic(3 * times * keys, "ring", 3 * times * (layout.cp - 1))
    if layout.pp > 1:
        times = 2 * layout.chunks * count
        found["pp"] = Traffic(times * activation / layout.tp, "p2p", times)
    if spec.n_experts and layout.ep > 1:
        share = sum(spec.is_moe(layer) for layer in range(spec.layers)) / spec.layers
        times = round(4 * layers * share) * count
        lanes = 1 if layout.etp == layout.tp else layout.tp
        sent = activation / lanes * spec.top_k * (layout.ep - 1) / layout.ep
        found["ep"] = Traffic(times * sent, "all_to_all", times)
    return {**found, **_data_traffic(question, layout, layers, count)}


def _data_traffic(
    question: Question, layout: Layout, layers: int, count: int
) -> dict[str, Traffic]:
    spec, group = question.spec, layout.dp * layout.cp
    if group == 1:
        return {}
    dense = spec.params / spec.layers - spec.n_experts * spec.expert_params
    weights = max(dense, 0.0) * layers / layout.tp
    if layout.zero_stage != 3:
        sent = weights * (GRADIENT_BYTES + ELEMENT_BYTES) * (group - 1) / group
        return {"dp": Traffic(sent, "ring", 2 * (group - 1))} if layout.dp > 1 else {}
    shards = layout.dp_shard * layout.cp
    found = {}
    if shards > 1:
        sent = count * weights * (2 * ELEMENT_BYTES + GRADIENT_BYTES) * (shards - 1) / shards
        found["fsdp"] = Traffic(sent, "ring", 3 * layers * count * (shards - 1))
    if layout.dp_replicate > 1:
        own = 2 * weights / shards * GRADIENT_BYTES
        found["dp_replicate"] = Traffic(own, "ring", 2 * (layout.dp_replicate - 1))
    return found


def placed(question: Question, layout: Layout) -> RankMap:
    """Which rank sits on which chip, with the terms of its score."""
    return map_ranks(layout, question.cluster, traffic(question, layout))
