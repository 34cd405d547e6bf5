"""The process of a search's trial: the rows that it tells of, verdicts, stops, and the death of its worker."""

import json
import subprocess
import sys
import time

import psutil
import pytest
from lab_process import ROOT
from search_specs import get_spec
from search_trials import FOLDER

from slm_lab.experiment import search_worker
from slm_lab.lib.files import read_json


def job_of(tmp_path, trials, reports=False):
    job = {'run_trial': f'search_trials:{trials}', 'arguments': {'spec': get_spec(), 'index': 0}, 'reports': reports}
    places = ('result_path', 'verdict_path', 'log_path', 'output_path')
    return {**job, **{place: str(tmp_path / place) for place in places}}


def start_process(tmp_path, trials, reports=False):
    return search_worker.TrialProcess(job_of(tmp_path, trials, reports))


def last_news(process, verdict_at=None, path=None):
    frames = []
    until = time.monotonic() + 60
    while time.monotonic() < until:
        news = process.next()
        if news.get('done'):
            return news, frames
        if news and news['frame'] not in frames:
            frames.append(news['frame'])
        if verdict_at is not None and news and news['frame'] == verdict_at:
            path.touch()
    raise AssertionError('it never ended')


@pytest.fixture
def search_path(monkeypatch):
    monkeypatch.setenv('PYTHONPATH', FOLDER)


def test_a_trial_waits_at_each_row_and_stops_at_its_verdict(search_path, tmp_path):
    news, frames = last_news(start_process(tmp_path, 'climb', True), 300, tmp_path / 'verdict_path')
    assert news == {'done': True, 'died': None} and frames == [100, 200, 300]
    assert read_json(tmp_path / 'result_path')['status'] == 'stopped by the scheduler'
    assert read_json(tmp_path / 'result_path')['frame'] == 300
    assert not (tmp_path / 'output_path').exists()  # it printed nothing


def test_an_interrupted_trial_leaves_no_result_and_no_process(search_path, tmp_path):
    process = start_process(tmp_path, 'wait')
    assert process.next() == {}
    process.end()
    assert process.process.returncode == 0 and not (tmp_path / 'result_path').exists()


def test_a_trial_stops_when_its_worker_is_killed(search_path, tmp_path):
    """As when the driver is killed with -9, which takes Ray with it."""
    code = f"""
import json, sys, time
sys.path.insert(0, {str(ROOT)!r})
from slm_lab.experiment.search_worker import TrialProcess
process = TrialProcess(json.loads({json.dumps(json.dumps(job_of(tmp_path, 'wait')))}))
process.next()
print(process.process.pid, flush=True)
time.sleep(60)
"""
    worker = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, text=True)
    trial = psutil.Process(int(worker.stdout.readline()))
    worker.kill()
    worker.wait()
    worker.stdout.close()
    assert not psutil.wait_procs([trial], timeout=20)[1]
