"""The command line: a command for every listed source and layout; flags are the parameters of ``convert()``."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.exceptions import TyperException

from ..formats import sources
from ..formats.errors import WarptileError
from ..formats.options import Options
from ..kernels import layouts
from . import report
from .inspect import formats, inspect
from .pipeline import convert
from .unpack import unpack
from .verify import verify

INTERRUPTED = 130

# Parameter -> help, for every flag that a conversion can have.
HELP = {
    "overwrite": "Replace DST when the new one is complete.",
    "strict": "Fail (3) unless every quantised module converts.",
    "dry_run": "Print the plan; read no codes and write nothing.",
    "widen": "Store 2- and 3-bit codes losslessly in 4-bit fields.",
    "fuse": "Store q, k, v and gate, up of a block as one module each.",
    "stack_experts": "Store the experts of a block as one module.",
    "max_shard_size": "Largest shard of a directory: 5GB, 500MiB, or bytes.",
    "workers": "Threads that pack; 0 is one a core.",
    "scheduler": "Write shards on a dask.distributed cluster: tcp://host:8786.",
    "quiet": "Print errors only, and what --json asks for.",
    "bits": "Believe this width, whatever the labels say.",
    "group_size": "Believe this group size; -1 is one group over all inputs.",
    "checkpoint_format": "gptq (zeros stored minus one), gptq_v2 or marlin.",
    "zero_wrap": "lane, word or none: what a stored zero of all ones means.",
    "scale_convention": "multiply or divide: what an inverse or global scale does.",
    "nan": "zero: read NaN codes as 0.",
    "undo_rope_order": "Undo the row order that llama.cpp gives to q and k.",
}

EVERYTHING = [field.name for field in fields(Options)]

Src = Annotated[
    Path, typer.Argument(metavar="SRC", help="A .safetensors, .gguf or .onnx file, or a checkpoint directory.")
]
Dst = Annotated[
    Path | None,
    typer.Argument(metavar="DST", help="A file when it ends in .safetensors, else a directory. Default: beside SRC."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", help=HELP["quiet"])]
Overwrite = Annotated[bool, typer.Option("--overwrite", help=HELP["overwrite"])]
ArtifactPath = Annotated[Path, typer.Argument(metavar="ARTIFACT", help="What a conversion wrote.")]

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    help="Repack quantised checkpoints for GPU kernels, once and bit-exactly.",
)


def _version(wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(f"warptile {version('warptile')}")
        except PackageNotFoundError:
            typer.echo("warptile, from a source tree that is not installed")
        raise typer.Exit


@app.callback()
def _program(
    _: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_version)] = False,
) -> None:
    pass


def _option(name: str, kind: Any, default: Any) -> Parameter:
    flag = f"--{name.replace('_', '-')}"
    annotation = Annotated[kind, typer.Option(flag, help=HELP[name])]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _switches(names: Sequence[str]) -> list[Parameter]:
    """Fields of ``Options`` as flags."""
    kinds = get_type_hints(Options)
    return [_option(f.name, kinds[f.name], f.default) for f in fields(Options) if f.name in names]


def _add_command(name: str, text: str, switches: Sequence[str], fixed: dict[str, Any], free: list[Parameter]) -> None:
    """A conversion command: the parameters of ``convert()`` that are not fixed, and some of ``Options``."""
    own = [p for p in signature(convert).parameters.values() if p.name in HELP]
    kinds = {bool: bool, int: int}

    def command(src: Path, dst: Path | None, as_json: bool, **values: Any) -> None:
        _run(partial(convert, src, dst, **fixed, **values), as_json, values["quiet"])

    parameters = [
        Parameter("src", Parameter.POSITIONAL_OR_KEYWORD, annotation=Src),
        Parameter("dst", Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=Dst),
        *free,
        *(_option(p.name, kinds.get(type(p.default), str), False if p.name == "quiet" else p.default) for p in own),
        *_switches(switches),
        Parameter("as_json", Parameter.KEYWORD_ONLY, default=False, annotation=Json),
    ]
    _register(name, text, command, parameters)


def _register(name: str, text: str, command: Callable[..., None], parameters: Sequence[Parameter]) -> None:
    """A command whose parameters are made, not written."""
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    app.command(name, help=text)(command)


def _add_conversions() -> None:
    for source, module in sources().items():
        for layout in layouts():
            _add_command(
                f"{source}-to-{layout}".replace("_", "-"),
                f"Convert the {source} modules of a checkpoint to {layout}.",
                getattr(module, "OPTIONS", ()),
                {"source": source, "to": layout},
                [],
            )
    to = Annotated[str, typer.Option("--to", metavar="LAYOUT", help=f"One of: {', '.join(layouts())}.")]
    free = [Parameter("to", Parameter.KEYWORD_ONLY, annotation=to)]
    _add_command("auto", "Convert whatever any reader understands.", EVERYTHING, {}, free)


def _add_inspect() -> None:
    def command(src: Path, as_json: bool, **options: Any) -> None:
        _run(partial(inspect, src, **options), as_json)

    parameters = [
        Parameter("src", Parameter.POSITIONAL_OR_KEYWORD, annotation=Src),
        *_switches(EVERYTHING),
        Parameter("as_json", Parameter.KEYWORD_ONLY, default=False, annotation=Json),
    ]
    _register("inspect", "List the modules of a checkpoint or an artifact.", command, parameters)


@app.command("verify")
def _verify(
    artifact: ArtifactPath,
    against: Annotated[Path | None, typer.Option("--against", metavar="SRC", help="Compare all with it.")] = None,
    workers: Annotated[int, typer.Option("--workers", help="Threads that compare; 0 is one a core.")] = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check an artifact against itself, or against the checkpoint it was made from."""
    _run(partial(verify, artifact, against, workers=workers, quiet=quiet), as_json, quiet)


@app.command("unpack")
def _unpack(
    artifact: ArtifactPath,
    dst: Annotated[
        Path,
        typer.Argument(
            metavar="DST", help="Where the source's files go: a directory, or a .safetensors, .gguf or .onnx file."
        ),
    ],
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Give back the checkpoint an artifact was made from."""
    _run(partial(unpack, artifact, dst, overwrite=overwrite, quiet=quiet), as_json, quiet)


@app.command("formats")
def _formats(as_json: Json = False) -> None:
    """Show which conversions exist."""
    _run(formats, as_json)


_add_conversions()
_add_inspect()


def _run(action: Callable[[], object], as_json: bool, quiet: bool = False) -> None:
    """Print the result on stdout, or one line on stderr and with --json an object on stdout; every failure a user can
    cause ends here."""
    try:
        result = action()
    except WarptileError as error:
        raise typer.Exit(_failed(error, error.exit_code, as_json)) from None
    except (OSError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise typer.Exit(_failed(WarptileError(reason, file=getattr(error, "filename", None)), 1, as_json)) from None
    except KeyboardInterrupt:
        interrupted = WarptileError("interrupted", do="the same command goes on after the last finished shard")
        raise typer.Exit(_failed(interrupted, INTERRUPTED, as_json)) from None
    try:
        if as_json:
            _print(report.data(result))
        elif not quiet:
            _print(report.text(result))
    except OSError as error:  # a full disk behind a redirection; what the command was for is done
        print(f"error: the report could not be written: {error.strerror}", file=sys.stderr)
        raise typer.Exit(1) from None


def _failed(error: WarptileError, code: int, as_json: bool) -> int:
    """Say why; the exit code."""
    print(f"error: {error}", file=sys.stderr)
    if as_json:
        _print({"error": {"exit_code": code, **report.data(error)}})
    return code


def _print(content: str | dict[str, Any]) -> None:
    """Text, or an object as JSON."""
    try:
        print(content if isinstance(content, str) else json.dumps(content, indent=2), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone; nothing more to flush


def _terminate(*_: object) -> None:
    raise KeyboardInterrupt


def main(args: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    signal.signal(signal.SIGTERM, _terminate)
    args = sys.argv[1:] if args is None else args
    try:
        code = typer.main.get_command(app).main(args or ["--help"], prog_name="convert", standalone_mode=False)
    except TyperException as error:
        return _failed(WarptileError(error.format_message()), error.exit_code, "--json" in args)
    return code if isinstance(code, int) else 0
