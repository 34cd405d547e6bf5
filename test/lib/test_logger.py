import io
import logging
import os
import re

import pytest

from slm_lab.lib import logger
from slm_lab.lib.errors import LabError
from slm_lab.lib.progress import Progress

lab_logger = logging.getLogger('slm_lab.some.module')


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ('LOG_LEVEL', 'NO_COLOR'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('TERM', 'xterm')
    yield
    logger.close()


def test_a_line_says_when_who_and_where(capsys):
    logger.setup()
    lab_logger.info('hello')
    line = capsys.readouterr().out
    assert re.fullmatch(
        rf'\[\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d,\d{{3}} PID:{os.getpid()} INFO test_logger.py test_\w+\] hello\n', line
    )


def test_setting_up_twice_doubles_nothing_and_changes_the_file(tmp_path, capsys):
    logger.setup(tmp_path / 'log' / 'trial.log')
    lab_logger.info('one')
    logger.setup(tmp_path / 'log' / 'session.log')
    lab_logger.info('two')
    assert [line[-3:] for line in capsys.readouterr().out.splitlines()] == ['one', 'two']
    assert (tmp_path / 'log' / 'trial.log').read_text().endswith('] one\n')
    assert (tmp_path / 'log' / 'session.log').read_text().count('\n') == 1


def test_a_resumed_run_appends_to_its_log(tmp_path):
    for message in ('before', 'after'):
        logger.setup(tmp_path / 'run.log')
        lab_logger.info(message)
        logger.close()
    assert [line.split()[-1] for line in (tmp_path / 'run.log').read_text().splitlines()] == ['before', 'after']


def test_a_library_that_logs_at_the_root_does_not_print_our_lines_again(capsys):
    handler = logging.StreamHandler()
    logging.getLogger().addHandler(handler)
    try:
        logger.setup()
        lab_logger.info('once')
    finally:
        logging.getLogger().removeHandler(handler)
    captured = capsys.readouterr()
    assert (captured.out + captured.err).count('once') == 1


@pytest.mark.parametrize(('no_color', 'is_colored'), [(None, True), ('1', False)])
def test_colours_on_a_terminal_only_and_never_in_the_file(tmp_path, monkeypatch, no_color, is_colored):
    if no_color:
        monkeypatch.setenv('NO_COLOR', no_color)
    terminal = Terminal()
    monkeypatch.setattr('sys.stdout', terminal)
    logger.setup(tmp_path / 'run.log')
    lab_logger.warning('careful')
    assert ('\x1b[' in terminal.getvalue()) == is_colored
    assert '\x1b[' not in (tmp_path / 'run.log').read_text()


def test_level_from_the_environment(monkeypatch, capsys):
    monkeypatch.setenv('LOG_LEVEL', 'warning')
    logger.setup()
    lab_logger.info('quiet')
    lab_logger.warning('loud')
    assert [line[-4:] for line in capsys.readouterr().out.splitlines()] == ['loud']
    monkeypatch.setenv('LOG_LEVEL', 'warnin')
    with pytest.raises(LabError, match="'warnin' is unknown; did you mean 'WARNING'"):
        logger.setup()


def test_a_line_does_not_tear_a_progress_bar(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr('sys.stdout', terminal)
    monkeypatch.setattr('sys.stderr', terminal)
    monkeypatch.setenv('NO_COLOR', '1')
    logger.setup()
    progress = Progress(100, 0, 'session')
    lab_logger.info('between')
    progress.close()
    line = next(line for line in terminal.getvalue().split('\n') if line.endswith('between'))
    cleared, _, message = line.rpartition('\r')
    assert cleared.rpartition('\r')[2].strip() == ''  # the bar's line was wiped before
    assert message.startswith('[')
