import logging
import struct
import subprocess
import sys

import pytest

from slm_lab.lib import viz

# kaleido's own: it leaves a pipe to the garbage collector, and calls a thread method of long ago
pytestmark = pytest.mark.filterwarnings('ignore::DeprecationWarning', 'ignore::ResourceWarning')


@pytest.fixture(autouse=True)
def png_not_failed(monkeypatch):
    monkeypatch.setattr(viz, '_png_failed', False)


def figure(title='a title'):
    return viz.line_figure([0, 10, 20], [float('nan'), 1.0, 3.0], 'frames', 'strengths', title)


def test_a_figure_has_its_titles_and_leaves_out_what_is_not_finite():
    drawn = figure().to_dict()
    layout = drawn['layout']
    assert layout['title']['text'] == 'a title'
    assert layout['xaxis']['title']['text'] == 'frames' and layout['yaxis']['title']['text'] == 'strengths'
    assert layout['yaxis']['rangemode'] == 'tozero' and layout['legend']['orientation'] == 'h'
    assert list(drawn['data'][0]['x']) == [10, 20] and list(drawn['data'][0]['y']) == [1.0, 3.0]


def test_the_band_is_one_std_to_each_side_of_the_mean():
    band, line = viz.mean_figure([0, 10], [5.0, 6.0], [1.0, 2.0], 'frames', 'mean_returns', 't').data
    assert list(band.x) == [0, 10, 10, 0] and list(band.y) == [6.0, 8.0, 4.0, 4.0]
    assert band.fillcolor == 'rgba(102,194,165,0.15)' and line.line.color == 'rgb(102,194,165)'
    assert list(line.x) == [0, 10] and list(line.y) == [5.0, 6.0]


def test_no_band_where_there_is_no_std():
    (line,) = viz.mean_figure([0, 10], [5.0, 6.0], [float('nan')] * 2, 'frames', 'mean_returns', 't').data
    assert list(line.y) == [5.0, 6.0]


def test_html_files_share_one_plotlyjs(tmp_path, monkeypatch):
    monkeypatch.setattr(viz, '_render', lambda figure, path: None)
    viz.save_image(figure(), tmp_path / 'graph' / 'a.b_vs_frames')
    written_at = (tmp_path / 'graph' / 'plotly.min.js').stat().st_mtime_ns
    viz.save_image(figure(), tmp_path / 'graph' / 'c')
    names = sorted(path.name for path in (tmp_path / 'graph').iterdir())
    assert names == ['a.b_vs_frames.html', 'c.html', 'plotly.min.js']
    assert (tmp_path / 'graph' / 'plotly.min.js').stat().st_mtime_ns == written_at
    for name in ('a.b_vs_frames.html', 'c.html'):
        html = (tmp_path / 'graph' / name).read_text()
        assert html.count('src="plotly.min.js"') == 1 and len(html) < 50_000


def test_png_of_500_pixels_at_scale_2(tmp_path):
    pytest.importorskip('kaleido.scopes.plotly')
    png = viz.save_image(figure(), tmp_path / 'graph' / 'a')
    assert (tmp_path / 'graph' / 'a.png').read_bytes() == png
    assert png[:8] == b'\x89PNG\r\n\x1a\n' and struct.unpack('>II', png[16:24]) == (1000, 1000)


def test_images_drawn_together_share_one_process_which_ends(tmp_path, monkeypatch):
    pytest.importorskip('kaleido.scopes.plotly')
    scopes = []
    make_scope = viz._make_scope
    monkeypatch.setattr(viz, '_make_scope', lambda: scopes.append(make_scope()) or scopes[-1])
    with viz.rendering():
        viz.save_image(figure(), tmp_path / 'a')
        process = scopes[0]._proc
        viz.save_image(figure(), tmp_path / 'b')
        assert scopes[0]._proc is process
    assert len(scopes) == 1 and process.poll() is not None
    assert (tmp_path / 'b.png').is_file()


def test_without_kaleido_there_is_html_and_one_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, 'kaleido.scopes.plotly', None)
    with caplog.at_level(logging.WARNING):
        assert viz.save_image(figure(), tmp_path / 'run' / 'graph' / 'a') is None
        assert viz.save_image(figure(), tmp_path / 'run' / 'graph' / 'b') is None
    assert (tmp_path / 'run' / 'graph' / 'a.html').is_file() and (tmp_path / 'run' / 'graph' / 'b.html').is_file()
    assert not list((tmp_path / 'run' / 'graph').glob('*.png'))
    (record,) = caplog.records
    assert f'python -m slm_lab.experiment.retro_analysis {tmp_path / "run"}' in record.getMessage()


def test_a_renderer_that_hangs_is_ended(tmp_path, monkeypatch, caplog):
    base = pytest.importorskip('kaleido.scopes.base')
    script = tmp_path / 'kaleido'
    script.write_text('#!/bin/sh\nsleep 60 &\nwait\n')  # a shell that waits for a child, as kaleido's own is
    script.chmod(0o755)
    monkeypatch.setattr(base.BaseScope, 'executable_path', classmethod(lambda cls: str(script)))
    monkeypatch.setattr(viz, 'FIRST_IMAGE_TIMEOUT', 0.3)
    assert viz.save_image(figure(), tmp_path / 'graph' / 'a') is None
    assert (tmp_path / 'graph' / 'a.html').is_file()
    assert 'did not answer within 0.3 s' in caplog.text


def test_a_renderer_that_crashes_is_one_warning(tmp_path, monkeypatch, caplog):
    base = pytest.importorskip('kaleido.scopes.base')
    monkeypatch.setattr(base.BaseScope, 'executable_path', classmethod(lambda cls: '/bin/false'))
    for name in ('a', 'b'):
        assert viz.save_image(figure(), tmp_path / name) is None
    assert len(caplog.records) == 1 and 'Failed to start Kaleido' in caplog.text


def test_importing_viz_does_not_import_plotly():
    code = 'import sys, slm_lab.lib.viz; sys.exit("plotly" in sys.modules or "kaleido" in sys.modules)'
    assert subprocess.run([sys.executable, '-c', code], check=False).returncode == 0
