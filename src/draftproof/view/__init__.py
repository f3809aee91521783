"""The page that shows a trace, and its plain relatives. Nothing of the package is imported; only the charts need more than the
standard library.

    page/          modules, style and one HTML file, served as they are: no build step
    bundle.py      the same page as one self-contained HTML file with a trace inside
    server.py      the page and trace files on the loopback address
    terminal.py    one line a round
    perfetto.py    Chrome's trace format
    style.py       what pictures look like (matplotlib): the page's colours
    charts*.py     the charts themselves, drawn from `trace.figures`
"""
