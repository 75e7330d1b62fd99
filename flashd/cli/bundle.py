"""``flashd convert``, ``inspect`` and ``verify``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashd.cli.daemon import JsonOption
from flashd.cli.render import (
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    ByteProgress,
    fail,
    human_bytes,
    note,
    print_error,
    print_json,
    table,
)
from flashd.errors import ConfigError

if TYPE_CHECKING:
    from flashd.tools.inspect import InspectReport


def convert(
    source: Annotated[Path, typer.Argument(help="GGUF file, or directory of a Hugging Face checkpoint.")],
    dest: Annotated[Path, typer.Argument(help="Bundle directory to make.")],
    dtype: Annotated[str, typer.Option(help="f32, f16, bf16; auto keeps the checkpoint's own.")] = "auto",
    store: Annotated[str, typer.Option(help="FFN rows in one raw file, or in zarr chunks.")] = "file",
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json to use instead of the source's.", show_default=False)
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing bundle.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Make a bundle from a model. Interrupted conversions go on where they stopped."""
    from flashd.layout.manifest import TOKENIZER
    from flashd.tools.convert import ConvertOptions
    from flashd.tools.convert import convert as run
    from flashd.types import DTYPES

    for name, value, known in (("dtype", dtype, ("auto", *DTYPES)), ("store", store, ("file", "zarr"))):
        if value not in known:
            raise ConfigError(f"--{name} is {value!r}, expected one of: {', '.join(known)}")
    options = ConvertOptions(dtype=dtype, store=store, overwrite=overwrite, tokenizer=tokenizer)  # type: ignore[arg-type]  # checked above
    try:
        with ByteProgress() as progress:
            manifest = run(source, dest, options, progress, note)
    except KeyboardInterrupt:
        fail("interrupted; the same command goes on from what is safely on disk", EXIT_INTERRUPTED)
    total = sum(entry.size_bytes for entry in manifest.files)
    if not any(entry.name == TOKENIZER for entry in manifest.files):
        note("no tokenizer found: the model takes token ids only; --tokenizer tokenizer.json adds one")
    if as_json:
        print_json({"bundle": str(dest), "bytes": total, "dtype": manifest.dtype, "store": manifest.store})
    else:
        print(f"{dest}: {manifest.model.family}, {manifest.dtype}, {human_bytes(total)}")
        if manifest.model.activation in ("relu", "relu2"):
            print(f"have only the neurons that fire read: flashd calibrate {dest} --text FILE")
        print(f"serve it with: flashd start --model {dest}")


def inspect(
    directory: Annotated[Path, typer.Argument(help="Bundle directory.")], as_json: JsonOption = False
) -> None:
    """Show what a bundle holds and how much RAM it needs."""
    from dataclasses import asdict

    from flashd.tools.inspect import inspect as run

    report = run(directory)
    if as_json:
        print_json(asdict(report))
        return
    table(("FACT", "VALUE"), inspect_rows(report))


def inspect_rows(report: InspectReport) -> list[tuple[str, str]]:
    """What ``inspect`` found, as a table for people."""
    from flashd.tools.calibrated import calibration_text

    rows = [
        ("model", f"{report.family}, {report.parameters / 1e6:,.1f} M parameters, {report.dtype}"),
        (
            "shape",
            f"{report.n_layers} layers, d {report.d_model}, FFN {report.d_ffn}, "
            f"context {report.max_context}, vocabulary {report.vocab_size}",
        ),
        ("FFN store", report.store),
        ("size on disk", human_bytes(report.total_bytes)),
        ("resident weights", human_bytes(report.resident_bytes)),
        ("FFN rows", f"{human_bytes(report.ffn_bytes)}, {human_bytes(report.layer_bytes)} a layer"),
        ("neuron row", f"{report.row_bytes} bytes, stride {report.stride_bytes}"),
        (
            "KV cache (f16)",
            f"{human_bytes(report.kv_bytes_per_token)} a token, "
            f"{human_bytes(report.kv_bytes_full_context)} a full context",
        ),
        ("weights in RAM, all resident", human_bytes(report.ram_dense_resident_bytes)),
        ("weights in RAM, FFN streamed", human_bytes(report.ram_dense_streamed_bytes)),
    ]
    rows += [
        (f"weights in RAM, sparse, {share} % of the FFN kept", human_bytes(nbytes))
        for share, nbytes in report.ram_sparse_bytes.items()
    ]
    rows.append(("beside the weights", "KV cache, some 100 MiB for the daemon and its scratch"))
    rows += [
        ("calibrated", calibration_text(report.calibration, report.calibration_problem, report.n_layers)),
        ("tokenizer", _yes(report.tokenizer)),
        ("chat template", _yes(report.chat_template)),
    ]
    hidden = ("fingerprint",)  # tells conversions apart; nothing for people
    return rows + sorted((k, v) for k, v in report.provenance.items() if k not in hidden)


def _yes(fact: bool) -> str:
    return "yes" if fact else "no"


def verify(
    directory: Annotated[Path, typer.Argument(help="Bundle directory.")], as_json: JsonOption = False
) -> None:
    """Check every checksum of a bundle; exit code 1 if anything is damaged."""
    from dataclasses import asdict

    from flashd.tools.verify import verify as run

    with ByteProgress() as progress:
        report = run(directory, progress)
    if as_json:
        print_json(asdict(report))
        sys.exit(EXIT_FAILURE if report.problems else 0)
    for name in report.unlisted:
        note(f"{directory / name}: not part of the bundle")
    for problem in report.problems:
        print_error(problem)
    if report.problems:
        sys.exit(EXIT_FAILURE)
    print(f"{directory}: all checksums right ({human_bytes(report.checked_bytes)})")
