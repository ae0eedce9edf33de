"""The errors a user can meet, each with the exit code the command line gives it."""

from __future__ import annotations

from os import PathLike

AS_WRITTEN = "convert the checkpoint as the tool that quantised it wrote it"
RIGHT_LABELS = "correct it, or get the configuration that belongs to this file"
AGAIN = "convert the source again"
"""What to do, where several places have the same to say."""


def printable(text: object) -> str:
    """``text`` with control characters escaped, so a hostile tensor name cannot drive a terminal."""
    text = str(text)
    return (
        text
        if text.isprintable()
        else "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    )


class WarptileError(Exception):
    """One line: where it is, what was found, what is needed, what to do."""

    exit_code = 1
    advice: str | None = None
    """What to do where the one who raises it knows nothing better."""

    def __init__(
        self,
        what: str,
        *,
        file: str | PathLike[str] | None = None,
        tensor: str | None = None,
        found: object = None,
        need: object = None,
        do: str | None = None,
    ) -> None:
        do = do or self.advice
        self.what, self.file, self.tensor, self.found, self.need, self.do = what, file, tensor, found, need, do
        where = [str(part) for part in (file, tensor) if part is not None]
        line = ": ".join([*where, what])
        if found is not None:
            line += f"; found {found}"
        if need is not None:
            line += f"; need {need}"
        if do is not None:
            line += f"; {do}"
        super().__init__(printable(line))


class UsageError(WarptileError):
    """The request itself makes no sense (SRC == DST, an option that does not apply)."""

    exit_code = 2


class UnsupportedError(WarptileError):
    """A valid file that is not ours to convert, or that can be read in two ways."""

    exit_code = 3


class CorruptError(WarptileError):
    """The file lies: truncated, contradictory, out of range."""

    exit_code = 4
    advice = "get the file again, or tell who made it"


class VerifyError(WarptileError):
    """An artifact and its source, or an artifact and its own repack, differ."""

    exit_code = 5
