"""What this process may use of the machine: its CPUs and its memory. MB and GB are 10**6 and 10**9 bytes."""

import os
import resource
from dataclasses import dataclass
from pathlib import Path

import psutil

MB, GB = 10**6, 10**9


def count_cpus():
    """The CPUs that this process may use: a queue or a container may grant fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


def size(num_bytes):
    """E.g. 7.06 GB, 350 MB, 12 kB; from 1000 GB on 1,200 GB."""
    if num_bytes >= 999.5 * GB:
        return f'{num_bytes / GB:,.0f} GB'
    if num_bytes >= GB:
        return f'{num_bytes / GB:.3g} GB'
    return f'{num_bytes / MB:.0f} MB' if num_bytes >= MB else f'{num_bytes / 1000:.0f} kB'


@dataclass(frozen=True)
class Available:
    """What there is.

    Args:
        num_bytes: that processes can fill, with what this one holds already
        place: what sets this limit
        address_space: bytes that a process may still map (`ulimit -v`); None: any number
    """

    num_bytes: int
    place: str = 'on this machine'
    address_space: int | None = None


def available(root='/'):
    """Returns: Available, with what this process holds already, for an estimate counts it.

    Args:
        root: of the file system
    """
    process = psutil.Process()
    held = process.memory_info()
    found = [Available(psutil.virtual_memory().available + held.rss)]
    left = cgroup_left(root)
    if left is not None:
        found.append(Available(left + held.rss, 'below the limit of this container (cgroup)'))
    least = min(found, key=lambda a: a.num_bytes)
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    address_space = None if limit == resource.RLIM_INFINITY else max(0, limit - held.vms)
    return Available(least.num_bytes, least.place, address_space)


# by version: the file of the limit, of the use, and what in memory.stat is a cache that gives way
_CGROUP_FILES = {
    2: ('memory.max', 'memory.current', ('inactive_file', 'active_file')),
    1: ('memory.limit_in_bytes', 'memory.usage_in_bytes', ('total_inactive_file', 'total_active_file')),
}


def cgroup_left(root='/'):
    """Bytes that the memory limits of this process's control groups leave it, None where there are none.

    Each group above it may set a limit too. In a container the path of the group may be the host's, of which only the
    last part is there, at the top.
    """
    root = Path(root)
    try:
        lines = (root / 'proc/self/cgroup').read_text().splitlines()
    except OSError:
        return None
    found = []
    for line in lines:
        _, controllers, path = line.split(':', 2)
        if controllers and 'memory' not in controllers.split(','):
            continue
        version, mount = (1, 'sys/fs/cgroup/memory') if controllers else (2, 'sys/fs/cgroup')
        group = Path(path.lstrip('/'))
        found += [_left_in(root / mount / g, *_CGROUP_FILES[version]) for g in (group, *group.parents)]
    found = [left for left in found if left is not None]
    return min(found) if found else None


def _left_in(folder, limit_file, usage_file, cache_names):
    try:
        limit = (folder / limit_file).read_text().strip()
        if limit == 'max':
            return None
        usage = int((folder / usage_file).read_text())
        stat = dict(line.split() for line in (folder / 'memory.stat').read_text().splitlines())
    except OSError:
        return None
    return max(0, int(limit) - usage + sum(int(stat.get(name, 0)) for name in cache_names))
