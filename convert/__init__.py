"""From other people's files to ours and back, on a machine without a GPU."""

from .inspect import formats, inspect
from .pipeline import convert
from .unpack import unpack
from .verify import verify

__all__ = ["convert", "formats", "inspect", "unpack", "verify"]
