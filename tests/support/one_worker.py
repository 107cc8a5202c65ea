"""A worker process of `workers.WorkerPool`: python -m tests.support.one_worker STACK_FILE"""

import sys

from tests.support import worker_side

worker_side.worker_main(sys.argv[1])
