"""What front ends share: figures in memory, each line with one writer."""

from __future__ import annotations

import subprocess
import sys
import tempfile

from runahead.service.board import Board, FrontEndCounters

OTHER = """
import sys
from runahead.service.board import Board
line = Board(2, int(sys.argv[1])).line(1)
line.refused += 5
line.open_streams = 3
line.front_ends = 1
"""


def test_another_process_s_figures_are_added_up_and_what_it_had_open_goes_with_it() -> None:
    with tempfile.TemporaryFile() as memory:
        memory.truncate(Board.size(2))
        board = Board(2, memory.fileno())
        line = board.line(0)
        line.refused, line.open_streams, line.front_ends, line.cancelled = 2, 1, 1, 1 << 40
        other = [sys.executable, "-c", OTHER, str(memory.fileno())]
        subprocess.run(other, pass_fds=(memory.fileno(),), check=True, timeout=60)
        assert board.total() == FrontEndCounters(open_streams=4, refused=7, front_ends=2, cancelled=1 << 40)
        board.clear(1)
        assert board.total() == FrontEndCounters(open_streams=1, refused=7, front_ends=1, cancelled=1 << 40)
        assert Board(2, memory.fileno()).line(1).refused == 5, "whoever is started in its place goes on from there"


def test_a_board_of_one_process_needs_no_file() -> None:
    board = Board()
    board.line(0).stop_strings += 1
    assert board.total() == FrontEndCounters(stop_strings=1)
    assert Board().total() == FrontEndCounters()
