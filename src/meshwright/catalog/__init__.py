"""Chips, instances and topologies as data, each figure with its source and date."""

from __future__ import annotations

from meshwright.catalog.hardware import Chip as Chip
from meshwright.catalog.hardware import Cluster as Cluster
from meshwright.catalog.hardware import Figure as Figure
from meshwright.catalog.hardware import Level as Level
from meshwright.catalog.load import chip as chip
from meshwright.catalog.load import chip_names as chip_names
from meshwright.catalog.load import cluster as cluster
from meshwright.catalog.load import names as names
