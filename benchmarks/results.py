"""RESULTS.md: one section per benchmark, each written by its own script."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

RESULTS = Path(__file__).with_name("RESULTS.md")
_TITLE = "# Results\n\nEach section is written by the command it names, with `--write`.\n"


def machine() -> str:
    """Cores, processor and memory of this machine."""
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores ({_processor()}), {gib:.0f} GiB of memory"


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def busy() -> str:
    """How many processes wanted a core over the last minute; ours count too."""
    return f"{os.getloadavg()[0]:.1f}"


def command() -> str:
    """How this script was called."""
    return f"`{' '.join(['python', f'benchmarks/{Path(sys.argv[0]).name}', *sys.argv[1:]])}`"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others figures."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, rule, *rows])


def section(title: str, facts: dict[str, str], body: str) -> str:
    """The Markdown of one section: when and where, then what was measured."""
    listed = {"date": datetime.date.today().isoformat(), "machine": machine(), **facts}
    lines = [f"- {name}: {value}" for name, value in listed.items()]
    return "\n".join([f"## {title}", "", *lines, "", body, ""])


def write(text: str) -> None:
    """Put a section in the place of the one with its title, or at the end."""
    old = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else _TITLE
    head, *sections = old.split("\n## ")
    title = text.partition("\n")[0].removeprefix("## ")
    new = text.removeprefix("## ").rstrip("\n")
    kept = {s.partition("\n")[0]: s.rstrip("\n") for s in sections}
    kept[title] = new
    parts = [head.rstrip("\n"), *(f"## {s}" for s in kept.values())]
    RESULTS.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
