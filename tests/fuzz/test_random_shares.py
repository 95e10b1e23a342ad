"""Random programs with shares: the bits of one rank, or an error by name on every rank."""

from __future__ import annotations

import os

import pytest

from fuzz.shares import find_failure

SOAK = int(os.environ.get("LOCKSTEP_FUZZ_PROGRAMS", "2000"))


@pytest.mark.parametrize("seeds", [(9, 300), pytest.param((11, 27, *range(301, 312)), marks=pytest.mark.around)])
@pytest.mark.numpy
def test_short_programs_have_the_bits_of_one_rank_or_are_refused_by_name(seeds):
    for seed in seeds:
        failure = find_failure(seed)
        assert failure is None, failure


@pytest.mark.soak
@pytest.mark.parametrize("first", range(10_000, 10_000 + SOAK, 100))
def test_programs_have_the_bits_of_one_rank_or_are_refused_by_name(first):
    for seed in range(first, first + 100):
        failure = find_failure(seed)
        assert failure is None, failure
