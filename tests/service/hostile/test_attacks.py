"""Attacks on the port of a whole service: they cost whoever makes them, and a bystander notices nothing.

No time is asserted here; `make bench ARGS=attacks` prints how long a bystander waits.
"""

from __future__ import annotations

import threading

import pytest

from runahead.service.processes.children import FRONT_END_MODULE
from tests.service.hostile.attacked import PATIENCE_S, Attacked
from tests.service.hostile.attacks import ATTACKS
from tests.service.service_processes import running

GROWTH_MIB = 96  # of a front end over one attack: what its allocators keep; the attacks bring far more


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_costs_a_bystander_nothing_and_what_it_took_comes_back(attacked: Attacked, name: str) -> None:
    descriptors, resident_mib, figures = attacked.descriptors, attacked.resident_mib, attacked.figures()
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        go_on.wait(PATIENCE_S)

    def attack() -> None:
        ATTACKS[name].round(attacked.port, hold)
        ended.set()

    attacker = threading.Thread(target=attack)
    attacker.start()
    try:
        attacked.bystander.first_tokens_s(5)  # while it is made
        while not begun.wait(0.01):
            assert attacker.is_alive(), "it did not come to its end"
        attacked.wait_until(ATTACKS[name].does, since=figures)
        attacked.bystander.first_tokens_s(5)  # while what it has opened is open
    finally:
        go_on.set()
        attacker.join()
    assert ended.is_set(), "it was made, to its end, and answered as it should be"
    attacked.wait_for_descriptors(descriptors)
    assert running(attacked.service, FRONT_END_MODULE) == [attacked.front_end], "it lives, and was never another"
    assert attacked.resident_mib - resident_mib < GROWTH_MIB
