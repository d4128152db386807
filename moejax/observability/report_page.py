"""A report as one HTML page that needs nothing beside it: no script, no network, no other file."""

from __future__ import annotations

import base64
import html
import pathlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Section(NamedTuple):
    """A heading, a sentence under it, and what follows: a picture, or rows of a table."""

    title: str
    text: str = ""
    picture: pathlib.Path | None = None
    header: Sequence[str] = ()
    rows: Iterable[Sequence[str]] = ()


# Whatever a name in the run may hold, the page can load nothing and run nothing.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #f6f7f8; margin: 0; }
main { max-width: 1240px; margin: 0 auto; padding: 28px 24px 60px; }
h1 { font-size: 24px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 0 0 4px; }
p { margin: 0 0 10px; color: #555; }
section { background: #fff; border: 1px solid #e3e5e8; border-radius: 8px; padding: 18px 20px;
  margin-top: 18px; overflow-x: auto; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 14px 20px;
  margin: 18px 0 0; }
dt { color: #6b7078; font-size: 12.5px; }
dd { margin: 0; font-size: 17px; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
img { max-width: 100%; height: auto; display: block; margin: 0 auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th { text-align: left; color: #6b7078; font-weight: 500; font-size: 12.5px; }
th, td { padding: 3px 22px 3px 0; border-bottom: 1px solid #eef0f2; vertical-align: top; }
"""


def page(
    title: str, under_title: str, facts: Iterable[tuple[str, str]], sections: Iterable[Section]
) -> str:
    """The HTML text.

    Args:
      title, under_title: the head of the page.
      facts: (name, value) pairs shown as tiles.
      sections: in order; pictures are PNG files and are embedded.
    """
    e = html.escape
    tiles = "".join(f"<div><dt>{e(name)}</dt><dd>{e(value)}</dd></div>\n" for name, value in facts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{e(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{e(title)}</h1>\n<p>{e(under_title)}</p>\n<section>\n<h2>Summary</h2>\n"
        f"<dl>\n{tiles}</dl>\n</section>\n"
        + "".join(map(_section, sections))
        + "</main>\n</body>\n</html>\n"
    )


def _section(section: Section) -> str:
    e = html.escape
    out = f"<section>\n<h2>{e(section.title)}</h2>\n"
    out += f"<p>{e(section.text)}</p>\n" if section.text else ""
    if section.picture is not None:
        data = base64.b64encode(section.picture.read_bytes()).decode("ascii")
        out += f'<img alt="{e(section.title)}" src="data:image/png;base64,{data}">\n'
    rows = list(section.rows)
    if rows:
        head = "".join(f"<th>{e(name)}</th>" for name in section.header)
        body = "".join(f"<tr>{''.join(f'<td>{e(x)}</td>' for x in row)}</tr>\n" for row in rows)
        out += f"<table>\n<tr>{head}</tr>\n{body}</table>\n"
    return out + "</section>\n"
