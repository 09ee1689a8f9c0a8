"""Rules of quality: each leaves out what it names, and nothing else."""

from __future__ import annotations

import pytest

from meshwright.data.ingest.filters import Rules, reason_against

GOOD = "A line of words.\nAnother line, with other words.\n"


@pytest.mark.parametrize(
    ("name", "rules", "bad"),
    [
        ("least_chars", Rules(), " \n\t"),
        ("least_chars", Rules(least_chars=10), "too short"),
        ("most_chars", Rules(most_chars=len(GOOD)), GOOD + "."),
        ("least_letters", Rules(least_letters=0.9), "1234567890 abc"),
        ("most_repeated_lines", Rules(most_repeated_lines=0.5), "again\n\nagain\nagain\n"),
        ("longest_mean_word", Rules(longest_mean_word=8), "ACGT" * 20 + " a word"),
    ],
)
def test_a_rule_leaves_out_what_breaks_it(name: str, rules: Rules, bad: str) -> None:
    assert reason_against(bad, rules) == name
    assert reason_against(GOOD, rules) is None


def test_the_first_rule_that_is_broken_is_told() -> None:
    rules = Rules(least_chars=5, most_chars=8, least_letters=0.5)
    assert reason_against("....", rules) == "least_chars"
    assert reason_against("." * 9, rules) == "most_chars"
    assert reason_against("." * 6, rules) == "least_letters"
    assert reason_against("...", Rules()) is None
