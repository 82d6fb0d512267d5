"""The service that all of these tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.local_service import local_service
from runahead.service.processes.children import FRONT_END_MODULE
from tests.service.hostile.attacked import FLAGS, Attacked
from tests.service.hostile.bystander import Bystander
from tests.service.service_processes import running


@pytest.fixture(scope="session")
def attacked() -> Iterator[Attacked]:
    with local_service(FLAGS) as service:
        (front_end,) = running(service, FRONT_END_MODULE)
        with Bystander(service.url) as bystander:
            bystander.first_tokens_s(20)
            yield Attacked(service, front_end, bystander)
