"""Clock of the engines: wall time, or CPU time of the process if the environment has ``BENCH_CLOCK=cpu``.

With one thread CPU time hardly depends on other programs that want the same core; with more, engines whose threads wait
in loops count that, too.
"""

import os
import time

now = time.process_time if os.environ.get("BENCH_CLOCK") == "cpu" else time.perf_counter
