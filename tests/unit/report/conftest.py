"""The browser that looks at pages is the benchmarks', which are not installed: imported from the repository's root."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
