"""Fixed sequences of operations through the oracle of `test_state_machine`; the mutants are run against these."""

from __future__ import annotations

import copy

import pytest
import torch
from test_state_machine import KINDS, Machine

PADS = [3, 0, 5]


def machine(kind: str, batch: int = 3) -> Machine:
    subject = type("Subject", (Machine,), {"kind": kind})()
    subject.start(seed=7, batch=batch)
    return subject


def prompt(subject: Machine, n: int = 14, pads: list[int] | None = None) -> None:
    subject.feed(n, PADS[: subject.batch] if pads is None else pads)
    subject.positions_agree()


def decode(subject: Machine, steps: int = 8) -> None:
    for _ in range(steps):
        subject.decode()
        subject.positions_agree()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pads", [[0, 0, 0], PADS], ids=["even", "padded"])
def test_prompt_then_decode(kind: str, pads: list[int]) -> None:
    subject = machine(kind)
    prompt(subject, pads=pads)
    decode(subject, 12)


@pytest.mark.parametrize("kind", KINDS)
def test_short_prompt_grows_past_the_budget(kind: str) -> None:
    subject = machine(kind)
    prompt(subject, 6)
    decode(subject, 12)


@pytest.mark.parametrize("kind", KINDS)
def test_second_turn(kind: str) -> None:
    subject = machine(kind)
    prompt(subject)
    decode(subject, 5)
    prompt(subject, 11, [0, 0, 0])
    prompt(subject, 20, [0, 0, 0])
    decode(subject, 5)


@pytest.mark.parametrize("kind", KINDS)
def test_beams(kind: str) -> None:
    subject = machine(kind)
    prompt(subject)
    for order in ([2, 2, 0], [1, 0, 1], [0, 0, 0]):
        decode(subject, 2)
        subject.cache.reorder_cache(torch.tensor(order))
        rows = subject.oracle.rows
        subject.oracle.rows = [copy.deepcopy(rows[i]) for i in order]
        subject.positions_agree()
    decode(subject, 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rejected", [1, 2, 4])
def test_drafts_are_rolled_back(kind: str, rejected: int) -> None:
    subject = machine(kind)
    subject.record()
    prompt(subject)
    subject.crop(2)
    subject.positions_agree()
    for _ in range(4):
        subject.feed(5, [0, 0, 0])
        subject.crop(rejected)
        subject.positions_agree()
        subject.feed(5, [0, 0, 0])
    decode(subject, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_crop_without_recording_is_exact_or_refused(kind: str) -> None:
    subject = machine(kind)
    prompt(subject, 6)
    subject.crop(1)
    decode(subject, 2)
    subject.crop(3)
    subject.positions_agree()
    decode(subject, 8)
    subject.crop(2)
    subject.positions_agree()
    decode(subject, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_reset_copy_and_file(kind: str) -> None:
    subject = machine(kind)
    prompt(subject)
    subject.deepcopy()
    decode(subject, 3)
    subject.save_and_load()
    decode(subject, 3)
    subject.reset(2)
    prompt(subject, 9, [0, 2])
    subject.repeat()
    decode(subject, 3)
