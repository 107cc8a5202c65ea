"""A worker process of `workers.WorkerPool`: python one_worker.py STACK_FILE"""

import sys

import workers

workers.worker_main(sys.argv[1])
