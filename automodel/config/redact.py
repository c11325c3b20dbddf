"""Which values must never reach a log, a file or a tracker."""

import re
from itertools import pairwise

__all__ = ["REDACTED", "is_sensitive_key", "redact_text"]

REDACTED = "<redacted>"
"""What stands in place of a hidden value."""

_SENSITIVE_WORDS = frozenset(
    {"password", "passwd", "passphrase", "pwd", "secret", "secrets", "apikey", "credential", "credentials"}
    | {"auth", "authorization", "bearer"}
)
_SENSITIVE_PAIRS = frozenset({("api", "key"), ("access", "key"), ("private", "key"), ("secret", "key")})
_SPECIAL_TOKENS = frozenset({"bos", "eos", "pad", "unk", "mask", "sep", "cls", "image", "video", "audio"})
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_URL_PASSWORD = re.compile(r"(?P<head>[A-Za-z][A-Za-z0-9+.-]*://[^\s/@:]*:)[^\s/@]+(?=@)")


def is_sensitive_key(name: str) -> bool:
    """Say whether a key of this name holds a secret: `hf_token`, `DB_PASSWORD`, `apiKey`; not `eos_token`, `author`."""
    words = [word.lower() for word in _WORD.findall(name)]
    if _SENSITIVE_WORDS.intersection(words):
        return True
    if any(pair in _SENSITIVE_PAIRS for pair in pairwise(words)):
        return True
    if words and words[-1] == "token":
        return len(words) == 1 or words[-2] not in _SPECIAL_TOKENS
    return False


def redact_text(value: str) -> str:
    """Hide the passwords of URLs inside a text: `https://me:pw@host` -> `https://me:<redacted>@host`."""
    return _URL_PASSWORD.sub(rf"\g<head>{REDACTED}", value)
