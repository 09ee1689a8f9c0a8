"""Which clusters engine `local` can make."""

from __future__ import annotations

from meshwright.base.errors import ConfigError
from meshwright.control.spec import ClusterSpec

CHIPS_PER_NODE = 8
INSTANCE = "local"
MOST_CHIPS = 256  # processes of one machine
_DEFAULTS = ClusterSpec(name="local")
_MEANINGLESS = {
    "memory_gib_per_chip": "processes share the memory of this machine",
    "storage": "the disks are this machine's",
    "network": "processes are joined by loopback",
    "seed": "nothing is simulated",
    "speed": "a second is a second here",
    "partition": "it is of engine slurm",
    "namespace": "it is of engine kubernetes",
}


def refuse(spec: ClusterSpec) -> None:
    """Raise ConfigError, naming the key, for a cluster that this engine cannot make."""
    if spec.instance not in (INSTANCE, _DEFAULTS.instance):
        raise ConfigError("instance", spec.instance, f'engine local has "{INSTANCE}" alone')
    chips = spec.nodes * (spec.chips_per_node or CHIPS_PER_NODE)
    if chips > MOST_CHIPS:
        raise ConfigError(
            "nodes",
            spec.nodes,
            f"makes {chips} processes, engine local starts {MOST_CHIPS} at most; "
            "take fewer nodes, or fewer chips_per_node",
        )
    for key, why in _MEANINGLESS.items():
        asked = getattr(spec, key)
        if asked != getattr(_DEFAULTS, key):
            value = asked if isinstance(asked, str | int | float) else asked.model_dump()
            raise ConfigError(key, value, f"means nothing to engine local: {why}; leave it out")
