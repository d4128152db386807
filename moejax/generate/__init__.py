"""Models to call and text from them: loading, caches, sampling, streaming (level 6)."""

from moejax.generate.engine import Buckets, Generator, generate
from moejax.generate.load import load
from moejax.generate.model import LanguageModel
from moejax.generate.sample import Sampling
from moejax.generate.stream import TextStream

__all__ = [
    "Buckets",
    "Generator",
    "LanguageModel",
    "Sampling",
    "TextStream",
    "generate",
    "load",
]
