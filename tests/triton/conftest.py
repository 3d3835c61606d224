"""Makes tests/triton/interpreting.py and tests/step_making.py importable."""

import sys
from pathlib import Path

for _folder in (Path(__file__).parents[1], Path(__file__).parent):
    sys.path.insert(0, str(_folder))
