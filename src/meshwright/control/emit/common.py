"""What the definitions have in common: machines by the cloud's names, placeholders, texts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import yaml

from meshwright.base.errors import ConfigError
from meshwright.catalog import load
from meshwright.control.spec import ClusterSpec

ACCOUNT = "000000000000"
REGION = "us-east-1"
SUBNET = "subnet-00000000000000000"
GROUP = "sg-00000000000000000"
_GIB_IN_TB = 1e12 / 2**30
_RESOURCES = {  # of device plugins, by how a chip of the catalogue is called
    "trainium": "aws.amazon.com/neuron",
    "mi": "amd.com/gpu",
    "tpu": "google.com/tpu",
    "gaudi": "habana.ai/gaudi",
}


def cloud_type(spec: ClusterSpec) -> str:
    """The instance type, such as `trn2.48xlarge`. Raises ConfigError for what no cloud here has."""
    aliases = load.instance(spec.instance).aliases
    found = [alias for alias in aliases if re.fullmatch(r"[a-z0-9-]+\.[0-9]+xlarge", alias)]
    if not found:
        fix = "no AWS instance type is known for it; name one that has: p5, trn2, ..."
        raise ConfigError("instance", spec.instance, fix)
    return found[0]


def chips_per_node(spec: ClusterSpec) -> int:
    """As asked for, or the instance's."""
    return spec.chips_per_node or load.instance(spec.instance).chips_per_node or 1


def resource(spec: ClusterSpec) -> str:
    """What a chip is called in the limits of a pod."""
    chip = load.instance(spec.instance).chip
    found = (name for start, name in _RESOURCES.items() if chip.startswith(start))
    return next(found, "nvidia.com/gpu")


def subnet(spec: ClusterSpec) -> str:
    """As asked for by its name; a CIDR names none."""
    return spec.network.subnet if spec.network.subnet.startswith("subnet-") else SUBNET


def kms_key(spec: ClusterSpec) -> str:
    """The key of the account that volumes are encrypted with; empty for the cloud's own."""
    kind, _, name = spec.encryption.key.partition(":")
    return name if spec.encryption.enabled and kind == "kms" else ""


def lustre_gib(spec: ClusterSpec) -> int:
    """The least size that FSx for Lustre has and that holds the storage asked for: 1200 GiB, or
    a multiple of 2400."""
    wanted = spec.storage.capacity_tb * _GIB_IN_TB
    return 1200 if wanted <= 1200 else 2400 * -(-int(wanted) // 2400)


def lustre_rate(spec: ClusterSpec) -> int:
    """MB/s for each TiB, of the rates there are, for the bandwidth of all storage nodes."""
    wanted = 1e3 * spec.storage.bandwidth_gb_s * max(spec.storage.nodes, 1)
    tib = lustre_gib(spec) / 1024
    return next((rate for rate in (125, 250, 500) if rate * tib >= wanted), 1000)


def labels(spec: ClusterSpec) -> dict[str, str]:
    """Of the user, and who has made it."""
    return {**spec.labels, "meshwright:cluster": spec.name}


def tag(text: str) -> str:
    """What AWS takes in a tag."""
    return re.sub(r"[^\w .:/=+@-]", "_", text)


def as_json(document: Any) -> str:
    """For people to read."""
    return json.dumps(document, indent=2) + "\n"


def as_yaml(*documents: Any) -> str:
    """One after the other."""
    text: str = yaml.safe_dump_all(documents, sort_keys=False)
    return text


def fill_in(places: Mapping[str, str]) -> str:
    """Says what is yet to be given, and where."""
    return "".join(f"{place}: {what}\n" for place, what in places.items())
