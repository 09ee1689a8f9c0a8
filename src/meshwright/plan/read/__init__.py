"""Configurations of other trainers, read as what our own job file would say."""

from __future__ import annotations

from meshwright.plan.read.detect import read as read
from meshwright.plan.read.reading import Format as Format
from meshwright.plan.read.reading import Reading as Reading
