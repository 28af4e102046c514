"""Refuse texts that hold the processor's own marks for pictures."""

from __future__ import annotations

# Of Qwen2.5-VL. Its processor puts a picture's or a video's tokens in the place of each, and looks
# for one more picture or video than there is.
PLACEHOLDERS = ("<|image_pad|>", "<|video_pad|>")


def check_text(text: str) -> None:
    """Raise ValueError for an instruction with a placeholder in it."""
    for mark in PLACEHOLDERS:
        if mark in text:
            raise ValueError(
                f"a prompt holds {mark}, which the text encoder's processor takes for a picture's "
                f"place; given images need no mark, so remove it from {text[:60]!r}…"
            )
