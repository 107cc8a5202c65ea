"""A worker process of `workers.WorkerPool`: python one_worker.py STACK_FILE"""

import sys

import worker_side

worker_side.worker_main(sys.argv[1])
