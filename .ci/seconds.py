"""Seconds of the slowest files of tests, from a folder of JUnit's XML: `python .ci/seconds.py .ci/reports`."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

SHOWN = 30  # files


def main(folder: Path) -> None:
    seconds, cases = Counter[str](), Counter[str]()
    for report in sorted(folder.glob("*.xml")):
        for case in ElementTree.parse(report).iter("testcase"):
            file = f"{report.stem}: {case.get('classname', '').replace('.', '/')}"
            seconds[file] += float(case.get("time", 0))
            cases[file] += 1
    for file, total in seconds.most_common(SHOWN):
        print(f"{total:7.1f} s  {cases[file]:5} tests  {file}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
