"""Faults: an error about one request ends that request, and the worker only where its device is broken as well."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vidspec_models.errors import ContextOverflow
from vidspec_models.kv_cache import CacheGeometry
from vidspec_service.engine.channels import Channel, ChannelClosed, ChannelFull
from vidspec_service.engine.following import Following
from vidspec_service.engine.messages import Rejected
from vidspec_service.engine.roster import Roster

logger = logging.getLogger(__name__)


class Faults:
    """The target's. Steps that several requests share are not for it: nobody could say whose the error is."""

    def __init__(self, api: Channel, roster: Roster, following: Following, geometry: CacheGeometry) -> None:
        self._api = api
        self._roster = roster
        self._following = following
        self._devices = {span.device for span in geometry.spans}

    @contextmanager
    def confined_to(self, request_id: str) -> Iterator[None]:
        """Whatever the block raises, the API is told and the request forgotten; raises only what is not the request's.

        An error of CUDA's leaves a device that fails whatever it is asked: a worker that went on would refuse everyone.
        """
        try:
            yield
        except (ChannelClosed, ChannelFull):
            raise
        except ContextOverflow as error:
            self._refuse(request_id, "context_length", str(error))
        except Exception as error:
            logger.exception("request %s failed", request_id)
            for device in self._devices:
                torch.ones((), device=device).item()
            is_meant_for_callers = isinstance(error, ValueError)
            self._refuse(request_id, "failed", str(error) if is_meant_for_callers else type(error).__name__)

    def _refuse(self, request_id: str, kind: str, message: str) -> None:
        self._roster.cancel(request_id)
        self._following.release(request_id)
        self._api.send(Rejected(request_id=request_id, kind=kind, message=message))
