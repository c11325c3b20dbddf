"""Which values must never reach a log, a file or a tracker."""

import re
from collections.abc import Callable
from enum import IntEnum
from itertools import pairwise
from urllib.parse import unquote

from automodel.config.env import has_placeholder, map_placeholders

__all__ = ["REDACTED", "Secrecy", "is_sensitive_key", "key_secrecy", "redact_text", "redact_written", "secret_parts"]

REDACTED = "<redacted>"
"""What stands in place of a hidden value."""


class Secrecy(IntEnum):
    """What a key says about its value; the larger hides more."""

    NONE = 0
    TEXT = 1
    """A text is hidden, a number is not: `token`."""
    ALL = 2
    """Texts and numbers are hidden: `password`."""


# Patterns are compiled when they are first used, so that importing this module stays cheap.
_WORDS = frozenset({"pwd", "auth", "authorization", "bearer"})
_WORD_PARTS = r"password|passwd|passphrase|secret|credential|apikey|accesskey|privatekey|secretkey"
_BEFORE_KEY = frozenset({"api", "access", "account", "private", "secret"})
_SPECIAL_TOKENS = frozenset({"bos", "eos", "pad", "unk", "mask", "sep", "cls", "image", "video", "audio"})
_WORD = r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+"

# Repetitions before a fixed text are bounded: searching a long text must not take the square of its length.
_URL_HEAD = r"[A-Za-z][A-Za-z0-9+.-]{0,30}://"
# The password of a URL ends at its last @, since it may hold a slash and an @ of its own: a path with an @ makes that
# hide too much. The other form is for passwords that begin like a port.
_URL_PASSWORD = rf"(?P<head>{_URL_HEAD}[^\s/@:]*:)(?P<secret>[^\s/]+)(?=@)"
_URL_PASSWORD_WITH_SLASH = rf"(?P<head>{_URL_HEAD}[^\s/@:]*:)(?!\d+(?:[/?#\s]|$))(?P<secret>(?:(?!://)\S)+)(?=@)"
# user:password@host:5432 and user:password@host/database.
_BARE_URL = (
    r"(?<![\w/.:@+-])(?P<head>[\w.+-]{1,60}:)(?P<secret>[^\s/@]{1,200})"
    r"(?=@[\w.-]{1,253}(?::\d{1,5}(?![\w.])|/\w))"
)
# `password=...` as database drivers and URL queries write it: quoted, up to a semicolon, or one word.
_SETTING = (
    r"(?P<key>[A-Za-z][\w.-]{0,60})(?P<equals>\s?=\s?)"
    r"""(?P<secret>'[^']*'|"[^"]*"|\{[^}]*\}|[^;&\s'"][^;&\s]*(?: [^;&=\s]+)*(?=;)|[^;&\s'"][^;&\s]*)"""
)
# "password": "..." in the text of a mapping, and --password ... in that of a command.
_QUOTED_SETTING = (
    r"""(?P<key>(?P<quote>["'])[A-Za-z][\w.-]{0,60}(?P=quote))(?P<equals>\s?:\s?(?P<open>["']))"""
    r"(?P<secret>(?:(?!(?P=open)).)+)(?=(?P=open))"
)
_OPTION = r"""(?P<key>--[A-Za-z][\w-]{0,60})(?P<equals>\s{1,9})(?P<secret>'[^']*'|"[^"]*"|[^\s'"-]\S*)"""
_AUTHORIZATION = r"(?P<head>(?i:\bauthorization\s*[:=]\s*(?:(?:bearer|basic|token)\s+)?))(?P<secret>[^\s,;]+)"
_BEARER = r"(?P<head>(?i:\bbearer\s+))(?P<secret>[\w.~+/=-]{12,})"
# A URL user without a password is hidden where it looks like a token, in https://ghp_...@host.
_URL_USER = rf"(?P<head>{_URL_HEAD})(?P<secret>[^\s/@:]+)(?=@)"
_TOKEN = (
    r"\b(?P<head>)(?P<secret>hf_[A-Za-z0-9]{20,}|gh[opsur]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}"
    r"|sk-[\w-]{20,}|xox[abprs]-[\w-]{10,}|dapi[0-9a-f]{32}|eyJ[\w-]{10,500}\.[\w-]{10,}\.[\w-]*)"
)


def key_secrecy(name: object) -> Secrecy:
    """Say what a key of this name hides: `DB_PASSWORD` and `apiKey` all, `hf_token` texts, `eos_token` nothing."""
    if not isinstance(name, str):
        return Secrecy.NONE
    words = [word.lower() for word in re.findall(_WORD, name)]
    if not _WORDS.isdisjoint(words) or any(re.search(_WORD_PARTS, word) for word in words):
        return Secrecy.ALL
    if any(first in _BEFORE_KEY and second in {"key", "keys"} for first, second in pairwise(words)):
        return Secrecy.ALL
    if words and words[-1] == "token" and (len(words) == 1 or words[-2] not in _SPECIAL_TOKENS):
        return Secrecy.TEXT
    return Secrecy.NONE


def is_sensitive_key(name: str) -> bool:
    """Say whether a key of this name holds a secret: `hf_token`, `DB_PASSWORD`, `apiKey`; not `eos_token`, `author`."""
    return key_secrecy(name) is not Secrecy.NONE


def redact_text(value: str) -> str:
    """Hide the secrets that a text shows by their form, under whatever key it stands.

    These are passwords in URLs (`https://me:pw@host` -> `https://me:<redacted>@host`) and settings
    (`host=db;password=pw`), authorization headers, well-known tokens, and URL users that look like tokens.
    """
    return _redact(value, _hide)


def secret_parts(value: str) -> list[str]:
    """The parts of a text that `redact_text` hides, each also as a URL decodes it."""
    found: list[str] = []

    def keep(secret: str) -> str:
        bare = secret.strip("'\"")
        found.extend((bare, unquote(bare)))
        return secret

    _redact(value, keep)
    return list(dict.fromkeys(found))


def redact_written(value: str, secrecy: Secrecy = Secrecy.NONE) -> str:
    """Hide the secrets in a text as a recipe writes it: its placeholders stay, since they give nothing away.

    Args:
        value: The text, such as `postgres://me:${PW}@host` or `${PW,default}`.
        secrecy: What its key says; with any secrecy everything outside the placeholders and their defaults is hidden.
    """
    if not has_placeholder(value):
        return _hide(value) if secrecy else redact_text(value)
    if secrecy:
        return _hide_literals(value)
    named = map_placeholders(value, literal=str, default=_hide_default)
    made = _redact(named, _hide_literals)
    # A secret that reaches into a placeholder leaves half of it: then everything around the placeholders is hidden.
    return made if _skeleton(made) == _skeleton(value) else _hide_literals(value)


def _redact(text: str, hide: Callable[[str], str]) -> str:
    def replace(match: re.Match[str]) -> str:
        return match["head"] + hide(match["secret"])

    def replace_setting(match: re.Match[str]) -> str:
        secret = hide(match["secret"]) if key_secrecy(match["key"]) else match["secret"]
        return match["key"] + match["equals"] + secret

    def replace_user(match: re.Match[str]) -> str:
        return match["head"] + (hide(match["secret"]) if _looks_like_token(match["secret"]) else match["secret"])

    if "://" in text:
        text = re.sub(_URL_PASSWORD_WITH_SLASH, replace, text)
        text = re.sub(_URL_PASSWORD, replace, text)
        text = re.sub(_URL_USER, replace_user, text)
    if "@" in text:
        text = re.sub(_BARE_URL, replace, text)
    for sign, setting in (("=", _SETTING), (":", _QUOTED_SETTING), ("--", _OPTION)):
        if sign in text:
            text = re.sub(setting, replace_setting, text)
    for pattern in (_AUTHORIZATION, _BEARER, _TOKEN):
        text = re.sub(pattern, replace, text)
    return text


def _looks_like_token(user: str) -> bool:
    runs = re.findall(r"[A-Za-z0-9]{16,}", user)
    return re.match(_TOKEN, user) is not None or any(not run.isalpha() and not run.isdecimal() for run in runs)


def _hide(secret: str) -> str:
    return REDACTED if secret else ""


def _hide_literals(text: str) -> str:
    """Hide what stands around placeholders and their defaults."""
    return map_placeholders(text, literal=_hide, default=lambda _, default: _hide(default))


def _hide_default(variable: str, default: str) -> str:
    return _hide(default) if key_secrecy(variable) else default


def _skeleton(text: str) -> str:
    """The placeholders of a text without their defaults, and a blank for what stands between them."""
    return map_placeholders(text, literal=lambda _: " ", default=lambda _, __: "")
