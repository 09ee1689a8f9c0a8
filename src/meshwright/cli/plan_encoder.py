"""Options of `plan` for an encoder beside the language model, and what is said about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from meshwright.base.errors import ConfigError
from meshwright.plan.encoders import Beside, Wanted, beside
from meshwright.plan.search_question import Question

Encoder = Annotated[
    str | None,
    typer.Option(
        "--encoder", metavar="NAME|FILE", help="On its own chips: vit-bigg-14, ... or a TOML file."
    ),
]
Images = Annotated[
    int | None, typer.Option("--images", min=1, help="Or other items, in a sequence.")
]
ImageTokens = Annotated[
    int | None, typer.Option("--image-tokens", min=1, help="That one takes of the sequence.")
]
ImageBytes = Annotated[
    float | None, typer.Option("--image-bytes", min=1.0, max=1e12, help="Of one, on storage.")
]
Freeze = Annotated[bool, typer.Option("--freeze-encoder", help="It is not trained.")]


def wanted(
    encoder: str | None,
    images: int | None,
    image_tokens: int | None,
    image_bytes: float | None,
    freeze: bool,
) -> Wanted | None:
    """What was asked about an encoder. Raises ConfigError where only its details were given."""
    if encoder is not None:
        return Wanted(encoder, images, image_tokens, image_bytes, freeze)
    details = {
        "images": images,
        "image_tokens": image_tokens,
        "image_bytes": image_bytes,
        "freeze_encoder": freeze or None,
    }
    for key, value in details.items():
        if value is not None:
            raise ConfigError(key, value, "is about an encoder; name it with --encoder")
    return None


def check(given: Wanted | None, others: Mapping[str, object], question: Question) -> Beside | None:
    """Everything about the encoder filled in. Raises ConfigError where an option was given that
    looks at other numbers of chips: the split is searched for one cluster."""
    if given is None:
        return None
    for key, value in others.items():
        if value:
            raise ConfigError(key, value, "does not go with --encoder; leave one of both out")
    return beside(given, question.seq_len)


def show_parts(one: dict[str, Any]) -> None:
    """What the lines between this one and those of the encoder are about."""
    language, side = one["language"]["chips"], one["encoder"]["chips"]
    typer.echo(
        f"of {one['chips']} chips {language} for the language model, which the next lines are "
        f"about, and {side} for {one['name']}, see below; days and dollars are of both"
    )


def show_encoder(one: dict[str, Any]) -> None:
    """The encoder beside the language model that the lines above are about."""
    side, language = one["encoder"], one["language"]
    frozen = ", frozen" if one["frozen"] else ""
    typer.echo(
        f"encoder {one['name']} ({one['params'] / 1e9:.2f} B{frozen}), {one['images']} x "
        f"{one['image_tokens']} tokens of a sequence, on chips of its own: {side['chips']} of "
        f"{one['chips']} ({one['share']:.1%})"
    )
    for name, part in (("language model", language), ("encoder", side)):
        best = part["best"]
        typer.echo(
            f"  {name}: {part['chips']} chips, {best['name']}, busy {part['busy']:.0%}, "
            f"MFU {part['mfu']:.1%}, P(oom) {best['oom_probability']:.1%}"
        )
    typer.echo(
        f"  both: {one['step_time_s']:.3g} s a step ({one['step_time_low_s']:.3g} to "
        f"{one['step_time_high_s']:.3g}), {one['tokens_per_s_per_chip']:,.0f} tokens/s/chip over "
        "all chips"
    )
    typer.echo(f"  bound by: {one['bound']}")
    typer.echo(f"  {_colocated(one)}")
    tried = (f"{t['encoder_chips']}: {t['tokens_per_s']:,.0f}" for t in one["tried"])
    typer.echo(f"  tokens/s by encoder chips, best first: {'; '.join(tried)}")
    for line in one["assumptions"]:
        typer.echo(f"  - {line}")


def _colocated(one: dict[str, Any]) -> str:
    together = one["colocated"]
    if together is None:
        return "colocated with the first stage: does not fit"
    more = together["tokens_per_s"] / one["tokens_per_s"] - 1
    better = "; chips of its own do not pay here" if more > 0 else ""
    return (
        f"colocated with the first stage ({together['chips']} chips, {together['language']} and "
        f"{together['encoder']}): {together['step_time_s']:.3g} s, {more:+.1%} tokens/s{better}"
    )
