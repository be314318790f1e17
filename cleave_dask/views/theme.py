"""Colours, styles and number formats of the dashboard page and the report.

Colours are those of Okabe and Ito, which people with any kind of colour vision can tell apart, on Dask's background.
"""

from __future__ import annotations

STAGE_COLOURS = {"download": "#56B4E9", "compute": "#E69F00", "upload": "#009E73", "verify": "#CC79A7"}
"""What a device does with a tile; verifying is the server's part."""

LOSS = "#0072B2"
LOSS_PALE = "#9ecae1"
PAPER = "#FAFAFA"  # the background of Dask's pages
INK, PALE, GREY = "#333333", "#777777", "#b8b8b8"
ALARM = "#D55E00"
FRAME = "rgba(51, 51, 51, 0.6)"  # of a tile that was done for another device; narrow bars stay to be seen through it
ACTIVE = "#eaaa6d"  # Dask's own, of its navigation bar

STATE_COLOURS = {
    "here": INK,
    "measuring": LOSS,
    "paused": PALE,
    "late": ALARM,
    "left": GREY,
    "quarantined": ALARM,
}

EVENT_COLOURS = {"joined": "#009E73", "left": "#999999", "late": "#E69F00", "quarantined": ALARM}

STYLE = """
:host { font-family: Helvetica, Arial, sans-serif; font-size: 13px; color: #333; display: block; width: 100%; }
.bk-clearfix { width: 100%; }
h2 { font-size: 13px; margin: 0 0 6px 0; font-weight: bold; color: #444; }
.why { color: #777; margin: -3px 0 6px 0; font-size: 12px; }
.cards { display: flex; flex-wrap: wrap; gap: 8px; }
.card { flex: 1 1 120px; background: white; border: 1px solid #e3e3e3; border-radius: 4px; padding: 6px 12px; }
.card .label { color: #777; font-size: 12px; }
.card .value { font-size: 21px; line-height: 26px; font-variant-numeric: tabular-nums; white-space: nowrap; }
.card .note { color: #777; font-size: 12px; min-height: 14px; white-space: nowrap; overflow: hidden;
  text-overflow: ellipsis; }
.empty { padding: 12px 16px; background: white; border: 1px solid #e3e3e3; border-left: 4px solid #eaaa6d;
  border-radius: 4px; font-size: 14px; }
.bars { display: grid; grid-template-columns: 108px 1fr 44px; gap: 3px 8px; align-items: center; }
.bars .track { background: #ececec; border-radius: 2px; height: 13px; overflow: hidden; }
.bars .fill { height: 100%; background: #c4c4c4; }
.bars .binds { background: #E69F00; }
.bars .name { text-align: right; white-space: nowrap; }
.bars .number { font-variant-numeric: tabular-nums; color: #555; }
.bars b { color: #333; }
.steps { display: grid; grid-template-columns: 108px 1fr 110px; gap: 3px 8px; align-items: center; }
.steps .track { background: #ececec; border-radius: 2px; height: 9px; overflow: hidden; }
.steps .fill { height: 100%; background: #0072B2; }
.steps .name { text-align: right; }
.steps .number { color: #555; font-variant-numeric: tabular-nums; }
.events { list-style: none; margin: 0; padding: 0; overflow-y: auto; max-height: 100%; }
.events li { padding: 3px 0; border-bottom: 1px solid #ececec; line-height: 17px; }
.events .dot { display: inline-block; width: 9px; height: 9px; border-radius: 50%; margin-right: 6px; }
.events .time { color: #888; font-variant-numeric: tabular-nums; margin-right: 6px; }
.events .more { color: #777; }
"""

TABLE_STYLE = """
.slick-header-column { background: #eee !important; font-weight: bold; color: #444; }
.slick-cell { font-size: 12px; font-variant-numeric: tabular-nums; }
.bk-data-table { z-index: 0; }
"""

_GREY_WHEN_GONE = "<% const gone = state === 'left' || state === 'quarantined'; %>"


def cell(expression: str, *, align: str = "right", title: str = "") -> str:
    """A cell's template; those of a device that is gone are grey. `title` is what pointing at it shows."""
    style = f'display:block;text-align:{align};color:<%= gone ? "{GREY}" : "inherit" %>'
    hint = f' title="<%= {title} %>"' if title else ""
    return f"{_GREY_WHEN_GONE}<span style='{style}'{hint}><%= {expression} %></span>"


def si(unit: str) -> str:
    """A number with three digits and a prefix: 12.5 MB/s; nothing where it is not known."""
    steps = "[[1e12,'T'],[1e9,'G'],[1e6,'M'],[1e3,'k']]"
    found = f"(({steps}).find(s => value >= s[0]) || [1, ''])"
    return f"value === null || isNaN(value) ? '' : (value / {found}[0]).toPrecision(3) + ' ' + {found}[1] + '{unit}'"


def percent() -> str:
    """A share of one as a percentage."""
    return "(100 * value).toFixed(value < 0.0995 ? 1 : 0) + ' %'"


def milliseconds() -> str:
    """Seconds as milliseconds."""
    return "value === null || isNaN(value) ? '' : (1000 * value).toPrecision(2) + ' ms'"


def count() -> str:
    """A whole number; nothing for none, so that what is there stands out."""
    return "value ? value.toLocaleString('en') : ''"
