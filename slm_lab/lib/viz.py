"""Graphs as interactive HTML and as PNG. plotly is imported when the first figure is drawn."""

import contextlib
import importlib.util
import logging
import math
import re
import threading
from pathlib import Path

from slm_lab.lib.errors import LabError
from slm_lab.lib.files import write_atomic

SIZE, SCALE = 500, 2  # pixels, and how many of the PNG's make one of them
FIRST_IMAGE_TIMEOUT, IMAGE_TIMEOUT = 60, 30  # seconds; the first one includes starting the renderer

_logger = logging.getLogger(__name__)
_renderer = None  # the one that runs, inside `rendering()`
_png_failed = False  # once PNGs have failed this process tries no more


def line_figure(x, y, x_title, y_title, title):
    """A figure of one line; points that are not finite are left out."""
    figure = _figure(x_title, y_title, title)
    x, y = _finite_points(x, y)
    figure.add_scatter(x=x, y=y, mode='lines', line={'width': 1.5, 'color': _color(0)}, showlegend=False)
    return figure


def mean_figure(x, mean, std, x_title, y_title, title):
    """A figure of a mean line in a band of one standard deviation to each side (no band where std is not finite)."""
    figure = _figure(x_title, y_title, title)
    _add_band(figure, x, mean, std, 0, name='±1 std')
    x, mean = _finite_points(x, mean)
    figure.add_scatter(x=x, y=mean, mode='lines', line={'width': 1.5, 'color': _color(0)}, name='mean')
    return figure


def _add_band(figure, x, mean, std, color_index, name=None):
    """Without a name the band is not in the legend."""
    points = [(a, m, s) for a, m, s in zip(x, mean, std, strict=False) if _is_finite(m) and _is_finite(s)]
    if not points:
        return
    band_x = [a for a, _, _ in points]
    upper, lower = [m + s for _, m, s in points], [m - s for _, m, s in points]
    figure.add_scatter(
        x=band_x + band_x[::-1],
        y=upper + lower[::-1],
        fill='toself',
        fillcolor=_color(color_index).replace('rgb', 'rgba').replace(')', ',0.15)'),
        line={'color': 'rgba(0,0,0,0)'},
        hoverinfo='skip',
        name=name,
        showlegend=name is not None,
    )


def means_figure(lines, x_title, y_title, title):
    """A figure of several mean lines, each in its band and with its own colour.

    Args:
        lines: [(label, x, mean, std)]
    """
    figure = _figure(x_title, y_title, title)
    for i, (label, x, mean, std) in enumerate(lines):
        _add_band(figure, x, mean, std, i)
        x, mean = _finite_points(x, mean)
        figure.add_scatter(x=x, y=mean, mode='lines', line={'width': 1.5, 'color': _color(i)}, name=label)
    return figure


def grid_figure(columns, rows, color, title):
    """A grid of scatter plots: a row for each of `rows` over a column for each of `columns`, a point for each trial.

    Args:
        columns: {title: values, numbers or texts}
        rows: {title: numbers}
        color: numbers that points are coloured by, dark for large ones
    """
    from plotly.subplots import make_subplots

    figure = make_subplots(
        rows=len(rows), cols=len(columns), shared_yaxes=True, vertical_spacing=0.2 / len(rows), horizontal_spacing=0.04
    )
    finite = [value for value in color if _is_finite(value)] or [0.0]
    low, high = min(finite), max(finite)
    scale = {'colorscale': 'YlGnBu', 'cmin': low - 0.5 * (high - low), 'cmax': high if high > low else low + 1}
    for j, (x_title, x) in enumerate(columns.items(), start=1):
        for i, (y_title, y) in enumerate(rows.items(), start=1):
            points = [(a, b, c) for a, b, c in zip(x, y, color, strict=True) if _is_finite(b) and _is_finite(c)]
            a, b, c = zip(*points, strict=True) if points else ((), (), ())
            figure.add_scatter(
                x=a, y=b, mode='markers', marker={'color': c, 'size': 8, **scale}, showlegend=False, row=i, col=j
            )
            if j == 1:
                figure.update_yaxes(title_text=y_title, row=i, col=j)
            if any(isinstance(value, str) for value in x):
                figure.update_xaxes(type='category', row=i, col=j)
        figure.update_xaxes(title_text=_wrapped(x_title), row=len(rows), col=j)
    figure.update_layout(
        template='none',
        title={'text': title, 'font': {'size': 14}},
        width=100 + 300 * len(columns),
        height=200 + 300 * len(rows),
        margin={'l': 80, 'r': 30, 't': 60, 'b': 100},
    )
    return figure


def _wrapped(text, width=20):
    """Lines of a dotted place, parted before dots."""
    lines = ['']
    for part in re.findall(r'\.?[^.]+', text):
        if lines[-1] and len(lines[-1] + part) > width:
            lines.append('')
        lines[-1] += part
    return '<br>'.join(lines)


@contextlib.contextmanager
def rendering():
    """All PNGs drawn inside share one renderer: starting it takes about a second, an image about 0.05."""
    global _renderer
    if _renderer is not None:
        yield
        return
    _renderer = _Renderer()
    try:
        yield
    finally:
        _renderer.stop()
        _renderer = None


def save_image(figure, path):
    """Writes `{path}.html`, and `{path}.png` if the renderer works; its failing is one warning per process.

    Args:
        figure: a plotly figure
        path: without suffix; `plotly.min.js`, which all HTML files of a folder share, is written beside it once
    Returns: the PNG as bytes, or None where there is none.
    Raises: OSError when the folder cannot be written.
    """
    import plotly.io

    path = Path(path)
    html = plotly.io.to_html(figure, include_plotlyjs='directory', validate=False)
    _write_plotlyjs(path.parent)
    write_atomic(_with_suffix(path, '.html'), html.encode('utf-8'))
    with rendering():
        png = _render(figure, path)
    if png is not None:
        write_atomic(_with_suffix(path, '.png'), png)
    return png


def _with_suffix(path, suffix):
    return path.with_name(path.name + suffix)  # names hold dots of their own


def _write_plotlyjs(folder):
    path = folder / 'plotly.min.js'
    if not path.exists():
        import plotly.offline

        write_atomic(path, plotly.offline.get_plotlyjs().encode('utf-8'))


def _render(figure, path):
    global _png_failed
    if _png_failed:
        return None
    try:
        return _renderer.png(figure)
    except Exception as e:  # whatever goes wrong with a picture, the run it shows goes on
        _png_failed = True
        reason = str(e).strip().splitlines()
        _logger.warning(
            'no PNG graphs from here on (%s: %s); the HTML ones are in %s. To draw them later: '
            'python -m slm_lab.experiment.retro_analysis %s',
            type(e).__name__,
            reason[0] if reason else 'no reason given',
            path.parent,
            path.parent.parent,
        )
        return None


class _Renderer:
    """kaleido's process, started by the first image. A watchdog ends it when an image takes too long."""

    def __init__(self):
        self._scope = None

    def png(self, figure):
        timeout = IMAGE_TIMEOUT if self._scope else FIRST_IMAGE_TIMEOUT
        if self._scope is None:
            self._scope = _make_scope()
        timed_out = threading.Event()
        watchdog = threading.Timer(timeout, self._kill, [timed_out])
        watchdog.daemon = True
        watchdog.start()
        try:
            layout = figure.layout
            return self._scope.transform(figure, format='png', width=layout.width, height=layout.height, scale=SCALE)
        except Exception as e:
            if timed_out.is_set():
                raise TimeoutError(f'the renderer did not answer within {timeout} s') from e
            raise
        finally:
            watchdog.cancel()

    def stop(self):
        process = self._scope and self._scope._proc
        if process is None:
            return
        self._scope._shutdown_kaleido()
        with contextlib.suppress(OSError):  # a pipe may be broken, and has to be closed even so
            process.stdin.close()
        process.stdout.close()

    def _kill(self, timed_out):
        import psutil

        timed_out.set()
        process = self._scope._proc
        if process is None:
            return
        # the browser is a child of the shell script that kaleido starts
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
        process.kill()


def _make_scope():
    import plotly

    try:
        from kaleido.scopes.plotly import PlotlyScope
    except ImportError as e:
        if importlib.util.find_spec('kaleido') is None:
            raise LabError('kaleido is not installed') from e
        raise LabError('this kaleido needs a browser; install kaleido==0.2.1') from e
    # plotly's own plotly.js: without it kaleido would fetch one from the network
    return PlotlyScope(plotlyjs=str(Path(plotly.__file__).parent / 'package_data' / 'plotly.min.js'))


def _figure(x_title, y_title, title):
    import plotly.graph_objects as go

    return go.Figure(
        layout={
            'template': 'none',
            'title': {'text': title, 'font': {'size': 14}},
            'xaxis': {'title': {'text': x_title}, 'automargin': True},
            'yaxis': {'title': {'text': y_title}, 'rangemode': 'tozero', 'automargin': True},
            'legend': {'orientation': 'h', 'x': 0, 'y': -0.2},
            'width': SIZE,
            'height': SIZE,
            'margin': {'l': 60, 'r': 30, 't': 60, 'b': 60},
        }
    )


def _color(index):
    from plotly.colors import qualitative

    return qualitative.Set2[index % len(qualitative.Set2)]


def _finite_points(x, y):
    points = [(a, b) for a, b in zip(x, y, strict=False) if _is_finite(b)]
    return [a for a, _ in points], [b for _, b in points]


def _is_finite(value):
    return value is not None and math.isfinite(value)
