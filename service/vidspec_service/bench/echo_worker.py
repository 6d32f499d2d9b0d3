"""Child process at the far end of the channel round trip: every Proposal is answered with a Verdict."""

from __future__ import annotations

import signal
import socket
import sys

from vidspec_service.engine.channels import Channel, ChannelClosed, wait_readable
from vidspec_service.engine.messages import Proposal, Verdict

_PATIENCE_S = 60.0


def main(fd: int) -> int:
    """Echo until the channel closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    channel = Channel(socket.socket(fileno=fd))
    try:
        while True:
            wait_readable([channel], _PATIENCE_S)
            while (received := channel.receive()) is not None:
                message = received[0]
                if isinstance(message, Proposal):
                    channel.send(Verdict(request_id=message.request_id, start=message.start, ids=message.ids, room=16))
    except ChannelClosed:
        return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
