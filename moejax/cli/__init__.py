"""The `moejax` command (level 8)."""
