"""The TensorBoard tab "Flow". TensorBoard imports this file for every user: standard library, numpy, tensorboard only.

Routes, below /data/plugin/flowscope/ (all take what the browser may know, the names of runs and keys, and no path):

    overview                    the runs, their flows, metrics, alerts and verdicts
    series?run=&key=            a metric over depth and steps, thinned out
    record?run=&key=&step=      the record nearest to a step, at full depth
    index.js, style.css, ...    the files of web/
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from typing import Any

from tensorboard.backend import http_util
from tensorboard.plugins import base_plugin
from werkzeug import Request

from flowscope.diagnosis import paired
from flowscope.views import assets
from flowscope.views.overview import RunView, overview_payload
from flowscope.views.pipelines import PipelineReader
from flowscope.views.room import Room
from flowscope.views.series import heat_payload, record_payload, to_json
from flowscope.views.tensors import PLUGIN_NAME, TensorReader, UnreadableError

SAMPLES = 2000
"""Records per metric that TensorBoard keeps in memory; its own default would be 10 or 100, by loader."""

App = Callable[[dict[str, Any], Any], Iterable[bytes]]

_logger = logging.getLogger("flowscope")


class FlowLoader(base_plugin.TBLoader):  # type: ignore[misc]
    """What the entry point `tensorboard_plugins` names."""

    def fix_flags(self, flags: Any) -> None:
        """Keep more records than TensorBoard's default, unless the user has said how many."""
        if isinstance(getattr(flags, "samples_per_plugin", None), dict):
            flags.samples_per_plugin.setdefault(PLUGIN_NAME, SAMPLES)

    def load(self, context: base_plugin.TBContext) -> FlowPlugin:
        """The plugin."""
        return FlowPlugin(context)


class FlowPlugin(base_plugin.TBPlugin):  # type: ignore[misc]
    """Answers the tab's requests from TensorBoard's data provider, which both of its loaders have."""

    plugin_name = PLUGIN_NAME

    def __init__(self, context: base_plugin.TBContext) -> None:
        self._reader = PipelineReader(TensorReader(context.data_provider))

    def get_plugin_apps(self) -> dict[str, App]:
        """Route -> WSGI application."""
        routes: dict[str, App] = {f"/{name}": _file(name, media_type) for name, media_type in assets.served().items()}
        routes["/overview"] = _answer(self._overview)
        routes["/series"] = _answer(self._series)
        routes["/record"] = _answer(self._record)
        return routes

    def is_active(self) -> bool:
        """False: TensorBoard itself finds out whether a run has data of this plugin."""
        return False

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        """The tab's name and its first script."""
        return base_plugin.FrontendMetadata(es_module_path="/index.js", tab_name="Flow", disable_reload=True)

    def _overview(self, request: Request) -> dict[str, Any]:
        return {"runs": [_shown(run) for run in self._reader.runs(request.environ)]}

    def _series(self, request: Request) -> dict[str, Any]:
        run, key = _argument(request, "run"), _argument(request, "key")
        series, alerts = self._reader.series(request.environ, run, key)
        return heat_payload(series, series.log, [one.since for one in paired(alerts)])

    def _record(self, request: Request) -> dict[str, Any]:
        run, key, step = (_argument(request, name) for name in ("run", "key", "step"))
        if not re.fullmatch(r"-?[0-9]{1,19}", step):
            raise UnreadableError(f"step is {step[:40]!r}; expected a whole number of at most 19 digits")
        series, _ = self._reader.series(request.environ, run, key)
        return record_payload(series, int(step), series.log)


def _shown(run: RunView) -> dict[str, Any]:
    """What the browser is told of one run: whatever is wrong with it, the others are there."""
    try:
        (shown,) = overview_payload([run])["runs"]
    except Exception as error:
        _logger.warning("the Flow tab cannot show run %r", run.name, exc_info=True)
        told = f"This run cannot be shown ({type(error).__name__}: {error})."
        (shown,) = overview_payload([RunView(run.name, notices=[told])])["runs"]
    return Room().cut(shown)


def _argument(request: Request, name: str) -> str:
    value = request.args.get(name)
    if value is None:
        raise UnreadableError(f"the request lacks {name!r}")
    return value


def _file(name: str, media_type: str) -> App:
    @Request.application
    def application(request: Request) -> Any:
        return http_util.Respond(request, assets.read(name), f"{media_type}; charset=utf-8")

    return application


def _answer(handler: Callable[[Request], dict[str, Any]]) -> App:
    """A WSGI application that answers with JSON: what the handler returns, or `{"error": reason}`."""

    @Request.application
    def application(request: Request) -> Any:
        code = 200
        try:
            payload = handler(request)
        except (UnreadableError, ValueError) as error:
            payload, code = {"error": str(error)}, 404
        except Exception as error:  # a damaged log folder has endless ways to fail; the tab says so and stays alive
            _logger.warning("the Flow tab could not answer %s", request.path, exc_info=True)
            payload, code = {"error": f"this data could not be read ({type(error).__name__}: {error})"}, 500
        return http_util.Respond(request, to_json(payload), "application/json", code=code)

    return application
