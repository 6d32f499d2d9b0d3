"""Every message that crosses a process. Frozen, small: ids and numbers; text and frames travel in shared memory.

| from   | to     | message     | when                                                                  |
|--------|--------|-------------|-----------------------------------------------------------------------|
| API    | worker | Configure   | once, first                                                           |
| API    | target | Generate    | a request was admitted and decoded (fds: the request and its frames)  |
| API    | target | Cancel      | disconnect, stop string, deadline, shutdown                           |
| worker | API    | Started     | once, first (one fd: a pidfd of the worker)                           |
| worker | API    | Loading     | while it loads, a few times a second                                  |
| worker | API    | Loaded      | its devices' memory, before the KV cache takes any                    |
| API    | worker | KVBudget    | the answer to Loaded, once the other worker has loaded as well        |
| worker | API    | Ready       | once, when it can take requests                                       |
| worker | API    | LoadFailed  | cannot load; the worker exits                                         |
| worker | API    | Heartbeat   | every second, idle or busy, and after a thousand forwards             |
| target | API    | PromptReady | the prompt fits; before its prefill                                   |
| target | API    | Rejected    | the request cannot be served; nothing follows                         |
| target | API    | Tokens      | tokens were committed                                                 |
| target | API    | Ended       | end of sequence or token limit; nothing follows                       |
| worker | API    | Activity    | prepared or prefilled a request that asks for its timeline            |
| draft  | API    | DraftView   | what the draft sees was chosen (again), for a request that asks       |
| API    | draft  | Generate    | the same request, before the target gets it                           |
| API    | draft  | Cancel      | as for the target, and when the answer has ended                      |
| API    | worker | Peer        | a draft came up (one fd: the channel between draft and target)        |
| target | draft  | Follow      | it pays to run ahead: prepare the request (maybe a fd: TowerMemory)   |
| draft  | target | Proposal    | the draft has run ahead by a few tokens                               |
| draft  | target | Declined    | the draft cannot work on the request (any more)                       |
| target | draft  | Verdict     | tokens were committed; the first one starts the draft                 |
| target | draft  | Relevance   | a request's prompt is prefilled (one fd: float16 per video cell)      |
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from vidspec_models.loading.spec import ModelSpec
from vidspec_models.request import ToolFormat
from vidspec_models.step_path import COMPILED, StepPath
from vidspec_service.engine.config import EngineConfig
from vidspec_service.engine.kv_budget import WorkerMemory
from vidspec_service.engine.types import Activity, DraftView, FinishReason, PromptReady, RejectReason, RowLogprobs


class Configure(Struct, frozen=True, kw_only=True):
    """A worker's role, model and settings."""

    role: str  # "target" | "draft"
    spec: ModelSpec
    threads: int
    prompt_threads: int  # used where our own kernels compute the steps, so that torch computes only the prompts
    engine: EngineConfig


class Generate(Struct, frozen=True, kw_only=True):
    """A request; all of it lies in the shared memory sent with this message, as it was submitted."""

    request_id: str
    choice: int = 0  # index among the answers that the request asks for: see `GenerationRequest.choice`
    has_committed: bool = False  # a new worker takes over: a further fd has the tokens that clients have seen


class Cancel(Struct, frozen=True, kw_only=True):
    """Forget the request; unknown ids are fine, the request may just have ended."""

    request_id: str


class Started(Struct, frozen=True, kw_only=True):
    """The process runs; whoever holds its pidfd can kill it and see that it has ended."""

    pid: int


class Ready(Struct, frozen=True, kw_only=True):
    """The worker can take requests."""

    context_length: int
    kv_cache_tokens: int  # that its KV cache can hold
    default_num_frames: int
    max_frames: int | None = None
    device: str
    dtype: str
    tokenizer_file: str
    is_batch_invariant: bool
    step_path: StepPath = COMPILED
    memory: WorkerMemory
    versions: dict[str, str]
    default_sampling: dict[str, int | float] = {}  # fields of SamplingParams, for requests that do not set them
    tool_format: ToolFormat = ToolFormat.NONE
    can_merge_frames: bool = False
    tower: str | None = None  # digest of the vision tower: if it is equal in both workers, one tower can serve for both


class Loading(Struct, frozen=True, kw_only=True):
    """Progress of a worker that loads its model."""

    what: str
    fraction: float | None  # None: unknown


class Loaded(Struct, frozen=True, kw_only=True):
    """The worker's model is on its devices; the worker waits for its KVBudget."""

    memory: WorkerMemory


class KVBudget(Struct, frozen=True, kw_only=True):
    """How many tokens a worker's KV cache may hold."""

    num_tokens: int


class LoadFailed(Struct, frozen=True, kw_only=True):
    """The model cannot be loaded; a human can act on the message."""

    message: str


class Heartbeat(Struct, frozen=True, kw_only=True):
    """Proof of life, with the numbers since the last one."""

    cache_usage: float  # of the KV cache, 0 to 1
    busy_s: float  # time at work
    elapsed_s: float
    until: float  # on the monotonic clock of all processes
    forwards: tuple[tuple[float, float, int], ...]  # all since the last heartbeat, as (start, end, rows) on that clock
    has_peer: bool = True  # has a channel to the other worker; if not, the API sends another Peer


class Rejected(Struct, frozen=True, kw_only=True):
    """The request cannot be served."""

    request_id: str
    reason: RejectReason = RejectReason.FAILED
    message: str


MAX_HELD_TOKENS = 16  # that a target may have committed and not sent yet


class Tokens(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one forward committed, in order, and how many draft tokens it judged and accepted."""

    request_id: str
    ids: tuple[int, ...]
    num_judged: int = 0  # see SpeculationStats
    num_accepted: int = 0
    num_rollbacks: int = 0  # draft chains that a mismatch has voided since the request's last Tokens
    num_wasted: int = 0  # draft tokens since then that were never judged
    draft_video_tokens: int = 0  # video tokens that the draft saw when it last proposed
    num_cached: int = 0  # in the request's first Tokens: prompt tokens whose keys and values were there already
    logprobs: tuple[RowLogprobs, ...] = ()  # one per id, if asked for: at most 33 with 20 alternatives each
    forced: tuple[int, ...] = ()  # indices in `ids` of tokens that the grammar forced, if asked for
    work: tuple[Activity, ...] = ()  # of both workers since the request's last Tokens, if asked for


class Ended(Struct, frozen=True, kw_only=True):
    """The target finished by itself."""

    request_id: str
    finish_reason: FinishReason


class Peer(Struct, frozen=True, kw_only=True):
    """The channel to the other worker comes with this message and replaces any earlier one."""

    pid: int | None = None  # the other worker's
    shares_tower: bool = False  # the vision towers of both are the same: the target's serves for the draft
    shares_gpu: bool = False  # both compute on one GPU, which alternates between them


class Follow(Struct, frozen=True, kw_only=True):
    """Asks the draft to prepare a request that it has from the API, and to run ahead of the target."""

    request_id: str
    max_lead: int = 0  # tokens that the draft may propose before the target's first verdict


_TokenId = Annotated[int, Meta(ge=0)]
_Seconds = Annotated[float, Meta(ge=0, le=1e6)]  # no plan can be made with a time that is not finite


class Proposal(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Draft tokens for output positions start, start+1, ... after the prefix that (epoch, start) names."""

    request_id: str
    epoch: int
    start: int
    ids: tuple[_TokenId, ...]
    confidences: tuple[float, ...]  # the draft's probability that the target agrees, for each
    step_s: _Seconds  # the draft's mean time per token, for the target's plan; 0 before its first guess
    video_tokens: int  # that the draft sees
    prepare_s: _Seconds = 0.0  # the draft's work before its first proposal for the request, told with that one
    work: tuple[Activity, ...] = ()  # the draft's work on it, if asked for


class Declined(Struct, frozen=True, kw_only=True):
    """No proposal for the request comes any more: nobody need wait for one."""

    request_id: str


class Verdict(Struct, frozen=True, kw_only=True):
    """The target committed `ids` from output position `start` on; very many ids come in shared memory instead."""

    request_id: str
    start: int
    ids: tuple[int, ...]
    max_lead: int  # tokens that the draft may run ahead of these
    min_draft_tokens: int = 0  # of these, the tokens that the target waits for


class Relevance(Struct, frozen=True, kw_only=True):
    """How much the target's text attends to each video cell; shared memory has the scores, in the order of the grid."""

    request_id: str
    grid_checksum: int  # of the cells' positions: the draft's may differ


ApiToWorker = Configure | KVBudget | Generate | Cancel | Peer
WorkerMessage = Started | Loading | Loaded | Ready | LoadFailed | Heartbeat
RequestMessage = PromptReady | Rejected | Tokens | Ended | Activity | DraftView
PeerMessage = Follow | Proposal | Declined | Verdict | Relevance
Message = ApiToWorker | WorkerMessage | RequestMessage | PeerMessage
