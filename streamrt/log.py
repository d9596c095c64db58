"""The project's loggers: logging an error never raises one.

Some exceptions cannot be formatted (a `SyntaxError` whose text is bytes): the fields are the user's.  Whoever logs one
has more to do than the log, mostly for others.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import Any


class Log(logging.LoggerAdapter[logging.Logger]):
    """A logger whose `exception` logs what can be logged."""

    def __init__(self, name: str) -> None:
        """The logger of that name.  Does not touch the device."""
        super().__init__(logging.getLogger(name), {})

    def exception(self, msg: object, *args: object, exc_info: Any = True, **kwargs: Any) -> None:
        """Logs the exception that is being handled; only its kind where it cannot be formatted.

        Does not touch the device.
        """
        error = sys.exception()
        kwargs.setdefault("stacklevel", 2)
        try:
            super().exception(msg, *args, exc_info=exc_info, **kwargs)
        except Exception:  # noqa: BLE001 - whatever formatting raised
            with contextlib.suppress(Exception):
                self.error(f"{msg}: %s, which cannot be formatted", *args, type(error).__name__, **kwargs)
