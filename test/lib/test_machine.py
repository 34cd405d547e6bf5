"""What there is of memory: on the machine, below the limits of containers, and below the process's own."""

import resource

import psutil
import pytest

from slm_lab.lib.machine import GB, Available, available, cgroup_left, size


@pytest.mark.parametrize(
    ('num_bytes', 'text'),
    [(7.056e9, '7.06 GB'), (1e9, '1 GB'), (5.2e5, '520 kB'), (3.5e8, '350 MB'), (1.2e12, '1,200 GB')],
)
def test_sizes_are_readable(num_bytes, text):
    assert size(num_bytes) == text


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


V2 = 'sys/fs/cgroup'


def test_the_limit_of_a_container_less_its_use_but_for_caches(tmp_path):
    files = {
        'proc/self/cgroup': '0::/\n',
        f'{V2}/memory.max': '4000000000\n',
        f'{V2}/memory.current': '3000000000\n',
        f'{V2}/memory.stat': 'anon 2400000000\ninactive_file 400000000\nactive_file 100000000\n',
    }
    write(tmp_path, files)
    assert cgroup_left(tmp_path) == 1_500_000_000
    write(tmp_path, {f'{V2}/memory.max': 'max\n'})
    assert cgroup_left(tmp_path) is None


def test_the_tightest_of_the_groups_above_holds(tmp_path):
    write(tmp_path, {'proc/self/cgroup': '0::/user.slice/job.scope\n'})
    for folder, limit in (('user.slice', '900'), ('user.slice/job.scope', '5000')):
        names = {'memory.max': limit, 'memory.current': '100', 'memory.stat': 'anon 100'}
        write(tmp_path, {f'{V2}/{folder}/{name}': text for name, text in names.items()})
    assert cgroup_left(tmp_path) == 800


@pytest.mark.parametrize('folder', ['docker/ab12', ''])
def test_version_1_with_the_path_of_the_host_or_of_the_container(tmp_path, folder):
    v1 = f'sys/fs/cgroup/memory/{folder}'
    write(
        tmp_path,
        {
            'proc/self/cgroup': '5:cpu,cpuacct:/docker/ab12\n4:memory:/docker/ab12\n1:name=systemd:/x:y\n0::/\n',
            f'{v1}/memory.limit_in_bytes': '2000\n',
            f'{v1}/memory.usage_in_bytes': '1500\n',
            f'{v1}/memory.stat': 'inactive_file 7\ntotal_inactive_file 200\ntotal_active_file 50\n',
        },
    )
    assert cgroup_left(tmp_path) == 750


def test_without_control_groups_the_machine_alone_counts(tmp_path, monkeypatch):
    assert cgroup_left(tmp_path) is None
    rss = set_free(monkeypatch, 5 * GB)
    assert available(tmp_path) == Available(5 * GB + rss, 'on this machine')


def set_free(monkeypatch, num_bytes):
    """Lets the machine have so much. Returns: RSS of this process"""
    held = psutil.Process().memory_info()
    there = psutil.virtual_memory()._replace(available=num_bytes)
    monkeypatch.setattr(psutil, 'virtual_memory', lambda: there)
    monkeypatch.setattr(psutil.Process, 'memory_info', lambda self: held)
    return held.rss


def test_a_container_counts_where_it_has_less_than_the_machine(tmp_path, monkeypatch):
    rss = set_free(monkeypatch, 5 * GB)
    files = {'memory.max': str(2 * GB), 'memory.current': str(GB), 'memory.stat': ''}
    write(tmp_path, {'proc/self/cgroup': '0::/\n', **{f'{V2}/{name}': text for name, text in files.items()}})
    there = available(tmp_path)
    assert there.num_bytes == GB + rss
    assert 'container' in there.place


def test_what_a_process_may_map_by_its_own_limit(tmp_path, monkeypatch):
    held = psutil.Process().memory_info()
    monkeypatch.setattr(psutil.Process, 'memory_info', lambda self: held)
    monkeypatch.setattr(resource, 'getrlimit', lambda what: (held.vms + 3 * GB, resource.RLIM_INFINITY))
    assert available(tmp_path).address_space == 3 * GB
    monkeypatch.setattr(resource, 'getrlimit', lambda what: (resource.RLIM_INFINITY,) * 2)
    assert available(tmp_path).address_space is None
