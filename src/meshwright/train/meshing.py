"""The mesh of a rank whose groups are streams of a fabric."""

from __future__ import annotations

from dataclasses import replace

from meshwright.plan.layout import Layout
from meshwright.train.comm import Axis, Clock
from meshwright.train.fabric.fabric import Fabric
from meshwright.train.fabric.group import Groups
from meshwright.train.mesh import Mesh, build_mesh


def mesh_on(fabric: Fabric, layout: Layout, rank: int, block: frozenset[int]) -> Mesh:
    """That of `rank`, whose groups go by the table at hand; those inside of its `block` go on over
    a table that leaves it whole."""
    clock, new_group = Clock(), Groups(fabric, block)
    mesh = build_mesh(layout, rank, clock, new_group, new_group.after)
    everyone = list(range(layout.world))
    if len(everyone) == 1:
        return mesh
    return replace(mesh, world=Axis(tuple(everyone), rank, new_group.after(everyone), clock))
