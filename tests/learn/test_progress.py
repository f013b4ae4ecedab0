"""What a person sees while something takes long."""

import sys
from io import StringIO

import pytest

from vitrail.learn import progress
from vitrail.learn.progress import clock, ticker


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_a_ticker_tells_how_far_and_leaves_an_empty_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setattr(progress, "REFRESH", -1)
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    tick = ticker("reading picture")
    now[0] += 4
    tick(1000, 4000)
    now[0] += 8
    tick(4000, 4000)
    first, last = terminal.getvalue().split("\r")[1:3]
    assert first.rstrip() == "reading picture 1,000 of 4,000  250/s  left 0:12"
    assert last.isspace()
    assert terminal.getvalue().endswith("\r")


def test_nothing_moves_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    ticker("reading picture")(3, 4)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("seconds", "told"), [(0.4, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3661, "1:01:01")]
)
def test_clock(seconds: float, told: str) -> None:
    assert clock(seconds) == told
