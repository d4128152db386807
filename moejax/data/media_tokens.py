"""How an image stands in a prompt: the words and special tokens around its pads.

Architecture section 8.2. Every feature has a pad of its own, so that nothing grows in the model.
"""

from __future__ import annotations

from moejax.config import ConfigError

BEGIN, CONTENT, PAD, END = (f"<|media_{w}|>" for w in ("begin", "content", "pad", "end"))
# Ids in the tokenizer of Kimi K2.5 and K3.
IDS = {BEGIN: 163602, CONTENT: 163603, END: 163604, PAD: 163605}
STYLES = ("kimi_k3", "kimi_k25", "kimi_vl")


def image_text(style: str, num_tokens: int, *, width: int, height: int) -> str:
    """The text that stands for an image.

    Args:
      style: "kimi_k3", "kimi_k25" or "kimi_vl".
      num_tokens: its features.
      width, height: of the image in pixels, which K3's prompt names.
    """
    if style not in STYLES:
        raise ConfigError(f"image style {style!r} is not one of {', '.join(STYLES)}.")
    begin = "<|media_start|>" if style == "kimi_vl" else BEGIN
    words = f"image {width}x{height}" if style == "kimi_k3" else "image"
    end = END + "\n" if style == "kimi_k25" else END
    return begin + words + CONTENT + num_tokens * PAD + end
