"""What the command's exit status means."""

import signal

DONE = 0
FAILED = 1
WRONG = 2  # configuration or usage, before anything has started
INTERRUPTED = 75  # and resumable: requeue me

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # end a run at the next safe point, with a checkpoint
