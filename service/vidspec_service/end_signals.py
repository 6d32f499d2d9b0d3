"""The signals that ask a server to end.

systemd, timeout(1) and a terminal send them to all processes of a server. Only the API process acts on them, so that
running requests can finish: `forking.tie_to_parent` has the others ignore them.
"""

from __future__ import annotations

import signal

END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # SIGHUP: the terminal was closed


def obeyed_signals() -> list[signal.Signals]:
    """All of them, but not SIGHUP if whoever started us has it ignored, as nohup does."""
    return [each for each in END_SIGNALS if each != signal.SIGHUP or signal.getsignal(each) is not signal.SIG_IGN]


def interrupt_at_signals() -> None:
    """Until requests are served, treat all of them as Ctrl-C: asyncio cancels its main task then.

    Linux ends a container's first process by no signal that it does not handle.
    """
    for number in obeyed_signals():
        signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where it was ignored, as in a script's background
