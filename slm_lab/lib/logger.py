"""Logging of the whole lab: every module logs to `logging.getLogger(__name__)`, a child of `slm_lab` set up here."""

import logging
import os
import sys
from pathlib import Path

from slm_lab.lib.errors import LabError, suggest

ROOT = 'slm_lab'
_FORMAT = '[%(asctime)s PID:%(process)d %(levelname)s %(filename)s %(funcName)s] %(message)s'
_COLORED_FORMAT = _FORMAT.replace('[', '%(log_color)s[', 1).replace(']', ']%(reset)s', 1)
_LEVELS = ('DEBUG', 'INFO', 'WARNING', 'ERROR', 'CRITICAL')


class _ConsoleHandler(logging.Handler):
    """Writes to what is stdout at the moment, and above the progress bars where some are shown."""

    def emit(self, record):
        try:
            line = self.format(record)
            tqdm = sys.modules.get('tqdm')  # nobody who shows a bar has it unloaded
            if tqdm is None:
                print(line, file=sys.stdout, flush=True)
            else:
                tqdm.tqdm.write(line, file=sys.stdout)
                sys.stdout.flush()
        except Exception:
            self.handleError(record)


def setup(log_file=None, level=None):
    """Logs to the console and, in plain text, to the end of `log_file`. A second call replaces the first one's files.

    Args:
        log_file: path, its folder is made when missing; None: console only
        level: a level's name or number; None: the environment's LOG_LEVEL, else INFO
    Raises: LabError for an unknown level; OSError when the file cannot be written.
    """
    level = _level(os.environ.get('LOG_LEVEL') or 'INFO' if level is None else level)
    handlers = [_ConsoleHandler()]
    handlers[0].setFormatter(_console_formatter())
    if log_file is not None:
        Path(log_file).parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(log_file, mode='a', encoding='utf-8'))
        handlers[1].setFormatter(logging.Formatter(_FORMAT))
    close()
    root = logging.getLogger(ROOT)
    root.setLevel(level)
    root.propagate = False  # else a library that sets up logging for itself would print our lines once more
    for handler in handlers:
        root.addHandler(handler)


def close():
    """Closes what `setup` opened."""
    root = logging.getLogger(ROOT)
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    root.propagate = True


def _level(level):
    if isinstance(level, int):
        return level
    if level.upper() not in _LEVELS:
        raise LabError(f"LOG_LEVEL: level '{level}' is unknown{suggest(level, _LEVELS)}")
    return level.upper()


def _console_formatter():
    if not sys.stdout.isatty() or os.environ.get('NO_COLOR') or os.environ.get('TERM') == 'dumb':
        return logging.Formatter(_FORMAT)
    import colorlog  # only where colours are shown

    return colorlog.ColoredFormatter(_COLORED_FORMAT)
