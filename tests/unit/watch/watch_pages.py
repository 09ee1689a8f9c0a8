"""Reading a report back: its text, by section."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

from meshwright.watch.report import write_report

VOID = {"meta", "br", "link", "img", "input"}


class Page(HTMLParser):
    """Checks that tags nest, and keeps the text and titles of each section."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[tuple[str, str]] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.section = ""
        self.texts: dict[str, list[str]] = {}
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "section":
            self.section = dict(attrs)["id"] or ""
        if tag not in VOID:
            self.open.append((tag, self.get_starttag_text() or ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop()[0] == tag
        if tag == "section":
            self.section = ""

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.setdefault(self.section, []).append(data.strip())


def page_of(run: Path) -> Page:
    """The report of a run."""
    return Page(write_report(run).read_text())


def text_of(run: Path) -> str:
    """All that the report of a run says."""
    return "\n".join(line for lines in page_of(run).texts.values() for line in lines)
