"""The slots of a decoder's parameters: which part of the whole model each of them is here."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from meshwright.plan.experts import Placement
from meshwright.train.mesh import Mesh
from meshwright.train.nn.decoder import Decoder
from meshwright.train.nn.moe import Experts, MoE
from meshwright.train.parallel.flat import Slot
from meshwright.train.parallel.tensor import is_partial, split_dim


def slots_of(model: Decoder, mesh: Mesh, modules: dict[str, nn.Module]) -> list[Slot]:
    """A slot for each parameter below `modules`, which are named from the model's root; one for
    each expert of a stacked parameter."""
    found: list[Slot] = []
    placements = {m.experts: m.placement for m in model.modules() if isinstance(m, MoE)}
    for top, whole in modules.items():
        for prefix, module in whole.named_modules(prefix=top):
            for attribute, _ in module.named_parameters(recurse=False):
                if isinstance(module, Experts):
                    held = placements[module]
                    found += expert_slots(mesh, f"{prefix}.{attribute}", module, attribute, held)
                else:
                    found.append(_slot(model, mesh, prefix, module, attribute))
    return found


def is_expert(slot: Slot) -> bool:
    """Whether `slot` belongs to a routed expert."""
    return isinstance(slot.module, Experts)


def _slot(model: Decoder, mesh: Mesh, module_name: str, module: nn.Module, attribute: str) -> Slot:
    name = f"{module_name}.{attribute}"
    shape = tuple(module.get_parameter(attribute).shape)
    whole_shape, offset = list(shape), [0] * len(shape)
    split = mesh.tp.size > 1
    dim = split_dim(name) if split else None
    if dim is not None:
        whole_shape[dim] *= mesh.tp.size
        offset[dim] = mesh.tp.index * shape[dim]
    last_stage = mesh.layout.virtual_stages - 1
    tied = name == "embed.weight" and model.spec.tie_embeddings and last_stage > 0
    return Slot(
        name=name,
        module=module,
        attribute=attribute,
        shape=shape,
        global_shape=tuple(whole_shape),
        box_offset=tuple(offset),
        decay=len(shape) > 1,
        whole=dim is None,
        partial=split and dim is None and is_partial(name, mesh.layout.sequence_parallel),
        tied=tied,
        copy=tied and not model.first,
    )


def expert_slots(
    mesh: Mesh, name: str, module: Experts, attribute: str, placement: Placement
) -> Iterator[Slot]:
    """One slot for each place of this rank; a further place of the same expert is a copy."""
    _, *shape = module.get_parameter(attribute).shape
    whole_shape, offset = list(shape), [0, 0]
    if mesh.layout.etp > 1:
        dim = 1 if attribute == "down" else 0
        whole_shape[dim] *= mesh.layout.etp
        offset[dim] = mesh.tp.index * shape[dim]
    ep = mesh.experts.ep.index
    for place, expert in enumerate(placement.on(ep), ep * placement.per_rank):
        yield Slot(
            name=name,
            module=module,
            attribute=attribute,
            shape=(1, *shape),
            global_shape=(placement.n_experts, *whole_shape),
            box_offset=(expert, *offset),
            decay=True,
            copy=place != placement.places[expert][0],
        )
