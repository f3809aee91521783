"""The page that shows a trace, and its plain relatives. Static files and the standard library only: nothing of the package is imported.

    page/          modules, style and one HTML file, served as they are: no build step
    bundle.py      the same page as one self-contained HTML file with a trace inside
    server.py      the page and trace files on the loopback address
    terminal.py    one line a round
    perfetto.py    Chrome's trace format
"""
