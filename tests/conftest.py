"""For all tests: what hypothesis draws is the same in every run, unless the environment has TPUEMBED_RANDOM_EXAMPLES.

A suite that is red once in a hundred runs is one that nobody believes; new examples are drawn where somebody looks at them.
Hypothesis also draws constants that it finds in our modules. So other tests beside a test, or other code, may change its examples.
"""

import os

from hypothesis import settings

settings.register_profile("same examples", derandomize=True)
if "TPUEMBED_RANDOM_EXAMPLES" not in os.environ:
    settings.load_profile("same examples")
