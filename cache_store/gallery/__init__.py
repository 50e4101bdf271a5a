"""A page that shows a cache's contents: random rows, unusual rows, rejected rows.

matplotlib takes half a second to import, so programs import `gallery.gallery` only when they make one.
"""
