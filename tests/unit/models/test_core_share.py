"""CoreShare: cores are parted among those that compute, and everything that is to be done is done once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from vidspec_models.core_share import CoreShare

pytestmark = pytest.mark.unit


@pytest.fixture
def four_threads() -> Iterator[None]:
    usual = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(usual)


@pytest.mark.usefixtures("four_threads")
def test_who_computes_alone_has_all_cores_and_others_an_equal_part() -> None:
    cores, seen = CoreShare(), list[int]()
    with cores:
        seen.append(cores.num_threads)
        with cores:
            seen.append(cores.num_threads)
            with cores, cores, cores:
                seen.append(cores.num_threads)
        with pytest.raises(ValueError, match="wrong"), cores:
            raise ValueError("wrong")
        seen.append(cores.num_threads)
    assert seen == [4, 2, 1, 4]


@pytest.mark.usefixtures("four_threads")
def test_everything_is_done_once_and_the_calling_thread_takes_part() -> None:
    cores, together = CoreShare(), threading.Barrier(4)
    done, threads = Counter[int](), set[int]()

    def work(item: int) -> None:
        together.wait(10)  # only if four threads come at the same time
        done[item] += 1
        threads.add(threading.get_ident())

    cores.spread(work, range(8))
    assert done == Counter(range(8))
    assert len(threads) == 4
    assert threading.get_ident() in threads


@pytest.mark.usefixtures("four_threads")
def test_beside_as_many_others_nobody_else_is_asked() -> None:
    cores, threads = CoreShare(), set[int]()
    with cores, cores, cores, cores:
        cores.spread(lambda _: threads.add(threading.get_ident()), range(8))
    assert threads == {threading.get_ident()}


@pytest.mark.usefixtures("four_threads")
def test_what_a_thread_raises_is_raised() -> None:
    def work(item: int) -> None:
        threading.Event().wait(0.02)
        if item:
            raise ValueError(str(item))

    with pytest.raises(ValueError, match="1"):
        CoreShare().spread(work, range(2))
