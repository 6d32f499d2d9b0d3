"""The run: one child process after another, each with one configuration and the same clips."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from vidspec_models.bundled import TEST_SEEDS
from vidspec_models.spec import ModelSpec
from vidspec_service.bench.child import Child
from vidspec_service.bench.compression.messages import Describe, Described, Load, Loaded, Question
from vidspec_service.bench.compression.options import CompressionOptions, Configuration
from vidspec_service.bench.compression.results import Measured
from vidspec_service.bench.compression.scoring import Score
from vidspec_service.bench.tell import Tell

_WORKER = "vidspec_service.bench.compression.worker"
_TIMEOUT_S = 900.0


def measure(options: CompressionOptions, spec: ModelSpec, threads: int, tell: Tell) -> tuple[list[Measured], Loaded]:
    """Everything that was seen, and where the model ran. Raises ConfigError with a child's words."""
    configurations = options.configurations()
    steps = iter(range(2 * options.num_clips * len(configurations)))
    found, loaded = [], None
    for configuration in configurations:
        name = f"{configuration.label}, {configuration.frames} frames"

        def report(what: str, name: str = name) -> None:
            tell(f"{name}: {what}", next(steps), 2 * options.num_clips * len(configurations))

        with Child(_WORKER, _TIMEOUT_S) as child:
            load = Load(spec=spec, threads=threads, dycoke=configuration.dycoke, max_tokens=options.max_tokens)
            loaded = child.ask(load, Loaded)
            captions = list(_captions(child, configuration, options, report))
            questions = list(_questions(child, configuration, options, report))
        found.append(Measured(configuration=configuration, captions=captions, questions=questions))
    assert loaded is not None, "options without a configuration"
    return found, loaded


def _captions(
    child: Child, configuration: Configuration, options: CompressionOptions, report: Callable[[str], None]
) -> Iterator[Described]:
    for seed in TEST_SEEDS[: options.num_clips]:
        report("captions")
        yield child.ask(Describe(seed=seed, frames=configuration.frames), Described)


def _questions(
    child: Child, configuration: Configuration, options: CompressionOptions, report: Callable[[str], None]
) -> Iterator[Score]:
    for seed in TEST_SEEDS[: options.num_clips]:
        report("questions")
        yield child.ask(Question(seed=seed, frames=configuration.frames), Score)
