"""report.html: finished runs as one page, with its data, styles and scripts inside.

study        which runs are compared, and their statistics
summaries    what is kept of the predictions of a run
pictures     test images as data URIs
between      scores of trained networks on mixed test images
data         everything that the page shows, as JSON
page         the template filled in, and written
live         the page rewritten after each run of a comparison
"""
