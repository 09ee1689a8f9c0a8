"""Simple rules of quality for text: pure, each by a figure that a user can look up.

Those of Rae et al. 2021 (Gopher), appendix A, that need no list of words of one language.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rules:
    """What a document must hold to; by default, that there is something in it."""

    least_chars: int = 1
    most_chars: int | None = None
    least_letters: float = 0.0  # share of the characters that are letters or white space
    most_repeated_lines: float = 1.0  # share of the lines that came before in the document
    longest_mean_word: float | None = None  # characters


def reason_against(text: str, rules: Rules) -> str | None:
    """The rule that `text` breaks first, by its name; None if it holds to all."""
    size = len(text)
    if size < rules.least_chars or not text.strip():
        return "least_chars"
    if rules.most_chars is not None and size > rules.most_chars:
        return "most_chars"
    if rules.least_letters > 0 and _letters(text) < rules.least_letters:
        return "least_letters"
    if rules.most_repeated_lines < 1 and _repeated_lines(text) > rules.most_repeated_lines:
        return "most_repeated_lines"
    if rules.longest_mean_word is not None and _mean_word(text) > rules.longest_mean_word:
        return "longest_mean_word"
    return None


def _letters(text: str) -> float:
    return sum(char.isalpha() or char.isspace() for char in text) / len(text)


def _repeated_lines(text: str) -> float:
    lines = [line for line in text.splitlines() if line.strip()]
    return 1 - len(set(lines)) / len(lines) if lines else 0.0


def _mean_word(text: str) -> float:
    words = text.split()
    return sum(map(len, words)) / len(words)
