import io
import re

import pytest

from slm_lab.lib import progress
from slm_lab.lib.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


class FakeTime:
    now = 100.0

    def __call__(self):
        return self.now


def make_terminal(monkeypatch):
    """Not a fixture: pytest puts its own stderr in place between setting up a test and calling it."""
    terminal = Terminal()
    monkeypatch.setattr('sys.stderr', terminal)
    return terminal


@pytest.fixture
def clock(monkeypatch):
    clock = FakeTime()
    monkeypatch.setattr(progress.time, 'perf_counter', clock)
    return clock


def test_a_resumed_session_goes_on_at_k_of_n(monkeypatch):
    terminal = make_terminal(monkeypatch)
    bar = Progress(total=10000, initial=2500, label='dqn t0 s0')
    assert '25%' in terminal.getvalue() and '2,500/10,000' in terminal.getvalue()
    bar.close(7500)
    assert '75%' in terminal.getvalue() and '7,500/10,000' in terminal.getvalue()


def test_the_rate_counts_the_frames_of_this_process(monkeypatch):
    terminal = make_terminal(monkeypatch)
    bar = Progress(total=100000, initial=90000, label='')
    monkeypatch.setattr(bar._bar, 'start_t', bar._bar._time() - 10)
    monkeypatch.setattr(bar._bar, 'last_print_t', bar._bar._time() - 10)
    bar.close(91000)
    # 1,000 frames in 10 s; counted from frame 0 it would be 9,100
    assert 95 <= int(re.findall(r'(\d[\d,]*) fps', terminal.getvalue())[-1].replace(',', '')) <= 105


def test_the_return_is_shown(monkeypatch):
    terminal = make_terminal(monkeypatch)
    bar = Progress(total=100, initial=0, label='')
    bar.set_return(123.456)
    bar.close(50)
    assert 'return 123.5' in terminal.getvalue()


def test_more_frames_than_planned_end_at_100_percent(monkeypatch):
    terminal = make_terminal(monkeypatch)
    bar = Progress(total=100, initial=0, label='')
    bar.close(103)
    assert '100%' in terminal.getvalue() and '100/100' in terminal.getvalue()


def test_draws_about_five_times_a_second(clock, monkeypatch):
    make_terminal(monkeypatch)
    bar = Progress(total=10**6, initial=0, label='')
    drawn = []
    monkeypatch.setattr(bar, '_draw', drawn.append)
    for frame in range(1, 20001):  # 10 s at 2,000 frames per second
        clock.now += 0.0005
        bar.update(frame)
    assert 40 <= len(drawn) <= 51


def test_keeps_drawing_when_frames_become_slow(clock, monkeypatch):
    make_terminal(monkeypatch)
    bar = Progress(total=10**6, initial=0, label='')
    for frame in range(1, 20001):  # 20,000 frames per second
        clock.now += 0.00005
        bar.update(frame)
    drawn = []
    monkeypatch.setattr(bar, '_draw', drawn.append)
    for frame in range(20001, 22001):  # 10 s at 200
        clock.now += 0.005
        bar.update(frame)
    assert 30 <= len(drawn) <= 51


def test_without_a_terminal_there_is_no_bar(capsys):
    bar = Progress(total=100, initial=0, label='dqn')
    for frame in range(100):
        bar.update(frame)
    bar.set_return(1.0)
    bar.close(100)
    captured = capsys.readouterr()
    assert captured.out == '' and captured.err == ''
