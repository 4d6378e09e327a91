"""Structured log lines: ``event key=value ...`` on stderr, which systemd files by priority.

One line an event, so that the journal can be searched by word and field. With a journal stream
on stderr each line begins with ``<N>``, the priority that systemd reads (sd-daemon(3)).
"""

import json
import logging
import os
import sys
from typing import Dict, TextIO

_PRIORITY = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3}
LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_logger = logging.getLogger("mgpu")


class _LogFormatter(logging.Formatter):
    def __init__(self, journal: bool) -> None:
        super().__init__()
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        fields: Dict[str, object] = getattr(record, "fields", {})
        words = [record.getMessage()] + [f"{key}={_value(v)}" for key, v in fields.items()]
        line = " ".join(words)
        if record.exc_info:
            line += " traceback=" + _value(self.formatException(record.exc_info))
        if self._journal:
            return f"<{_PRIORITY.get(record.levelno, 6)}>{line}"
        return f"{self.formatTime(record)} {record.levelname.lower()} {line}"


def _value(value: object) -> str:
    """Bare where it is one word, else quoted as JSON, so that a line stays one line."""
    text = str(value)
    if text and all(ch.isalnum() or ch in "-_./:%+,@" for ch in text):
        return text
    return json.dumps(text, ensure_ascii=False)


def setup(level: str, stream: TextIO = sys.stderr) -> None:
    """Send mgpu's events to ``stream`` from ``level`` (debug, info, warning, error) on."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_LogFormatter(journal="JOURNAL_STREAM" in os.environ))
    _logger.handlers[:] = [handler]
    _logger.propagate = False
    _logger.setLevel(LEVELS[level])


def event(name: str, level: int = logging.INFO, **fields: object) -> None:
    """Log one event with its fields."""
    _logger.log(level, name, extra={"fields": fields})


def warning(name: str, **fields: object) -> None:
    event(name, logging.WARNING, **fields)


def error(name: str, **fields: object) -> None:
    event(name, logging.ERROR, **fields)


def fault(name: str, **fields: object) -> None:
    """Log an unexpected exception, with its traceback on the same line. Call it in ``except``."""
    _logger.error(name, exc_info=True, extra={"fields": fields})
