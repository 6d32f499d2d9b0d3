"""The lines of `vidspec batch` on a Ray cluster: Ray Data gives them to servers on its nodes, some at a time.

It also starts the servers, as many as `VIDSPEC_ENGINES` says, and gives the lines of a lost server to another.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
import warnings
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from itertools import islice
from typing import Any

import pyarrow
import ray
from ray.data import ActorPoolStrategy, DataContext
from ray.exceptions import RayError

from vidspec_service.bench.common.server import local_server
from vidspec_service.cli.batch_client import BatchClient, ClientOptions, ServerUnreachable
from vidspec_service.cli.batch_files import BatchRequest, BatchResult, OnResult
from vidspec_service.cli.ray_address import join_cluster
from vidspec_service.end_signals import interrupt_at_signals
from vidspec_service.settings import ClusterSettings, ReplicaRange, env_variables

_ROUNDS = 4  # lines that a server is given at a time, as a multiple of those that it is asked at once
_MAX_RETRIES = 4  # of a block whose servers end: one of its lines may be the reason


def send_all(
    lines: Iterable[BatchRequest], on_result: OnResult, settings: ClusterSettings, options: ClientOptions
) -> None:
    """Like `BatchClient.send_all`, with the servers of the cluster at `settings.ray_address`; raises ConfigError too.

    The folder of the options must be absolute, and the same on every node.
    """
    block_size = _ROUNDS * options.at_once
    join_cluster(settings.ray_address or "auto", runtime_env={"env_vars": env_variables()}, log_to_driver=False)
    interrupt_at_signals()  # Ray's own handler prints a stack and may abort
    try:
        data = DataContext.get_current()
        data.enable_progress_bars = data.print_on_execution_start = False
        data.actor_init_retry_on_errors = True  # a few times: a server may be lost while it starts
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        engines = ReplicaRange.parse(settings.engines)
        left = iter(lines)
        # Blocks are in Ray's object store, which spills to disk: this process holds the lines of one block only.
        blocks = [_block(some) for some in iter(lambda: list(islice(left, block_size)), [])]
        with warnings.catch_warnings(action="ignore"):  # of the last argument, which has no other place yet
            answered = ray.data.from_arrow_refs(blocks).map_batches(
                _Server,
                fn_constructor_args=(options,),
                batch_size=block_size,  # a block, whole
                compute=ActorPoolStrategy(min_size=max(1, engines.min), max_size=engines.max),
                num_cpus=settings.engine_cpus,
                num_gpus=settings.engine_gpus,
                max_task_retries=_MAX_RETRIES,
            )
        for row in answered.iter_rows():
            on_result(BatchResult(**json.loads(row["answer"])))
    except RayError as error:
        raise ServerUnreachable(f"the Ray cluster stopped the work: {str(error).strip().splitlines()[-1]}") from error
    finally:
        ray.shutdown()


def _block(lines: Iterable[BatchRequest]) -> Any:
    texts = [json.dumps({"custom_id": line.custom_id, "url": line.url, "body": line.body}) for line in lines]
    return ray.put(pyarrow.table({"line": texts}))


class _Server:
    """The actor that Ray Data keeps on a node: a server of its own, and a client that asks it."""

    def __init__(self, options: ClientOptions) -> None:
        self._options = options
        self._held = ExitStack()
        server = self._held.enter_context(local_server())
        self._url = server.url
        # If the server ends, so does this actor: Ray starts another, and gives it the block that this one had.
        threading.Thread(target=lambda: (server.process.wait(), os._exit(1)), daemon=True).start()

    def __call__(self, block: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
        """The answers to the lines of a block."""
        lines = [BatchRequest(**json.loads(text)) for text in block["line"]]
        answers: list[str] = []
        client = BatchClient(self._url, self._options, on_silence=lambda _: None)
        asyncio.run(client.send_all(lines, lambda answer: answers.append(json.dumps(answer.to_dict()))))
        return {"answer": answers}
