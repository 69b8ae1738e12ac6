"""The client's side of the distribution specification. Importing it loads aiohttp: 15 MB, so
`images/remote.py` does it on first use.
"""

from engine.images.registry.repository import Fetched, Repository
from engine.images.registry.session import REFUSALS, Document, Failure, Registries

__all__ = ["REFUSALS", "Document", "Failure", "Fetched", "Registries", "Repository"]
