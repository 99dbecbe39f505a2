"""Timeline -> Perfetto trace, HTML page, SVG/PNG figure, tables in the terminal; and line charts for sweeps.

Reads Timelines through `atlas.ir` and nothing else. resvg is imported only where a PNG is written.
"""

from atlas.view.chart import write_curves
from atlas.view.page import write_page
from atlas.view.perfetto import write_trace
from atlas.view.svg import Figure
from atlas.view.table import compare_table, results_table

__all__ = [
    "Figure",
    "compare_table",
    "results_table",
    "write_curves",
    "write_page",
    "write_trace",
]
