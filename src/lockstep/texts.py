"""PURE: shortens texts so that they fit into a message between ranks."""

LONGEST_HEADLINE = 4 * 1024
"""Characters that travel of an exception's type and message, where other ranks are told of it."""


def shortened(text: str, longest: int) -> str:
    """A text as it travels: of one that is too long, both ends. What UTF-8 does not have, such as a byte of a file's
    name, is written as an escape."""
    text = text.encode(errors="backslashreplace").decode()
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters left out ...] {text[-half:]}"
