"""The version of moejax, said in this one place: the build and `moejax --version` read it here."""

__version__ = "0.1.0"
