"""TensorBoard's files of `dev`, read back by their format: records of a length, a checksum, an event, a checksum."""

import struct

import numpy as np
import pytest
from resume import StopAt, build, raw_spec, run_to, session_spec
from tensorboardX.proto.event_pb2 import Event, SessionLog

from slm_lab.experiment import resume
from slm_lab.experiment.event_files import EventFiles


@pytest.fixture(autouse=True)
def _no_screen(monkeypatch):
    monkeypatch.setenv('RENDER', 'false')


def event_paths(folder):
    return sorted(folder.rglob('events.out.tfevents.*'), key=lambda path: path.stat().st_mtime_ns)


def read_events(path):
    content, events = path.read_bytes(), []
    while content:
        (length,) = struct.unpack('<Q', content[:8])
        events.append(Event.FromString(content[12 : 12 + length]))
        content = content[16 + length :]
    return events


def scalars(events):
    """{name: {frame: value}}"""
    found = {}
    for event in events:
        for value in event.summary.value:
            if value.WhichOneof('value') == 'simple_value':
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found


def histograms(events):
    """{name: {frame: histogram}}"""
    found = {}
    for event in events:
        for value in event.summary.value:
            if value.WhichOneof('value') == 'histo':
                found.setdefault(value.tag, {})[event.step] = value.histo
    return found


def dev_spec(tmp_path):
    return session_spec(tmp_path, raw_spec('DQN', meta={'log_frequency': 100}))


def test_the_rows_of_dev_are_in_its_event_file(tmp_path):
    rows = run_to(dev_spec(tmp_path), mode='dev')['train_df']
    (path,) = event_paths(tmp_path)
    assert path.parent.name == 'log'
    found = scalars(read_events(path))
    assert sorted(found) == sorted(f'train/{key}' for key in rows if rows[key].notna().any())
    for key in rows:
        values = rows.set_index('frame', drop=False)[key].dropna()
        assert found.get(f'train/{key}', {}) == pytest.approx(values.to_dict(), rel=1e-6)


def test_trained_nets_and_actions_are_in_it(tmp_path):
    session = run_to(dev_spec(tmp_path), mode='dev')
    found = histograms(read_events(*event_paths(tmp_path)))
    trained = [name for name in session['tree']['agent']['algorithm']['nets'] if not name.startswith('target_')]
    assert {name.split('/')[0] for name in found} == {'actions', *trained}
    frames = list(session['train_df']['frame'])
    taken = found.pop('actions')
    assert [taken[frame].num for frame in frames[1:]] == list(np.diff(frames))  # one env, one action a frame
    assert all(sorted(values) == frames for values in found.values())


def test_a_run_that_goes_on_hides_what_was_written_past_its_checkpoint(tmp_path):
    spec = dev_spec(tmp_path)
    run_to(spec, StopAt(150), mode='dev')
    session = build(spec, mode='dev')
    resume.restore_session(session)
    session.run()
    session.close()
    first, second = event_paths(tmp_path)
    assert sorted(scalars(read_events(first))['train/frame']) == [0, 100]
    starts = [event.step for event in read_events(second) if event.session_log.status == SessionLog.START]
    assert starts == [200] and min(scalars(read_events(second))['train/frame']) == 200


def test_only_dev_writes_them(tmp_path):
    run_to(dev_spec(tmp_path))
    assert event_paths(tmp_path) == []


def test_what_is_not_finite_is_left_out(tmp_path):
    class Net:
        def named_parameters(self):
            return [('weight', Weights())]

    class Weights:
        def numpy(self, force):
            return np.array([1.0, np.nan])

    events = EventFiles(tmp_path)
    events.add_row('train', {'frame': 5, 'loss': np.nan, 'lr': 0.5}, {'net': Net()})
    events.close()
    written = read_events(*event_paths(tmp_path))
    assert scalars(written) == {'train/frame': {5: 5.0}, 'train/lr': {5: 0.5}} and histograms(written) == {}
