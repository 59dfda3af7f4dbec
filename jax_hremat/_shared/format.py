"""Bytes, seconds and percentages as short strings."""

IEC_NAMES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_bytes(count_bytes: int) -> str:
    """Returns a size as a short string in IEC units: 1320702444 gives "1.23 GiB".

    Sizes below 1024 bytes are exact, larger ones have two decimals; negative sizes (savings)
    keep their sign. A positive result is itself a budget that `parse_budget` reads.
    """
    size = float(abs(count_bytes))
    sign = "-" if count_bytes < 0 else ""
    if size < 1024:
        return f"{sign}{abs(count_bytes)} B"
    unit = 0
    # 1023.995 would print as 1024.00, so the next unit begins a little early.
    while size >= 1023.995 and unit + 1 < len(IEC_NAMES):
        size /= 1024
        unit += 1
    return f"{sign}{size:.2f} {IEC_NAMES[unit]}"


def format_seconds(duration_s: float) -> str:
    """Returns a duration as a short string with three digits: 0.0123 gives "12.3 ms".

    Units are s, ms, us and ns; durations of 1000 s and more are whole seconds.
    """
    if duration_s == 0:
        return "0 s"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        # The largest unit in which the value, rounded to three digits, is 1.00 or more.
        if abs(duration_s) >= 0.9995 * scale:
            return f"{_three_digits(duration_s / scale)} {unit}"
    return f"{_three_digits(duration_s / 1e-9)} ns"


def format_signed_seconds(difference_s: float) -> str:
    """Returns a difference of durations with its sign: -0.0123 gives "−12.3 ms"."""
    # Less than a picosecond is rounding error of a sum that should be zero.
    if abs(difference_s) < 1e-12:
        return "0"
    return ("+" if difference_s > 0 else "−") + format_seconds(abs(difference_s))


def format_signed_percent(share: float) -> str:
    """Returns a change as a percentage with its sign: -0.126 gives "−12.6 %"."""
    return f"{100 * share:+.1f} %".replace("-", "−")


def _three_digits(value: float) -> str:
    size = abs(value)
    decimals = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{value:.{decimals}f}"
