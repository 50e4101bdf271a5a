"""A page that shows a cache's contents: random rows, rejected rows, histograms.

matplotlib takes half a second to import, so programs import `gallery.gallery` only when they make one.
"""
