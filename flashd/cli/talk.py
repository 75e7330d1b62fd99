"""``flashd run`` and ``flashd chat``: flags only.

The work is in ``conversation``, which is imported when one of them runs: the daemon starts through
the same program and shall not carry an HTTP client in its memory.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from flashd.cli.daemon import JsonOption, SocketOption

# Gentler than the API's, which are OpenAI's: at temperature 1 small models talk nonsense.
TEMPERATURE = 0.7
TOP_P = 0.9

SystemOption = Annotated[
    str | None, typer.Option(help="System message in front of the conversation.", show_default=False)
]
MaxTokensOption = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens to generate at most [default: to the answer's end; run --raw: 256].",
                 show_default=False),
]  # fmt: skip
TemperatureOption = Annotated[float, typer.Option(min=0.0, help="0 always takes the likeliest token.")]
TopPOption = Annotated[float, typer.Option(min=1e-6, max=1.0, help="Nucleus mass.")]
TopKOption = Annotated[int, typer.Option(min=0, help="Candidates kept; 0 keeps all.")]
SeedOption = Annotated[int | None, typer.Option(min=0, help="Same seed, same text.", show_default=False)]
StatsOption = Annotated[
    bool, typer.Option("--stats", help="Then print tokens, time to the first, tokens/s on stderr.")
]


def run(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; - or nothing reads it from stdin.", show_default=False)
    ] = None,
    system: SystemOption = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is: no chat template.")] = False,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = TEMPERATURE,
    top_p: TopPOption = TOP_P,
    top_k: TopKOption = 0,
    seed: SeedOption = None,
    socket: SocketOption = None,
    stats: StatsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Ask the running daemon one thing; the answer streams to stdout."""
    from flashd.cli import conversation

    conversation.ask(
        prompt,
        system=system,
        raw=raw,
        socket=socket,
        options=_given(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed),
        stats=stats,
        as_json=as_json,
    )


def chat(
    system: SystemOption = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = TEMPERATURE,
    top_p: TopPOption = TOP_P,
    top_k: TopKOption = 0,
    seed: SeedOption = None,
    socket: SocketOption = None,
    stats: StatsOption = False,
) -> None:
    """Talk with the running daemon. Ctrl-C stops an answer; Ctrl-D or /exit leaves; /help."""
    from flashd.cli import conversation

    conversation.converse(
        system=system,
        socket=socket,
        options=_given(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed),
        stats=stats,
    )


def _given(**options: Any) -> dict[str, Any]:
    """The options that were given; the daemon decides on the others."""
    return {name: value for name, value in options.items() if value is not None}
