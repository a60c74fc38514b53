"""`watch` and `wrap` on models of four libraries, each judged alike, against a count from the plain model's own graph.

    python -m benchmarks.zoo                         # all that is installed, each section written into docs/zoo.md
    python -m benchmarks.zoo timm                    # one section: text, timm or libraries
    python -m benchmarks.zoo timm resnet crossvit    # these anew; the page is not written

Rows are kept in build/zoo and taken up again: remove it to judge all anew.


    expected.py     merges of a plain model, from its autograd graph
    judging.py      one model: watched, wrapped, compared on other inputs; every connection moves something
    images.py       timm's families
    text.py         transformers' language models
    libraries.py    vit-pytorch, x-transformers, diffusers
    page.py         docs/zoo.md
"""
