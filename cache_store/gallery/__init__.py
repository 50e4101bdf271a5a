"""A page that shows a cache's contents: cached rows and rejected rows."""
