"""A page on which a person sees what a cache holds: rows drawn, rows that stand out, rows that were rejected.

matplotlib takes half a second to import, so programs import `gallery.gallery` only when they make one.
"""
