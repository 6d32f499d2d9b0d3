"""Which signals end a server."""

from __future__ import annotations

import signal

import pytest

from vidspec_service.end_signals import obeyed_signals

ALL = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]


@pytest.mark.parametrize(("ignored", "obeyed"), [(None, ALL), (signal.SIGHUP, ALL[:2]), (signal.SIGINT, ALL)])
def test_all_are_obeyed_but_a_hangup_that_nohup_has_ignored(
    ignored: signal.Signals | None, obeyed: list[signal.Signals], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script's background ignores SIGINT, but its server must end by one."""
    monkeypatch.setattr(signal, "getsignal", lambda each: signal.SIG_IGN if each == ignored else signal.SIG_DFL)
    assert obeyed_signals() == obeyed
