import pytest

from tpuembed.export.formatting import format_bytes, format_seconds


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1500, "1.5 kB"),
        (999_499, "999 kB"),
        (999_999, "1 MB"),
        (2_147_483_648, "2.15 GB"),
        (10**13, "10 TB"),
        (10**19, "1e+04 PB"),
    ],
)
def test_bytes_have_three_digits(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0312, "0.1 s"),
        (0.312, "0.31 s"),
        (45.4, "45 s"),
        (99.4, "99 s"),
        (100, "1.7 min"),
        (5900, "98 min"),
        (36_000, "10 h"),
    ],
)
def test_times_are_in_the_unit_that_people_use(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
