"""Numbers as people read them: durations, counts, rates."""

from __future__ import annotations

import math

__all__ = ["format_compact", "format_duration", "format_learning_rate"]


def format_duration(seconds: float) -> str:
    """Write `seconds` (s, not negative) with two significant units: 0.38s, 4.2s, 42s, 2m05s, 1h02m, 3d04h."""
    if not math.isfinite(seconds):
        return "-"
    if seconds < 0.995:
        return f"{seconds:.2f}s"
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def format_compact(value: float) -> str:
    """Write a count or a rate with three significant digits: 7, 0.52, 950, 7.16k, 12.3k, 4.56M, 1.2B."""
    if not math.isfinite(value):
        return "-"
    for threshold, divisor, suffix in ((1e12, 1e12, "T"), (1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e3, 1e3, "k")):
        # 999,500 and more would be written as 1000k: the next suffix takes it.
        if abs(value) >= threshold * 0.9995:
            return f"{_three_digits(value / divisor)}{suffix}"
    return _three_digits(value)


def format_learning_rate(value: float) -> str:
    """Write a learning rate with three significant digits and no filler: 3e-4, 2.75e-5, 0."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "-"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def _three_digits(value: float) -> str:
    """Three significant digits without trailing zeros."""
    size = abs(value)
    decimals = 0 if size >= 99.95 else 1 if size >= 9.995 else 2
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
