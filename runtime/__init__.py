"""Map an artifact and multiply with it. Importing this needs neither a GPU nor a CUDA package."""

from .session import Session

__all__ = ["Session"]
