"""Whether and when kernels let the next ones start changes no bit, over the borders of graphs too."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.gpu import dependent_launch_forms as forms

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def test_dependent_launch_off_late_early_and_behind_slow_kernels_gives_the_same_bits() -> None:
    running = {
        form: subprocess.Popen(
            [sys.executable, "-m", forms.__name__, form], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for form in forms.FORMS
    }
    said = {form: process.communicate() for form, process in running.items()}
    for form, process in running.items():
        assert process.returncode == 0, f"{form}: {said[form][1][-2000:]}"
    of_form = {form: out.splitlines() for form, (out, _) in said.items()}
    assert of_form["off"][0].split()[0] == "modules" and int(of_form["off"][0].split()[1]) >= 4
    assert [line.split()[0] for line in of_form["off"][1:]] == [str(rows) for rows in forms.ROWS]
    for form in forms.FORMS:
        assert of_form[form] == of_form["off"], f"{form} has other bits than kernels one after the other"
