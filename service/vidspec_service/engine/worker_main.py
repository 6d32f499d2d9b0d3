"""A worker process: take the channel, wait for Configure, load the model, report, loop until the API is gone.

Forked by `fork_server`, with which it dies; with a CUDA driver, it then executes
`python -m vidspec_service.engine.worker_main FD`. Torch is imported only here and in what this module imports.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import logging
import os
import sys
from contextlib import suppress
from functools import partial
from typing import NoReturn, TypeVar

from msgspec import structs

from vidspec_service.engine.ipc.channel import Channel, ChannelClosed, ChannelFull, wait_readable
from vidspec_service.engine.ipc.messages import Configure, KVBudget, Loaded, LoadFailed, Loading, Ready, Started
from vidspec_service.engine.kv_budget import WorkerMemory
from vidspec_service.forking import give_way
from vidspec_service.telemetry import configure_logging

_CONFIGURE_TIMEOUT_S = 30.0
# How long the API may pause: its socket buffer holds 278 messages of a token, which 16 requests fill within 200 ms.
_SEND_TIMEOUT_S = 10.0
_PR_SET_NAME = 15
# A worker, which is restarted, goes before the API, with which all ends; but not before a decode child (1000), though
# the worker may hold four fifths of the memory: with 500 a large video cost the target.
_OOM_SCORE = 200
# How long a torch thread spins when it waits for work: tens of microseconds. The usual milliseconds would take a core
# from other work; without spinning, waking the thread takes longer than most of torch's work here.
_SPINS = "GOMP_SPINCOUNT", "10000"

M = TypeVar("M")
logger = logging.getLogger(__name__)


def main(fd: int) -> int:
    """Serve one API process; returns the exit code."""
    give_way(_OOM_SCORE)
    channel = Channel.from_fd(fd, _SEND_TIMEOUT_S)
    try:
        handle = os.pidfd_open(os.getpid())
        channel.send(Started(pid=os.getpid()), [handle])
        os.close(handle)
        config = _receive(channel, Configure, _CONFIGURE_TIMEOUT_S)
        ctypes.CDLL(None).prctl(_PR_SET_NAME, f"vidspec-{config.role}".encode())  # what `ps` and `top` call it
        configure_logging(config.engine.log_level, config.engine.log_format)
        return _serve(channel, config)
    except ChannelClosed:
        return 0
    except ChannelFull:
        logger.error("the API process has not read for %g s: this worker ends, to be started again", _SEND_TIMEOUT_S)
    except Exception:  # left to the interpreter, it would unload torch before the API sees that the worker is gone
        logger.exception("this worker ends after an error, to be started again")
    return 1


def import_libraries() -> None:
    """Everything that takes long to import and that every worker needs."""
    os.environ.setdefault(*_SPINS)  # noqa: TID251  torch's own setting, not ours; read when its threads are loaded
    gc.disable()  # it would look through everything that is imported again and again: a sixth of the time
    import vidspec_models.loading.load_model  # noqa: F401
    import vidspec_service.engine.draft.loop
    import vidspec_service.engine.target.loop  # noqa: F401
    from vidspec_models.backends.select import import_kernels

    import_kernels()
    gc.enable()


def _receive(channel: Channel, kind: type[M], timeout_s: float) -> M:
    """The next message; raises ChannelClosed unless one of this kind comes in time."""
    wait_readable([channel], timeout_s)
    received = channel.receive()
    if received is None or not isinstance(received[0], kind):
        raise ChannelClosed(f"no {kind.__name__} came")
    return received[0]


def _serve(channel: Channel, config: Configure) -> int:
    import torch

    from vidspec_models.errors import ModelLoadError
    from vidspec_models.loading.load_model import library_versions, load_model, tokenizer_file
    from vidspec_models.loading.sampling_defaults import sampling_defaults
    from vidspec_service.engine.draft.loop import DraftLoop
    from vidspec_service.engine.speculation.probe import measure_costs
    from vidspec_service.engine.target.loop import TargetLoop
    from vidspec_service.engine.worker.memory import measure_memory

    torch.set_num_threads(config.threads)
    try:
        model = load_model(config.spec, partial(_report_loading, channel))
        memory = measure_memory(model, config.engine)
    except ModelLoadError as error:
        channel.send(LoadFailed(message=str(error)))
        return 2
    config = _with_kv_budget(channel, config, memory)
    if model.has_kernels:
        torch.set_num_threads(config.prompt_threads)
    geometry = model.decoder.geometry
    loop: TargetLoop | DraftLoop
    if config.role == "target":
        model.use_when_alone(config.prompt_threads)
        loop = TargetLoop(model, channel, config, measure_costs(model))
    else:
        loop = DraftLoop(model, channel, config)
    if not loop.kv_cache_tokens:
        remedy = f"kv_cache_tokens must be {geometry.context_block} or more"
        channel.send(LoadFailed(message=f"the KV cache has no room for a prompt: {remedy}"))
        return 2
    channel.send(
        Ready(
            context_length=model.context_length,
            kv_cache_tokens=loop.kv_cache_tokens,
            default_num_frames=model.family.default_num_frames,
            max_frames=model.family.max_frames,
            device=geometry.device_names,
            dtype=model.decoder.dtype_name,
            tokenizer_file=tokenizer_file(config.spec),
            is_batch_invariant=model.decoder.batch_invariance.holds,
            step_path=model.decoder.step_path,
            memory=memory,
            versions=library_versions(),
            default_sampling=sampling_defaults(model.family.model),
            tool_format=model.tool_format,
            can_merge_frames=model.family.can_merge_frames,
            tower=model.family.tower_digest() if config.engine.has_draft_model else None,
        )
    )
    loop.run()
    return 0


def _with_kv_budget(channel: Channel, config: Configure, memory: WorkerMemory) -> Configure:
    """The configuration with the KV budget that the API grants; raises ChannelClosed if no answer comes."""
    channel.send(Loaded(memory=memory))
    budget = _receive(channel, KVBudget, config.engine.start_timeout_s)
    engine = dataclasses.replace(config.engine, kv_cache_tokens=budget.num_tokens)
    return structs.replace(config, engine=engine)


def _report_loading(channel: Channel, what: str, fraction: float | None) -> None:
    """Report progress. The API may miss it or be gone: loading goes on, and the next message finds out."""
    with suppress(ChannelFull, ChannelClosed):
        channel.send(Loading(what=what, fraction=fraction))


def exit_now(code: int) -> NoReturn:
    """Exit at once: to unload torch takes seconds, and the kernel frees all: sockets and memory are anonymous."""
    logging.shutdown()
    os._exit(code)


if __name__ == "__main__":
    exit_now(main(int(sys.argv[1])))
