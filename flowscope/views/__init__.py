"""What people look at: a TensorBoard tab and one HTML file, drawn by the same JavaScript. Nothing here imports torch.

    plugin.py      the tab "Flow" (entry point `tensorboard_plugins`): reads a log folder through TensorBoard
    report.py      write_report(runs, path): one self-contained file
    series.py      a metric over depth and steps, made to fit a screen
    overview.py    what there is in a run, and what is wrong with it
    assets.py      the files of web/, served or inlined

The browser gets JSON and never HTML: names of modules are untrusted text.
"""
