"""A page that shows a cache's contents: cached rows, rejected rows, histograms."""
