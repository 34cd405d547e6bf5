"""What this process may use of the machine."""

import os


def count_cpus():
    """The CPUs that this process may use: a queue or a container may grant fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
