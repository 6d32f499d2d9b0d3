"""Loading reports its progress: downloads and weights as shares, later steps by name."""

from __future__ import annotations

from pathlib import Path

import transformers

from tests.unit.models.families.tiny_checkpoints import save
from vidspec_models.loading.load_model import load_bars, load_model, reporting_bar
from vidspec_models.loading.spec import ModelSpec


class Heard:
    """Records the reports in order."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, float | None]] = []

    def __call__(self, what: str, fraction: float | None) -> None:
        self.steps.append((what, fraction))


def test_weights_are_told_up_to_the_last_one_then_what_follows(tmp_path: Path) -> None:
    save("llava_onevision", tmp_path)
    heard = Heard()
    load_model(ModelSpec(path=str(tmp_path), role="target", device="cpu", dtype="float32"), heard)
    shares = [fraction for what, fraction in heard.steps if what == "loading weights" and fraction is not None]
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert shares == sorted(shares)
    assert heard.steps[-1] == ("compiling and measuring", None)


def test_a_download_is_told_even_where_its_bar_would_be_hidden() -> None:
    """The hub's client passes disable=None: no bar unless stderr is a terminal, which it never is in a worker."""
    heard = Heard()
    with reporting_bar(heard)(desc="model-00001-of-00002.safetensors", total=200, unit="B", disable=None) as bar:
        bar.update(50)
        bar.refresh()
    assert ("model-00001-of-00002.safetensors", 0.25) in heard.steps


def test_a_bar_without_an_end_says_nothing() -> None:
    heard = Heard()
    with reporting_bar(heard)(desc="fetching", total=None) as bar:
        bar.update(3)
    assert heard.steps == []


def test_bars_are_the_librarys_own_again_afterwards() -> None:
    heard = Heard()
    with load_bars(heard):
        pass
    list(transformers.utils.logging.tqdm(range(3), desc="somebody else's"))
    assert heard.steps == []
