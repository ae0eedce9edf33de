"""Where output goes: everything is built in ``DST.partial`` and renamed when it is whole.

    DST.partial/.lock          held by flock while a run is alive
    DST.partial/<DST's name>   the product, file or directory
    DST.partial/<name>.<..>    companions of a product that is a file; they are published before it
    DST.partial/.beside/..     what else belongs beside a product that is a file; published before it, never over a file
    DST.partial/.manifest      which of its shards are finished: ``manifest.py``
    DST.partial/.replaced      what stood at DST, between the two renames of an overwrite

A name without ``.partial`` is therefore always a finished product, whatever killed the run that made it.
"""

from __future__ import annotations

import fcntl
import filecmp
import glob
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ..formats.container import CONFIG, beside, is_model, rebuilder
from ..formats.directory import INDEX, OTHER_WEIGHTS, WEIGHTS
from ..formats.errors import UsageError, WarptileError
from ..formats.output import writing
from ..formats.strict_json import shown
from . import manifest
from .manifest import sync


def is_file(dst: Path) -> bool:
    """Whether a destination's name asks for one file (else: a directory)."""
    return dst.suffix == WEIGHTS or rebuilder(dst) is not None


def default_destination(src: Path, ending: str) -> Path:
    """``<stem>-<ending>`` beside the source and of its kind."""
    src = Path(os.path.abspath(src))
    return src.with_name(f"{src.name}-{ending}") if src.is_dir() else src.with_name(f"{src.stem}-{ending}{WEIGHTS}")


def check_paths(src: Path, dst: Path, *, overwrite: bool, artifact: bool) -> None:
    """Refuse, before anything is read or written, a pair of paths that cannot end well.

    Args:
        overwrite: what stands at DST may be replaced, if it is such as is written there.
        artifact: that is an artifact; else any model.

    Raises:
        UsageError: SRC and DST are one place by any path, one lies inside the other, or DST is of a kind not written.
        WarptileError: SRC or DST's directory is missing; DST exists (and what is there may not be replaced).
    """
    if not src.exists():
        raise WarptileError("no such file or directory", file=src)
    real_src, real_dst = src.resolve(), dst.resolve()
    same = real_src == real_dst or (dst.exists() and os.path.samefile(src, dst))
    if same or (src.is_dir() and real_src in real_dst.parents) or (not is_file(dst) and real_dst in real_src.parents):
        raise UsageError(
            "the destination is the source, or one lies inside the other",
            file=dst,
            found=f"source {src}",
            do="name a destination elsewhere",
        )
    if dst.suffix.lower() in OTHER_WEIGHTS and not is_file(dst) and not dst.is_dir():
        raise UsageError(f"{dst.suffix} files cannot be written", file=dst, do=f"name a {WEIGHTS} file, or a directory")
    if not dst.parent.is_dir():
        raise WarptileError("no such directory", file=dst.parent, do="make it first")
    if not os.path.lexists(dst):
        return
    if not overwrite:
        raise WarptileError("already exists", file=dst, do="name another destination, or give --overwrite")
    if not _may_be_replaced(dst, artifact):
        raise WarptileError(
            f"what is there is not {'an artifact' if artifact else 'a model'}, so it is not replaced",
            file=dst,
            do="remove it yourself, or name another destination",
        )
    if dst.is_symlink():
        raise WarptileError("is a symbolic link, which is not replaced", file=dst, do="name what it points to")


def _may_be_replaced(dst: Path, artifact: bool) -> bool:
    """Whether what stands there is such as is written there: readable weights and no directories, or nothing at all."""
    if not dst.is_dir():
        return is_model(dst, artifact=artifact)
    inside = list(dst.iterdir())
    weights = [file for file in inside if file.suffix.lower() in (WEIGHTS, *OTHER_WEIGHTS)]
    if any(file.is_dir() for file in inside) or (inside and not weights):
        return False
    return all(is_model(file, artifact=artifact) for file in weights)


def check_left(dst: Path, written: Iterable[str]) -> None:
    """Refuse to replace a directory that holds more than weights and the names that will be written there.

    Raises WarptileError.
    """
    if not dst.is_dir():
        return
    own = {*written, CONFIG}
    others = sorted(
        file.name
        for file in dst.iterdir()
        if file.name not in own and not file.name.lower().endswith((INDEX, WEIGHTS, *OTHER_WEIGHTS))
    )
    if others:
        raise WarptileError(
            f"--overwrite would remove {len(others)} files that are not written anew",
            file=dst,
            found=shown(", ".join(others), 200),
            do="move them away, or name another destination",
        )


def check_companions(dst: Path, contents: Mapping[str, bytes], *, overwrite: bool) -> tuple[Path, ...]:
    """Refuse companions, {suffix: content}, that would replace a file of something else beside DST.

    Returns those files that ``overwrite`` has replaced. Raises WarptileError.
    """
    places = {dst.with_name(dst.name + suffix): content for suffix, content in contents.items()} if is_file(dst) else {}
    return tuple(place for place, content in places.items() if _in_the_way(place, content, overwrite))


def _in_the_way(path: Path, companion: bytes | Path, overwrite: bool) -> bool:
    """Whether something else than a companion, its bytes or its file, stands at its place and is replaced by it. What
    a run has left there that was killed while it published is the same. Raises WarptileError for what is spared."""
    if not os.path.lexists(path):
        return False
    plain = path.is_file() and not path.is_symlink()
    if plain and _same(path, companion):
        return False
    if not overwrite:
        raise WarptileError("already exists", file=path, do="name another destination, or give --overwrite")
    if not plain:
        raise WarptileError("is no plain file, so it is not replaced", file=path, do="move it away yourself")
    return True


def _same(path: Path, content: bytes | Path) -> bool:
    if isinstance(content, Path):
        return filecmp.cmp(path, content, shallow=False)
    return path.stat().st_size == len(content) and path.read_bytes() == content


def check_beside(src: Path, dst: Path, names: Iterable[str], *, overwrite: bool) -> None:
    """Refuse files, named relative to DST's directory, that would come to lie elsewhere, over another, or in SRC.

    Raises:
        UsageError: a link leads out of the directory, or the place is DST's, its staging's or in SRC.
        WarptileError: something stands there, as ``_is_there``.
    """
    home, real_src = Path(os.path.realpath(dst.parent)), src.resolve()
    for name in names:
        target = dst.parent / name
        real = Path(os.path.realpath(target))
        taken = Path(name).parts[0] in (dst.name, _partial(dst).name) or real_src in (real, *real.parents)
        if taken or not real.is_relative_to(home):
            raise UsageError("the model's external data has no place there", file=target, do="name another destination")
        _is_there(target, None, overwrite)


def _is_there(target: Path, built: Path | None, overwrite: bool) -> bool:
    """Whether external data stands at its place already. Its name is the model's choice, so no flag replaces a file;
    ``overwrite`` takes one of the same bytes as what was ``built``. Raises WarptileError for any other."""
    if not os.path.lexists(target):
        return False
    plain = target.is_file() and not target.is_symlink()
    if not overwrite or not plain or (built is not None and not _same(target, built)):
        raise WarptileError(
            "external data already exists and is not replaced",
            file=target,
            need="a plain file of the same bytes" if overwrite else None,
            do="remove it yourself, or name a destination in another directory",
        )
    return True


def _partial(dst: Path) -> Path:
    return dst.with_name(dst.name + ".partial")


def check_space(dst: Path, need: int) -> None:
    """Refuse a run that cannot fit on the destination's file system. ``need`` in bytes."""
    free = shutil.disk_usage(dst.parent).free
    if free < need:
        raise WarptileError(
            "not enough room on the disk",
            file=dst.parent,
            found=f"{free} bytes free",
            need=f"{need} bytes",
            do="free some, or name a destination elsewhere",
        )


@contextmanager
def staged(dst: Path, key: str | None = None, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield the path to build the product at (a directory exists already); publish it at ``dst`` when the block ends,
    its companions too unless they replace other files; ``overwrite`` lets them.

    With a ``key``, shards that a dead run with the same key has finished are still there, and only they. An interrupt
    (``KeyboardInterrupt``) leaves what was built for the next run. An error removes it, but for finished shards when
    the system and not the data is at fault.

    Raises:
        WarptileError: another live run is writing to the same destination; a companion would replace another file.
    """
    partial = _partial(dst)
    lock = _locked(partial, dst)
    try:
        _clear(partial, dst, key)
        product = partial / dst.name
        if not is_file(dst):
            product.mkdir(exist_ok=True)
        yield product
        _publish(product, partial, dst, overwrite)
    except Exception as error:
        done = sum(1 for _ in (partial / manifest.DIRECTORY).glob("*.json"))
        if type(error) is WarptileError and done:
            raise WarptileError(
                error.what,
                file=error.file,
                tensor=error.tensor,
                found=error.found,
                need=error.need,
                do=f"{error.do + '; ' if error.do else ''}the same command then goes on after {done} finished shards",
            ) from error
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _locked(partial: Path, dst: Path) -> int:
    """Own ``partial``: the descriptor that holds its lock."""
    while True:
        if os.path.lexists(partial) and not partial.is_dir():
            what = "not a directory that this program made, and it needs the name"
            raise WarptileError(what, file=partial, do="move it, or name another destination")
        with writing(partial):
            partial.mkdir(exist_ok=True)
        path = partial / ".lock"
        try:
            _refuse_strangers(partial, dst)
            lock = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
        except FileNotFoundError:  # its owner finished between the two lines
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise WarptileError(
                "another run is writing to this destination",
                file=dst,
                found=f"a lock on {path}",
                do="wait for it, or name another destination",
            ) from None
        if path.exists() and os.path.samestat(os.fstat(lock), path.stat()):
            return lock
        os.close(lock)


def _refuse_strangers(partial: Path, dst: Path) -> None:
    """Raise WarptileError when a staging directory holds what ``staged`` (or NFS, of it) has never put there."""
    own = (".lock", ".replaced", manifest.DIRECTORY, beside(dst).name, dst.name)
    for file in partial.iterdir():
        if file.name not in own and not file.name.startswith((manifest.TEMPORARY, f"{dst.name}.", ".nfs")):
            raise WarptileError(
                "not a directory that this program made, and it needs the name",
                file=partial,
                found=file.name,
                do="move it, or name another destination",
            )


def _clear(partial: Path, dst: Path, key: str | None) -> None:
    """Remove what a dead run left but for finished shards of the same run; put back what it was about to replace."""
    replaced, product = partial / ".replaced", partial / dst.name
    if os.path.lexists(replaced) and not os.path.lexists(dst):
        replaced.rename(dst)
    shards = [product] if is_file(dst) else sorted(product.glob(f"*{WEIGHTS}"))
    kept = manifest.kept(partial, key, shards) | {partial / ".lock"}
    for holder, directories, files in os.walk(partial, topdown=False):
        for path in (Path(holder) / name for name in (*files, *directories)):
            if path.is_dir() and not path.is_symlink():
                with suppress(OSError):  # something in it is kept
                    path.rmdir()
            elif path not in kept:
                path.unlink()
    if key is not None:
        manifest.begin(partial, key)


def _publish(product: Path, partial: Path, dst: Path, overwrite: bool) -> None:
    if not is_file(dst):
        sync(product)
    companions = {file: dst.with_name(file.name) for file in partial.glob(f"{glob.escape(dst.name)}.*")}
    for file, place in companions.items():
        _in_the_way(place, file, overwrite)
    others = {f: dst.parent / f.relative_to(beside(product)) for f in beside(product).rglob("*") if f.is_file()}
    new = [(file, place) for file, place in sorted(others.items()) if not _is_there(place, file, overwrite)]
    for file, place in companions.items():
        file.replace(place)
    replaced, published = partial / ".replaced", list[Path]()
    try:
        for file, place in new:
            with writing(place):
                place.parent.mkdir(parents=True, exist_ok=True)
                file.rename(place)
            published.append(place)
            sync(place.parent)
        if os.path.lexists(dst):
            dst.rename(replaced)
        product.rename(dst)
    except BaseException:
        if os.path.lexists(replaced) and not os.path.lexists(dst):
            replaced.rename(dst)
        for place in published:
            place.unlink()
        raise
    sync(dst.parent)
    shutil.rmtree(partial, ignore_errors=True)
