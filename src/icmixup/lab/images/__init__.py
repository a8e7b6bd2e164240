"""Image files as pixels, in threads or processes. Nothing here imports torch: a process starts faster."""
